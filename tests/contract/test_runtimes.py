"""Both runtimes through the same checks, with real ONNX models, beside the same sums in numpy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from devices.agent.options import ServeOptions
from mdp.errors import AgentError, ConfigError
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.model_file import ModelFile
from mdp.pictures.crop import Pixels
from mdp.runtimes import openvino as openvino_runtime
from mdp.runtimes.base import CPU, Execution, NotHereError, Runtime
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.runtimes.openvino import PREFIX, OpenVinoRuntime
from mdp.runtimes.select import open_runtime
from mdp.testing.bundles import CHANNELS, DEVICES, SIZES, colour_model, write_bundle
from tests.support.bundles import change_assignment, relist

CUDA = "CUDAExecutionProvider"
K = 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("runtime") / "bundle"))


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> ModelFile:
    return bundle.model(K)


@pytest.fixture(params=["onnxruntime", "openvino"])
def name(request: pytest.FixtureRequest) -> str:
    """Name of what the plan asks for."""
    return str(request.param)


@pytest.fixture
def planned(bundle: Bundle) -> Execution:
    return Execution.of(bundle.assignment(DEVICES[K]))


@pytest.fixture
def execution(planned: Execution, name: str) -> Execution:
    return change_execution(planned, runtime=name)


def change_execution(execution: Execution, **changes: object) -> Execution:
    return msgspec.structs.replace(execution, **changes)


def noise(batch: int, size: int = SIZES[K]) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)


def with_heads(model: ModelFile, heads: int) -> ModelFile:
    """The model, or the same without its boost head."""
    loaded = onnx.load_from_string(model.content)
    if heads == 1:
        del loaded.graph.output[0]
        loaded.graph.node.remove(next(n for n in loaded.graph.node if "boost" in n.output))
    return ModelFile(model.path, loaded.SerializeToString())


@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (3, 2), (3, 1)])
def test_logits_match_numpy(model: ModelFile, execution: Execution, batch: int, heads: int) -> None:
    model = with_heads(model, heads)
    runtime: Runtime = open_runtime(model, execution, num_classes=3)
    runtime.warm_up()
    pixels = noise(batch)
    # As those of a message are.
    pixels.flags.writeable = False
    contribution = runtime.run(pixels)
    shares = pixels.astype(np.float64).mean(axis=(1, 2)) @ CHANNELS.T / 255
    wanted = [shares * 2.0 / (K + 1), shares * (4.0 + K)][-heads:]
    np.testing.assert_allclose(contribution.heads, wanted, rtol=1e-5)
    assert {(head.dtype, head.shape) for head in contribution.heads} == {
        (np.dtype(np.float32), (batch, 3))
    }


@pytest.mark.parametrize("spin", [False, True])
def test_threads_and_spinning_are_planned(model: ModelFile, planned: Execution, spin: bool) -> None:
    runtime = OrtRuntime(model, change_execution(planned, threads=3, spin=spin), num_classes=3)
    options = runtime._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    entry = options.get_session_config_entry
    assert entry("session.intra_op.allow_spinning") == str(int(spin))
    # Between runs they do not.
    assert not spin or entry("session.force_spinning_stop") == "1"


# It takes no more threads than there are cores.
@pytest.mark.parametrize("threads", [1, 2])
def test_openvino_gets_one_unpinned_stream(
    model: ModelFile, planned: Execution, threads: int
) -> None:
    runtime = OpenVinoRuntime(model, change_execution(planned, threads=threads), num_classes=3)
    said = runtime._compiled.get_property
    assert said("INFERENCE_NUM_THREADS") == min(threads, os.cpu_count() or 1)
    assert said("NUM_STREAMS") == 1
    assert said("ENABLE_CPU_PINNING") is False
    assert str(said("PERFORMANCE_HINT")).endswith("LATENCY")


def test_the_planned_provider_or_a_fallback(
    model: ModelFile, execution: Execution, name: str
) -> None:
    for allow_fallback in (False, True):
        runtime = open_runtime(model, execution, num_classes=3, allow_fallback=allow_fallback)
        assert isinstance(runtime, OpenVinoRuntime if name == "openvino" else OrtRuntime)
        assert runtime.provider == (f"{PREFIX}CPU" if name == "openvino" else CPU)
        assert runtime.fallback is False
    here = rf"{CUDA}, this device has .*{CPU}"
    if name == "openvino":
        here = rf"openvino on {CUDA}, openvino finds .*CPU.* here"
    elsewhere = change_execution(execution, provider=CUDA)
    with pytest.raises(AgentError, match=f"^the plan asks for {here}$"):
        open_runtime(model, elsewhere, num_classes=3)
    assert fell_back(model, elsewhere)


def fell_back(model: ModelFile, execution: Execution) -> bool:
    """Tell whether onnxruntime serves, after saying that it is not what was planned."""
    runtime = open_runtime(model, execution, num_classes=3, allow_fallback=True)
    runtime.warm_up()
    return isinstance(runtime, OrtRuntime) and runtime.provider == CPU and runtime.fallback


def test_openvino_that_is_not_installed_is_refused_or_replaced(
    model: ModelFile, planned: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'openvino'")

    monkeypatch.setattr(openvino_runtime, "import_openvino", missing)
    asked = change_execution(planned, runtime="openvino")
    expected = (
        r"^the plan asks for openvino in fp32, which is not installed "
        r"\(pip install '\.\[openvino\]' in a checkout of MDP\)$"
    )
    with pytest.raises(NotHereError, match=expected):
        open_runtime(model, asked, num_classes=3)
    assert fell_back(model, asked)


class Plain:
    """A processor without bf16."""

    def get_property(self, device: str, key: str) -> list[str]:
        assert (device, key) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return ["INT8", "FP32"]


def test_bf16_is_refused_where_the_processor_only_imitates_it(
    model: ModelFile, planned: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_runtime, "core_of", lambda openvino: Plain())
    asked = change_execution(planned, runtime="openvino", precision="bf16")
    expected = "openvino in bf16, this processor computes FP32, INT8 only$"
    with pytest.raises(NotHereError, match=expected):
        open_runtime(model, asked, num_classes=3)
    assert fell_back(model, asked)


@pytest.mark.parametrize(
    ("runtime", "precision", "said"),
    [
        ("onnxruntime", "bf16", "bf16, this is onnxruntime"),
        ("openvino", "fp16", "openvino in fp16, openvino has fp32, bf16, int8-static"),
        ("openvino", "int8", "openvino in int8, openvino has fp32, bf16, int8-static"),
    ],
)
def test_a_precision_that_a_runtime_has_not_or_is_slow_at_is_refused(
    model: ModelFile, planned: Execution, runtime: str, precision: str, said: str
) -> None:
    asked = change_execution(planned, runtime=runtime, precision=precision)
    with pytest.raises(NotHereError, match=f"^the plan asks for {said}$"):
        open_runtime(model, asked, num_classes=3)
    assert precision != "bf16" or fell_back(model, asked)


def test_bf16_is_computed_in_bf16(model: ModelFile, planned: Execution) -> None:
    core = openvino_runtime.core_of(openvino_runtime.import_openvino())
    if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bf16")
    asked = change_execution(planned, runtime="openvino", precision="bf16")
    runtime = OpenVinoRuntime(model, asked, num_classes=3)
    hint = runtime._compiled.get_property("INFERENCE_PRECISION_HINT")
    assert hint.get_type_name() == "bf16"


def says(precision: str) -> Callable[[onnx.ModelProto], object]:
    return lambda model: onnx.helper.set_model_props(model, {"mdp_precision": precision})


def write_model(folder: Path, change: Callable[[onnx.ModelProto], object]) -> ModelFile:
    model = onnx.load_from_string(colour_model(SIZES[K], 1.0, 4.0))
    change(model)
    return ModelFile(folder / "model.onnx", model.SerializeToString())


def bag_node(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.output[0] == "bag")


def rename_output(model: onnx.ModelProto) -> None:
    bag_node(model).output[0] = model.graph.output[1].name = "logits"


def float_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("change", "changes", "classes", "expected"),
    [
        (says("int8"), {}, 3, r"expected a model in fp32, as planned, got one in int8$"),
        (
            says("fp32"),
            {"image_size": 16},
            3,
            r"input 'images' of uint8 \[N, 16, 16, 3\], got .*12",
        ),
        (says("fp32"), {}, 10, r"an output 'bag', or .*, with 10 classes, got .*'bag': 3"),
        (rename_output, {}, 3, r"an output 'bag', or .*, with 3 classes, got .*logits"),
        (float_input, {}, 3, r"input 'images' of uint8 .* got .*(tensor\(float\)|f32)"),
    ],
)
def test_a_model_that_is_not_as_planned_is_refused(
    tmp_path: Path,
    execution: Execution,
    change: Callable[[onnx.ModelProto], object],
    changes: dict[str, object],
    classes: int,
    expected: str,
) -> None:
    with pytest.raises(AgentError, match=rf"model\.onnx: .*{expected}"):
        open_runtime(
            write_model(tmp_path, change),
            change_execution(execution, **changes),
            num_classes=classes,
        )


@pytest.mark.parametrize("content", [b"", b"I am not a model", b"\x08\x08" + b"\xff" * 100])
def test_a_corrupt_file(tmp_path: Path, execution: Execution, name: str, content: bytes) -> None:
    expected = rf"model\.onnx: ({name} cannot load it|expected one input|expected an ONNX model)"
    with pytest.raises((AgentError, ConfigError), match=expected):
        open_runtime(ModelFile(tmp_path / "model.onnx", content), execution, num_classes=3)


def test_the_file_is_not_kept_in_memory(model: ModelFile, execution: Execution) -> None:
    """Beside the weights that were made of it."""
    before = sys.getrefcount(model.content)
    runtime = open_runtime(model, execution, num_classes=3)
    runtime.warm_up()
    after = sys.getrefcount(model.content)  # in an assertion, pytest would keep one itself
    assert after == before


def test_weights_in_another_file_are_not_loaded(tmp_path: Path, name: str) -> None:
    """No hash covers that file: changed after the export, it would change the answers."""
    folder = write_bundle(tmp_path / "bundle")
    change_assignment(folder, runtime=name)
    path = folder / model_path(0)
    model = onnx.load(path)
    weight = model.graph.initializer[1]
    (path.parent / "weights.bin").write_bytes(weight.raw_data)
    onnx.external_data_helper.set_external_data(weight, "weights.bin")
    weight.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    relist(folder, model_path(0))
    candidate = ServeOptions(bundle=folder, device=DEVICES[0]).loadable()
    with pytest.raises(ConfigError, match=r"model\.onnx: the model names another file for its wei"):
        candidate.load()


def scale_weights(value: float) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        weight = np.full((3, 3), value, dtype=np.float32)
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weight, "bag_weight"))

    return change


def test_logits_that_are_not_finite_are_refused(tmp_path: Path, execution: Execution) -> None:
    runtime = open_runtime(write_model(tmp_path, scale_weights(np.nan)), execution, num_classes=3)
    with pytest.raises(AgentError, match="gives logits that are not finite on a black picture"):
        runtime.warm_up()


def test_a_model_that_cannot_run(tmp_path: Path, execution: Execution, name: str) -> None:
    def impossible(model: onnx.ModelProto) -> None:
        # A shape that only shows to be wrong when it is computed.
        shape = onnx.numpy_helper.from_array(np.array([5, 7], dtype=np.int64), "shape")
        model.graph.initializer.append(shape)
        bag_node(model).output[0] = "bent"
        model.graph.node.append(onnx.helper.make_node("Reshape", ["bent", "shape"], ["flat"]))
        model.graph.node.append(onnx.helper.make_node("MatMul", ["flat", "eye"], ["bag"]))
        eye = onnx.numpy_helper.from_array(np.zeros((7, 3), dtype=np.float32), "eye")
        model.graph.initializer.append(eye)

    path = write_model(tmp_path, impossible)
    expected = rf"the model cannot be run: |model\.onnx: {name} cannot load it: "
    with pytest.raises(AgentError, match=expected):
        open_runtime(path, execution, num_classes=3).warm_up()


HEAD = """
import sys
from pathlib import Path

