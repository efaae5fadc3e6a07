"""An onnxruntime for CUDA and TensorRT on a machine that has no GPU: its own sessions, but for the
provider."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest

from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.runtimes.base import CPU, Execution, NotHereError
from mdp.runtimes.cuda import CUDA, TENSORRT, load_libraries
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.testing.bundles import DEVICES, SIZES, write_bundle

NO_LIBRARY = "Failed to load libcublas"


class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
    """On the processor, whatever it says."""

    said = CUDA

    def get_providers(self) -> list[str]:
        return [self.said, CPU]


class BuildForCuda:
    """The module `onnxruntime`, as a build for CUDA is."""

    SessionOptions = onnxruntime.SessionOptions

    def __init__(self, *, starts: bool = True, raises: str = "") -> None:
        self.starts, self.raises = starts, raises
        self.asked: list[Any] = []
        self.preloaded = 0

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def preload_dlls(self) -> None:
        self.preloaded += 1
        print(NO_LIBRARY)

    # Named as onnxruntime's.
    def InferenceSession(  # noqa: N802
        self, model: bytes, options: Any, *, providers: list[Any], enable_fallback: int
    ) -> Any:
        assert enable_fallback == 0
        ((provider, wishes),) = providers
        self.asked.append((provider, wishes))
        if provider == CUDA and self.raises:
            raise RuntimeError(self.raises)
        session = Session(model, options, providers=[CPU])
        session.said = CUDA if provider == CUDA and self.starts else CPU
        return session


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("cuda") / "bundle"))


@pytest.fixture
def model(bundle: Bundle) -> ModelFile:
    return bundle.model(0)


@pytest.fixture
def planned(bundle: Bundle) -> Execution:
    return msgspec.structs.replace(Execution.of(bundle.assignment(DEVICES[0])), provider=CUDA)


def with_build(monkeypatch: pytest.MonkeyPatch, build: BuildForCuda) -> BuildForCuda:
    monkeypatch.setitem(sys.modules, "onnxruntime", build)
    return build


def test_fp32_is_computed_in_fp32(
    monkeypatch: pytest.MonkeyPatch, model: ModelFile, planned: Execution
) -> None:
    build = with_build(monkeypatch, BuildForCuda())
    runtime = OrtRuntime(model, planned, num_classes=3)
    assert (runtime.provider, runtime.fallback) == (CUDA, False)
    assert build.asked == [(CUDA, {"use_tf32": "0"})]
    black = np.zeros((1, SIZES[0], SIZES[0], 3), dtype=np.uint8)
    assert runtime.run(black).bag.shape == (1, 3)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (BuildForCuda(starts=False), "no such device, or its driver or libraries are missing"),
        (BuildForCuda(raises="CUDA failure 100:\n no device"), "CUDA failure 100: no device"),
    ],
)
def test_a_provider_that_cannot_start_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    model: ModelFile,
    planned: Execution,
    build: BuildForCuda,
    reason: str,
) -> None:
    with_build(monkeypatch, build)
    with pytest.raises(NotHereError, match=f"{CUDA}, onnxruntime lists it here but") as caught:
        OrtRuntime(model, planned, num_classes=3)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    runtime = OrtRuntime(model, planned, num_classes=3, allow_fallback=True)
    assert (runtime.provider, runtime.fallback) == (CPU, True)


def test_a_file_that_is_no_model_is_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: Execution
) -> None:
    with_build(monkeypatch, BuildForCuda(raises="protobuf parsing failed"))
    with pytest.raises(AgentError, match="cannot load it") as caught:
        OrtRuntime(ModelFile(tmp_path / "model.onnx", b""), planned, num_classes=3)
    assert not isinstance(caught.value, NotHereError)


def test_libraries_are_loaded_once_and_only_for_who_needs_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: ModelFile,
    planned: Execution,
) -> None:
    build = with_build(monkeypatch, BuildForCuda())
    on_processor = msgspec.structs.replace(planned, provider=CPU)
    OrtRuntime(model, on_processor, num_classes=3)
    for_processors = BuildForCuda()
    for_processors.get_available_providers = lambda: [CPU]  # type: ignore[method-assign]
    load_libraries(for_processors)
    assert build.preloaded == for_processors.preloaded == 0
    for _ in range(2):
        OrtRuntime(model, planned, num_classes=3)
    assert build.preloaded == 1
    # Standard output is for whoever reads an agent's events.
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{NO_LIBRARY}\n")


class BuildForTensorRT(BuildForCuda):
    """Starts what is in `here`; of the others it raises an error, or is on the processor."""

    def __init__(self, here: set[str], *, silent: bool = False) -> None:
        super().__init__()
        self.here, self.silent = here, silent
        #: Whether TensorRT had to take the whole graph.
        self.whole: list[bool] = []

    def get_available_providers(self) -> list[str]:
        return [TENSORRT, CUDA, CPU]

    def InferenceSession(  # noqa: N802
        self, model: bytes, options: Any, *, providers: list[Any], enable_fallback: int
    ) -> Any:
        ((provider, wishes),) = providers
        self.asked.append((provider, wishes))
        if provider == TENSORRT:
            self.whole.append(self.strict(options))
        if provider not in {*self.here, CPU} and not self.silent:
            raise RuntimeError("Please install\n TensorRT libraries")
        plain = onnxruntime.SessionOptions()
        session = Session(model, plain, providers=[CPU])
        session.said = provider if provider in self.here else CPU
        return session

    @staticmethod
    def strict(options: Any) -> bool:
        try:
            return bool(options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1")
        except RuntimeError:
            return False


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Set by the code under test; taken back afterwards.
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    return tmp_path / "cache" / "mdp" / "tensorrt"


def on_tensorrt(planned: Execution, precision: str = "fp32") -> Execution:
    return msgspec.structs.replace(planned, provider=TENSORRT, precision=precision)


@pytest.mark.parametrize(
    ("precision", "fp16", "int8"),
    [("fp32", "0", "0"), ("fp16", "1", "0"), ("int8-static", "0", "1")],
)
def test_tensorrt_computes_the_whole_graph_as_planned_and_keeps_its_engines(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    bundle: Bundle,
    planned: Execution,
    precision: str,
    fp16: str,
    int8: str,
) -> None:
    build = BuildForTensorRT({TENSORRT})
    monkeypatch.setitem(sys.modules, "onnxruntime", build)
    model = bundle.model(0)
    runtime = OrtRuntime(model, on_tensorrt(planned, precision), num_classes=3)
    assert (runtime.provider, runtime.fallback) == (TENSORRT, False)
    folder = cache / hashlib.sha256(model.content).hexdigest()
    wishes = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_fp16_enable": fp16,
        "trt_int8_enable": int8,
    }
    assert (build.asked, build.whole) == ([(TENSORRT, wishes)], [True])
    # Engines are code.
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"


def test_another_model_of_the_same_shape_has_engines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, cache: Path, bundle: Bundle, planned: Execution
) -> None:
    """onnxruntime names engines by the graph, in which weights do not count."""
    monkeypatch.setitem(sys.modules, "onnxruntime", BuildForTensorRT({TENSORRT}))
    model = bundle.model(0)
    other = ModelFile(model.path, model.content + b"\x3a\x00")
    for one in (model, other, model):
        OrtRuntime(one, on_tensorrt(planned), num_classes=3)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("silent", [True, False])
def test_tensorrt_that_cannot_start_is_refused_or_replaced_by_cuda_then_the_processor(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cache: Path,
    model: ModelFile,
    planned: Execution,
    silent: bool,
) -> None:
    asked = on_tensorrt(planned)
    build = BuildForTensorRT({CUDA}, silent=silent)
    monkeypatch.setitem(sys.modules, "onnxruntime", build)
    with pytest.raises(NotHereError) as caught:
        OrtRuntime(model, asked, num_classes=3)
    reason = "no such device" if silent else "Please install TensorRT libraries"
    assert f"{TENSORRT}, onnxruntime lists it here but cannot start it: {reason}" in str(
        caught.value
    )
    assert CUDA not in [provider for provider, _ in build.asked]
    runtime = OrtRuntime(model, asked, num_classes=3, allow_fallback=True)
    assert (runtime.provider, runtime.fallback) == (CUDA, True)
    assert build.whole == [True, False]
    monkeypatch.setitem(sys.modules, "onnxruntime", BuildForTensorRT(set(), silent=silent))
    runtime = OrtRuntime(model, asked, num_classes=3, allow_fallback=True)
    assert (runtime.provider, runtime.fallback) == (CPU, True)
    # Standard output is for whoever reads an agent's events.
    assert NO_LIBRARY not in capfd.readouterr().out


def test_a_folder_for_engines_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, cache: Path, model: ModelFile, planned: Execution
) -> None:
    cache.parent.parent.write_text("no folder")
    monkeypatch.setitem(sys.modules, "onnxruntime", BuildForTensorRT({TENSORRT}))
    with pytest.raises(NotHereError, match=r"no folder for TensorRT's engines: Not a directory"):
        OrtRuntime(model, on_tensorrt(planned), num_classes=3)
