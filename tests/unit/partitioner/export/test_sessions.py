"""A session is on the provider that was asked for, or there is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from mdp.errors import InputError  # noqa: E402
from mdp.formats.profile import RuntimeName  # noqa: E402
from mdp.testing.bundles import colour_model  # noqa: E402
from partitioner.export.quantize import quantised  # noqa: E402
from partitioner.export.sessions import open_session, open_way  # noqa: E402

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


def test_threads_wait_awake_only_where_asked_and_only_while_they_run(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(colour_model(8, 1.0, 1.0))

    def entry(spin: bool, name: str) -> str:
        options = open_session(model, threads=2, spin=spin).get_session_options()
        return str(options.get_session_config_entry(name))

    assert entry(False, "session.intra_op.allow_spinning") == "0"
    assert entry(True, "session.intra_op.allow_spinning") == "1"
    assert entry(True, "session.force_spinning_stop") == "1"


def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="onnxruntime cannot load it"):
        open_session(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("runtime", "provider"),
    [("onnxruntime", "TensorrtExecutionProvider"), ("openvino", "GPU"), ("openvino", CUDA)],
)
def test_what_compiles_for_a_device_is_not_tried(runtime: RuntimeName, provider: str) -> None:
    with pytest.raises(InputError, match=f"^{runtime} on {provider} cannot be tried here$"):
        open_way(Path("model.onnx"), "fp16", runtime, provider=provider)


def test_what_a_gpu_computes_in_fp16_is_evaluated_on_the_processor(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    path = tmp_path / "model.onnx"
    path.write_bytes(quantised(colour_model(8, 1.0, 1.0), "fp16"))
    pixels = np.full((1, 8, 8, 3), 99, dtype=np.uint8)
    (bag,) = open_way(path, "fp16", "openvino").run(["bag"], {"images": pixels})
    (plain,) = open_session(path).run(["bag"], {"images": pixels})
    np.testing.assert_allclose(bag, plain, rtol=1e-2)
