"""onnxruntime for CUDA and TensorRT without a GPU: its sessions name another provider."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.formats.profile import Precision
from mdp.runtimes.base import CPU, Execution, NotHereError
from mdp.runtimes.cuda import CUDA, TENSORRT, load_libraries
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.testing.bundles import SIZES, write_bundle

NO_LIBRARY = "Failed to load libcublas"


class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
    """On the processor, whatever it says."""

    said = CUDA

    def get_providers(self) -> list[str]:
        return [self.said, CPU]


class Build:
    """The module `onnxruntime` as a build for CUDA or TensorRT is.

    What is in `here` starts; any other GPU provider raises `raises`, or without it is silently not
    used.
    """

    SessionOptions = onnxruntime.SessionOptions

    def __init__(self, *here: str, listed: Sequence[str] = (CUDA,), raises: str = "") -> None:
        self.here, self.listed, self.raises = here, listed, raises
        self.asked: list[Any] = []
        #: Whether TensorRT had to take the whole graph.
        self.whole: list[bool] = []
        self.preloaded = 0

    def get_available_providers(self) -> list[str]:
        return [*self.listed, CPU]

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
        if provider == TENSORRT:
            self.whole.append(strict(options))
        if provider not in (*self.here, CPU) and self.raises:
            raise RuntimeError(self.raises)
        session = Session(model, onnxruntime.SessionOptions(), providers=[CPU])
        session.said = provider if provider in self.here else CPU
        return session


def strict(options: Any) -> bool:
    """Tell whether a session refuses to run parts of a graph on the processor."""
    try:
        return bool(options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1")
    except RuntimeError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("cuda") / "bundle")).model(0)


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: ModelFile
) -> Callable[..., OrtRuntime]:
    """Opens the model, or another, with a build of onnxruntime."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Set by the code under test; taken back afterwards.
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")

    def open_with(
        build: Build,
        provider: str = CUDA,
        precision: Precision = "fp32",
        *,
        file: ModelFile = model,
        allow_fallback: bool = False,
    ) -> OrtRuntime:
        monkeypatch.setitem(sys.modules, "onnxruntime", build)
        wanted = Execution(
            runtime="onnxruntime", provider=provider, threads=1, precision=precision,
            image_size=SIZES[0],
        )  # fmt: skip
        return OrtRuntime(file, wanted, num_classes=3, allow_fallback=allow_fallback)

    return open_with


Open = Callable[..., OrtRuntime]


def test_fp32_is_computed_in_fp32(opened: Open) -> None:
    build = Build(CUDA)
    runtime = opened(build)
    assert (runtime.provider, runtime.fallback) == (CUDA, False)
    assert build.asked == [(CUDA, {"use_tf32": "0"})]
    black = np.zeros((1, SIZES[0], SIZES[0], 3), dtype=np.uint8)
    assert runtime.run(black).bag.shape == (1, 3)


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        ("", "no such device, or its driver or libraries are missing"),
        ("CUDA failure 100:\n no device", "CUDA failure 100: no device"),
    ],
)
@pytest.mark.parametrize(
    ("provider", "here", "instead"),
    [(CUDA, (), CPU), (TENSORRT, (CUDA,), CUDA), (TENSORRT, (), CPU)],
)
def test_a_provider_that_cannot_start_is_refused_or_replaced_by_the_next(
    capfd: pytest.CaptureFixture[str],
    opened: Open,
    provider: str,
    here: tuple[str, ...],
    instead: str,
    raises: str,
    reason: str,
) -> None:
    build = Build(*here, listed=[TENSORRT, CUDA], raises=raises)
    with pytest.raises(NotHereError) as caught:
        opened(build, provider)
    said = f"{provider}, onnxruntime lists it here but cannot start it: {reason}"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [asked for asked, _ in build.asked if asked != CPU] == [provider]
    runtime = opened(build, provider, allow_fallback=True)
    assert (runtime.provider, runtime.fallback) == (instead, True)
    assert build.whole == ([True, False] if provider == TENSORRT else [])
    # Standard output is for events.
    assert NO_LIBRARY not in capfd.readouterr().out


def test_a_file_that_is_no_model_is_named_as_such(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="cannot load it") as caught:
        opened(Build(raises="protobuf parsing failed"), file=ModelFile(tmp_path / "m.onnx", b""))
    assert not isinstance(caught.value, NotHereError)


def test_libraries_load_once_for_a_gpu(capsys: pytest.CaptureFixture[str], opened: Open) -> None:
    build, for_processors = Build(CUDA), Build(listed=[])
    opened(build, CPU)
    load_libraries(for_processors)
    assert build.preloaded == for_processors.preloaded == 0
    for _ in range(2):
        opened(build)
    assert build.preloaded == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{NO_LIBRARY}\n")


@pytest.mark.parametrize(
    ("precision", "fp16", "int8"),
    [("fp32", "0", "0"), ("fp16", "1", "0"), ("int8-static", "0", "1")],
)
def test_tensorrt_computes_the_whole_graph_as_planned_and_keeps_its_engines(
    opened: Open, tmp_path: Path, model: ModelFile, precision: str, fp16: str, int8: str
) -> None:
    build = Build(TENSORRT, listed=[TENSORRT, CUDA])
    runtime = opened(build, TENSORRT, precision)
    assert (runtime.provider, runtime.fallback) == (TENSORRT, False)
    cache = tmp_path / "cache/mdp/tensorrt"
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
    # onnxruntime names engines by the graph alone, so models with other weights are kept apart.
    opened(build, TENSORRT, file=ModelFile(model.path, model.content + b"\x3a\x00"))
    opened(build, TENSORRT)
    assert len(list(cache.iterdir())) == 2


def test_a_folder_for_engines_that_cannot_be_made_is_named(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(NotHereError, match=r"no folder for TensorRT's engines: Not a directory"):
        opened(Build(TENSORRT, listed=[TENSORRT, CUDA]), TENSORRT)
