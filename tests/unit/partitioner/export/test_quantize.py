"""One exported model in every precision, by the settings that everybody shares."""

import onnx
import pytest
import torch

from mdp.errors import InputError
from mdp.formats.profile import Precision
from mdp.pictures.crop import Pixels
from partitioner.export.quantize import QuantizationError, quantize_model
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.submodel import SubModel
from tests.support.models.runs import spec

pytestmark = pytest.mark.torch
SIZE, CLASSES = 8, 3


def noise(count: int) -> Pixels:
    generator = torch.Generator().manual_seed(1)
    shape = (count, SIZE, SIZE, 3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy()


@pytest.fixture(scope="module")
def model() -> bytes:
    """An untrained sub-model."""
    torch.manual_seed(0)
    member = ServedMember(SubModel(spec(SIZE, 16), CLASSES))
    return to_onnx(member, SIZE, ["bag"], {"mdp_k": "0"})


def logits(model: bytes, pixels: Pixels) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(head) for head in session.run(None, {"images": pixels})]


def operators(model: bytes) -> set[str]:
    return {node.op_type for node in onnx.load_from_string(model).graph.node}


@pytest.mark.parametrize(
    ("precision", "operator", "says"),
    [
        ("fp32", "Erf", "fp32"),
        ("bf16", "Erf", "fp32"),
        ("fp16", "Cast", "fp16"),
        ("int8", "MatMulInteger", "int8"),
        ("int8-static", "QuantizeLinear", "int8-static"),
    ],
)
def test_every_precision(model: bytes, precision: Precision, operator: str, says: str) -> None:
    made = quantize_model(model, precision, noise(40))
    assert operator in operators(made)
    properties = {p.key: p.value for p in onnx.load_from_string(made).metadata_props}
    assert properties == {"mdp_k": "0", "mdp_precision": says}
    pixels = noise(9)
    for ours, exact in zip(logits(made, pixels), logits(model, pixels), strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape == (9, CLASSES)
        off = float((ours - exact).abs().max() / exact.std())
        assert off < (0.3 if says.startswith("int8") else 0.01)
        # An int8 model that gives the very same numbers would not be one.
        assert (off > 1e-4) == (says != "fp32")


def test_only_what_is_worth_it_is_quantized(model: bytes) -> None:
    """Products of two activations, softmax and norms stay as they are."""
    static = onnx.load_from_string(quantize_model(model, "int8-static", noise(32)))
    inputs = [n.input[0] for n in static.graph.node if n.op_type == "QuantizeLinear"]
    assert len(inputs) == 4  # of qkv, proj, fc1 and fc2
    dynamic = onnx.load_from_string(quantize_model(model, "int8"))
    counts = [node.op_type for node in dynamic.graph.node]
    assert counts.count("MatMulInteger") == 4 + 1  # and the head
    assert counts.count("MatMul") == 2


@pytest.mark.parametrize("precision", ["int8", "int8-static"])
def test_weights_leave_room_for_the_sum_of_two_products(model: bytes, precision: Precision) -> None:
    made = onnx.load_from_string(quantize_model(model, precision, noise(32)))
    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in made.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert len(weights) >= 4
    assert max(int(abs(w.astype(int)).max()) for w in weights) <= 64
    # Per channel: every column uses the whole of its range.
    assert all((abs(w.astype(int)).reshape(-1, w.shape[-1]).max() >= 60).all() for w in weights)


@pytest.mark.parametrize("count", [0, 31])
def test_too_few_pictures_say_nothing_about_ranges(model: bytes, count: int) -> None:
    expected = (
        "^int8-static: expected at least 32 calibration pictures to see the range of every "
        f"activation, got {count}$"
    )
    with pytest.raises(InputError, match=expected):
        quantize_model(model, "int8-static", noise(count) if count else None)


def test_what_the_tools_cannot_do_is_named(model: bytes) -> None:
    broken = onnx.load_from_string(model)
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(QuantizationError, match=r"^cannot be converted to .*NoSuchOperator"):
        quantize_model(broken.SerializeToString(), "int8-static", noise(32))
