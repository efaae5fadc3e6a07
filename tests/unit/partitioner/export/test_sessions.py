"""Members are run on this machine's processor, whatever they are planned for."""

from pathlib import Path

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from mdp.errors import AgentError  # noqa: E402
from mdp.formats.model_file import ModelFile  # noqa: E402
from mdp.formats.profile import Precision, RuntimeName  # noqa: E402
from mdp.runtimes.base import CPU, Execution  # noqa: E402
from mdp.runtimes.onnxruntime import open_session  # noqa: E402
from mdp.runtimes.select import open_runtime  # noqa: E402
from mdp.testing.bundles import colour_model  # noqa: E402
from partitioner.export.quantize import quantize_model  # noqa: E402
from partitioner.export.sessions import on_processor  # noqa: E402


@pytest.mark.parametrize(
    ("runtime", "provider", "precision", "here"),
    [
        ("onnxruntime", "TensorrtExecutionProvider", "fp16", "onnxruntime"),
        ("openvino", CPU, "bf16", "openvino"),
        ("openvino", "GPU", "int8-static", "openvino"),
        ("openvino", "GPU", "fp16", "onnxruntime"),
    ],
)
def test_one_thread_of_the_processor_stands_for_any_device(
    runtime: RuntimeName, provider: str, precision: Precision, here: RuntimeName
) -> None:
    planned = Execution(
        runtime=runtime, provider=provider, precision=precision, image_size=8, threads=4, spin=True
    )
    expected = Execution(runtime=here, provider=CPU, precision=precision, image_size=8)
    assert on_processor(planned) == expected


def test_what_a_gpu_computes_in_fp16_is_evaluated_on_the_processor(tmp_path: Path) -> None:
    content = colour_model(8, 1.0, 1.0)
    planned = Execution(runtime="openvino", provider="GPU", precision="fp16", image_size=8)
    model = ModelFile(tmp_path / "model.onnx", quantize_model(content, "fp16"))
    pixels = np.full((1, 8, 8, 3), 99, dtype=np.uint8)
    half = open_runtime(model, on_processor(planned), num_classes=3).run(pixels)
    (tmp_path / "model.onnx").write_bytes(content)
    (plain,) = open_session(tmp_path / "model.onnx").run(["bag"], {"images": pixels})
    np.testing.assert_allclose(half.bag, plain, rtol=1e-2)


def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(AgentError, match="onnxruntime cannot load it"):
        open_session(tmp_path / "model.onnx")
