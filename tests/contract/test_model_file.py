"""Check for other files that a model names, held against what the package `onnx` reads."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from mdp.errors import ConfigError
from mdp.formats.model_file import ModelFile, names_other_files
from mdp.testing.bundles import colour_model

BUNDLE = Path(__file__).parents[2] / "examples/bundles/cifar10"


def outside() -> TensorProto:
    tensor = numpy_helper.from_array(np.zeros((2, 2), dtype=np.float32), "outside")
    onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    tensor.ClearField("raw_data")
    return tensor


def sparse() -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=outside(), dims=[2, 2])


def in_a_constant(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=outside()))


def in_a_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [outside()])
    model.graph.node.append(helper.make_node("If", ["c"], ["d"], then_branch=branch))


def in_a_function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["c"], value=outside())
    made = helper.make_function("here", "f", [], ["c"], [node], [helper.make_opsetid("", 17)])
    model.functions.append(made)


def in_a_function_s_default(model: onnx.ModelProto) -> None:
    made = helper.make_function("here", "f", [], [], [], [helper.make_opsetid("", 17)])
    made.attribute_proto.append(helper.make_attribute("a", outside()))
    model.functions.append(made)


def in_training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.initializer.append(outside())


def compile_model(model: onnx.ModelProto) -> None:
    node = helper.make_node(
        "EPContext", [], ["c"], domain="com.microsoft", ep_cache_context="a.bin"
    )
    model.graph.node.append(node)


@pytest.mark.parametrize(
    "add",
    [
        lambda model: model.graph.initializer.append(outside()),
        lambda model: model.graph.sparse_initializer.append(sparse()),
        in_a_constant,
        in_a_branch,
        in_a_function,
        in_a_function_s_default,
        in_training,
        compile_model,
    ],
)
def test_another_file_is_found_wherever_it_is_named(add: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load_from_string(colour_model(12, 1.0, 4.0))
    assert not names_other_files(model.SerializeToString())
    add(model)
    assert names_other_files(model.SerializeToString())


def test_a_real_model_names_none() -> None:
    path = BUNDLE / "submodels/0/model.onnx"
    assert ModelFile.read(path).content == path.read_bytes()


def tensors(message: object) -> Iterator[TensorProto]:
    """Every tensor in a message, found by protobuf's own reflection."""
    if isinstance(message, TensorProto):
        yield message
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for one in value if hasattr(value, "__len__") else [value]:
                yield from tensors(one)


def test_no_damage_hides_another_file() -> None:
    """Data that `onnx` reads as external is found, or the file is refused altogether."""
    model = onnx.load_from_string(colour_model(12, 1.0, 4.0))
    in_a_branch(model)
    model.graph.initializer.append(outside())
    whole, chance = model.SerializeToString(), random.Random(0)
    read = 0
    for _ in range(4000):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 2, 4))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            other = onnx.load_from_string(bytes(damaged))
        except DecodeError:
            continue
        if any(t.data_location == TensorProto.EXTERNAL or t.external_data for t in tensors(other)):
            read += 1
            try:
                assert names_other_files(bytes(damaged))
            except ValueError:
                continue
    assert read > 1000


@pytest.mark.parametrize("content", [b"\x0b", b"\x08", b"\x3a\x05ab", b"\xff" * 20])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^m\.onnx: expected an ONNX model: "):
        ModelFile(Path("m.onnx"), content)
