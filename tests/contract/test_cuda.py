"""An onnxruntime for CUDA on a machine that has no GPU: its own sessions, but for the provider."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest

from devices.runtime.base import CPU, NotHereError, OrtRuntime
from devices.runtime.cuda import CUDA, load_libraries
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
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
def planned(bundle: Bundle) -> Assignment:
    return msgspec.structs.replace(bundle.assignment(DEVICES[0]), provider=CUDA)


def with_build(monkeypatch: pytest.MonkeyPatch, build: BuildForCuda) -> BuildForCuda:
    monkeypatch.setitem(sys.modules, "onnxruntime", build)
    return build


def test_fp32_is_computed_in_fp32(
    monkeypatch: pytest.MonkeyPatch, model: ModelFile, planned: Assignment
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
        (BuildForCuda(raises="CUDA failure 100:\n no device"), "CUDA failure 100: no device;"),
    ],
)
def test_a_provider_that_cannot_start_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    model: ModelFile,
    planned: Assignment,
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: Assignment
) -> None:
    with_build(monkeypatch, BuildForCuda(raises="protobuf parsing failed"))
    with pytest.raises(AgentError, match="cannot load it") as caught:
        OrtRuntime(ModelFile(tmp_path / "model.onnx", b""), planned, num_classes=3)
    assert not isinstance(caught.value, NotHereError)


def test_libraries_are_loaded_once_and_only_for_who_needs_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: ModelFile,
    planned: Assignment,
) -> None:
    build = with_build(monkeypatch, BuildForCuda())
    on_processor = msgspec.structs.replace(planned, provider=CPU)
    OrtRuntime(model, on_processor, num_classes=3)
    assert build.preloaded == 0
    for _ in range(2):
        OrtRuntime(model, planned, num_classes=3)
    assert build.preloaded == 1
    # Standard output is for whoever reads an agent's events.
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{NO_LIBRARY}\n")


def test_a_build_for_processors_has_no_libraries_to_load() -> None:
    build = BuildForCuda()
    build.get_available_providers = lambda: [CPU]  # type: ignore[method-assign]
    load_libraries(build)
    assert build.preloaded == 0
