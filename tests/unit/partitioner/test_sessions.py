"""A session is on the provider that was asked for, or there is none."""

from pathlib import Path
from typing import Any

import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from mdp.errors import InputError  # noqa: E402
from partitioner.sessions import open_session  # noqa: E402

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Started:
    """What a build for CUDA gives on a machine that has no GPU, or has one."""

    provider = CPU

    def __init__(self, model: str, options: Any, *, providers: list[str], enable_fallback: int):
        assert (providers, enable_fallback) == ([CUDA], 0)

    def get_providers(self) -> list[str]:
        return [self.provider]


@pytest.fixture
def build_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Started)


@pytest.mark.usefixtures("build_for_cuda")
def test_the_processor_does_not_step_in_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"lists {CUDA} on this machine, but started {CPU}"):
        open_session(Path("model.onnx"), provider=CUDA)
    monkeypatch.setattr(Started, "provider", CUDA)
    assert open_session(Path("model.onnx"), provider=CUDA).get_providers() == [CUDA]


def test_a_provider_that_is_not_here_is_named() -> None:
    with pytest.raises(InputError, match=f"expected {CUDA} on this machine, found .*{CPU}"):
        open_session(Path("model.onnx"), provider=CUDA)


def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="onnxruntime cannot load it"):
        open_session(tmp_path / "model.onnx")