import msgspec

from mdp.formats.model_file import ModelFile
from mdp.runtimes.base import Execution

def model():
    execution = msgspec.json.decode(sys.argv[2], type=Execution)
    return ModelFile.read(Path(sys.argv[1])), execution

"""
REPORTED = """
from mdp.runtimes.openvino import core_of, import_openvino

openvino = import_openvino()
core_of(openvino).get_property("CPU", "FULL_DEVICE_NAME")
print(sorted(name for name in sys.modules if "telemetry" in name or name == "openvino.tools.ovc"))
"""
SERVED = """
from mdp.runtimes.onnxruntime import OrtRuntime

OrtRuntime(*model(), num_classes=3).warm_up()
"""
SIGNALLED = """
import faulthandler, os, signal, threading
from mdp.runtimes.openvino import OpenVinoRuntime

# Gives the main thread a signal stack of its own, on which Python's handlers run.
faulthandler.enable()
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
kept = [OpenVinoRuntime(*model(), num_classes=3)]
dropping = threading.Thread(target=kept.clear)
dropping.start()
dropping.join()
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.parametrize(
    ("program", "runtime", "printed"),
    [
        # The package's plain import keeps an id in the home folder and sends it to its maker.
        (REPORTED, "openvino", "[]\n"),
        # Of itself onnxruntime keeps an id and a queue of reports there, and sends them.
        (SERVED, "onnxruntime", ""),
        # A signal is survived after another thread has dropped a model.
        (SIGNALLED, "openvino", "handled\n"),
    ],
    ids=["openvino", "onnxruntime", "signal"],
)
def test_a_runtime_reports_nothing_of_its_use_and_survives_signals(
    tmp_path: Path, model: ModelFile, planned: Execution, program: str, runtime: str, printed: str
) -> None:
    kept = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    execution = msgspec.json.encode(change_execution(planned, runtime=runtime)).decode()
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(model.path), execution],
        env={**{k: v for k, v in os.environ.items() if k not in kept}, "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert list(tmp_path.rglob("*")) == []
