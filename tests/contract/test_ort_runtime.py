"""OrtRuntime against real ONNX models, beside the same sums in numpy."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from devices.runtime import CPU, OrtRuntime, Runtime
from mdp.bundle import Bundle, model_path
from mdp.crop import Pixels
from mdp.errors import AgentError
from mdp.plan import Assignment
from tests.support.bundles import CHANNELS, DEVICES, SIZES, colour_model, write_bundle

CUDA = "CUDAExecutionProvider"
K = 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("runtime") / "bundle"))


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Path:
    return bundle.verified(model_path(K))


@pytest.fixture(scope="module")
def assignment(bundle: Bundle) -> Assignment:
    return bundle.assignment(DEVICES[K])


def changed(assignment: Assignment, **changes: object) -> Assignment:
    return msgspec.structs.replace(assignment, **changes)


def noise(batch: int, size: int = SIZES[K]) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_logits_are_those_of_numpy(model: Path, assignment: Assignment, batch: int) -> None:
    runtime: Runtime = OrtRuntime(model, assignment, num_classes=3)
    runtime.warm_up()
    pixels = noise(batch)
    contribution = runtime.run(pixels)
    shares = pixels.astype(np.float64).mean(axis=(1, 2)) @ CHANNELS.T / 255
    np.testing.assert_allclose(contribution.boost, shares * 2.0 / (K + 1), rtol=1e-5)
    np.testing.assert_allclose(contribution.bag, shares * (4.0 + K), rtol=1e-5)
    assert contribution.boost.dtype == contribution.bag.dtype == np.float32
    assert contribution.boost.shape == (batch, 3)


def test_a_batch_is_as_good_as_one_by_one(model: Path, assignment: Assignment) -> None:
    runtime = OrtRuntime(model, assignment, num_classes=3)
    pixels = noise(3)
    together = runtime.run(pixels)
    for row in range(3):
        alone = runtime.run(pixels[row : row + 1])
        np.testing.assert_allclose(alone.bag[0], together.bag[row], rtol=1e-5)


def test_a_crop_that_may_not_be_written_is_fine(model: Path, assignment: Assignment) -> None:
    pixels = np.frombuffer(noise(1).tobytes(), dtype=np.uint8).reshape(1, SIZES[K], SIZES[K], 3)
    assert not pixels.flags.writeable
    OrtRuntime(model, assignment, num_classes=3).run(pixels)


@pytest.mark.parametrize(("asked", "given"), [(None, 2), (1, 1), (3, 3)])
def test_threads_are_the_plan_s_unless_the_operator_says_otherwise(
    model: Path, assignment: Assignment, asked: int | None, given: int
) -> None:
    planned = changed(assignment, threads=2)
    runtime = OrtRuntime(model, planned, num_classes=3, threads=asked)
    options = runtime._session.get_session_options()
    assert options.intra_op_num_threads == given
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_the_planned_provider_runs_it(model: Path, assignment: Assignment) -> None:
    runtime = OrtRuntime(model, assignment, num_classes=3)
    assert runtime.provider == CPU
    assert runtime.fallback is False


def test_a_provider_that_is_not_there_is_refused(model: Path, assignment: Assignment) -> None:
    planned = changed(assignment, provider=CUDA)
    expected = rf"the plan asks for {CUDA}, this device has .*{CPU}; --allow-fallback accepts"
    with pytest.raises(AgentError, match=expected):
        OrtRuntime(model, planned, num_classes=3)


def test_a_fallback_is_allowed_and_says_so(model: Path, assignment: Assignment) -> None:
    planned = changed(assignment, provider=CUDA)
    runtime = OrtRuntime(model, planned, num_classes=3, allow_fallback=True)
    assert runtime.provider == CPU
    assert runtime.fallback is True
    runtime.warm_up()
    assert OrtRuntime(model, assignment, num_classes=3, allow_fallback=True).fallback is False


def test_another_image_size_is_refused(model: Path, assignment: Assignment) -> None:
    submodel = msgspec.structs.replace(assignment.submodel, image_size=16)
    expected = r"model\.onnx: expected one input 'images' of uint8 \[N, 16, 16, 3\], got .*12, 12"
    with pytest.raises(AgentError, match=expected):
        OrtRuntime(model, changed(assignment, submodel=submodel), num_classes=3)


def test_another_number_of_classes_is_refused(model: Path, assignment: Assignment) -> None:
    expected = r"model\.onnx: expected outputs 'boost' and 'bag' with 10 classes, got .*'bag': 3"
    with pytest.raises(AgentError, match=expected):
        OrtRuntime(model, assignment, num_classes=10)


def written(folder: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    model = colour_model(SIZES[K], 1.0, 4.0)
    change(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def bag_node(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.output[0] == "bag")


def rename_output(model: onnx.ModelProto) -> None:
    bag_node(model).output[0] = model.graph.output[1].name = "logits"


def float_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (rename_output, r"expected outputs 'boost' and 'bag' with 3 classes, got .*logits"),
        (float_input, r"expected one input 'images' of uint8 .* got .*tensor\(float\)"),
    ],
)
def test_another_signature_is_refused(
    tmp_path: Path,
    assignment: Assignment,
    change: Callable[[onnx.ModelProto], object],
    expected: str,
) -> None:
    with pytest.raises(AgentError, match=expected):
        OrtRuntime(written(tmp_path, change), assignment, num_classes=3)


@pytest.mark.parametrize("content", [b"", b"I am not a model", b"\x08\x08" + b"\xff" * 100])
def test_a_corrupt_file_is_refused(tmp_path: Path, assignment: Assignment, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(AgentError, match=r"model\.onnx: onnxruntime cannot load it: "):
        OrtRuntime(path, assignment, num_classes=3)


def test_a_missing_file_is_refused(tmp_path: Path, assignment: Assignment) -> None:
    with pytest.raises(AgentError, match=r"none\.onnx: onnxruntime cannot load it: "):
        OrtRuntime(tmp_path / "none.onnx", assignment, num_classes=3)


def scaled(value: float) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        weight = np.full((3, 3), value, dtype=np.float32)
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weight, "bag_weight"))

    return change


def test_a_model_without_finite_logits_is_refused_before_ready(
    tmp_path: Path, assignment: Assignment
) -> None:
    runtime = OrtRuntime(written(tmp_path, scaled(np.nan)), assignment, num_classes=3)
    with pytest.raises(AgentError, match="gives logits that are not finite on a black picture"):
        runtime.warm_up()


def test_a_model_that_loads_but_cannot_run_is_refused_before_ready(
    tmp_path: Path, assignment: Assignment
) -> None:
    def impossible(model: onnx.ModelProto) -> None:
        # A shape that only shows to be wrong when it is computed.
        shape = onnx.numpy_helper.from_array(np.array([5, 7], dtype=np.int64), "shape")
        model.graph.initializer.append(shape)
        bag_node(model).output[0] = "bent"
        model.graph.node.append(onnx.helper.make_node("Reshape", ["bent", "shape"], ["flat"]))
        model.graph.node.append(onnx.helper.make_node("MatMul", ["flat", "eye"], ["bag"]))
        eye = onnx.numpy_helper.from_array(np.zeros((7, 3), dtype=np.float32), "eye")
        model.graph.initializer.append(eye)

    runtime = OrtRuntime(written(tmp_path, impossible), assignment, num_classes=3)
    with pytest.raises(AgentError, match="the model cannot be run: "):
        runtime.warm_up()
