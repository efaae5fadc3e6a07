"""Small ONNX models written without the `onnx` package: just what mdp.testing needs of onnx.proto3.

A protobuf message is a row of fields, each with its number and kind; field numbers and element
types are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3, IR version 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The format's version, and that of the operators.
IR_VERSION, OPSET = 8, 17
FLOAT, UINT8, INT64 = 1, 2, 7
_TYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.uint8): UINT8, np.dtype(np.int64): INT64}
#: AttributeProto.type of one integer and of several.
_INT, _INTS = 2, 7
_VARINT, _BYTES = 0, 2


@dataclass(frozen=True, slots=True)
class Node:
    """One operator, the names of its inputs and outputs, and its integer attributes."""

    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, int | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output: its element type and its shape, in which a name stands for any size."""

    name: str
    element_type: int
    shape: Sequence[int | str]


def onnx_model(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: Mapping[str, NDArray[np.generic]],
    comment: str = "",
) -> bytes:
    """The content of an ONNX file; constants may be float32, uint8 or int64."""
    graph = b"".join(_bytes(1, _node(node)) for node in nodes) + _text(2, "graph")
    graph += b"".join(_bytes(5, _tensor(name, values)) for name, values in constants.items())
    graph += b"".join(_bytes(11, _value(value)) for value in inputs)
    graph += b"".join(_bytes(12, _value(value)) for value in outputs)
    opset = _text(1, "") + _number(2, OPSET)
    said = _text(6, comment) if comment else b""
    return _number(1, IR_VERSION) + said + _bytes(7, graph) + _bytes(8, opset)


def _node(node: Node) -> bytes:
    content = b"".join(_text(1, name) for name in node.inputs)
    content += b"".join(_text(2, name) for name in node.outputs)
    content += _text(4, node.operator)
    for name, value in node.attributes.items():
        if isinstance(value, int):
            attribute = _number(3, value) + _number(20, _INT)
        else:
            attribute = b"".join(_number(8, one) for one in value) + _number(20, _INTS)
        content += _bytes(5, _text(1, name) + attribute)
    return content


def _tensor(name: str, values: NDArray[np.generic]) -> bytes:
    content = b"".join(_number(1, size) for size in values.shape)
    content += _number(2, _TYPES[values.dtype]) + _text(8, name)
    # `raw_data` is little endian whatever the machine is.
    raw = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return content + _bytes(9, raw)


def _value(value: Value) -> bytes:
    sizes = (_number(1, size) if isinstance(size, int) else _text(2, size) for size in value.shape)
    shape = b"".join(_bytes(1, size) for size in sizes)
    tensor = _number(1, value.element_type) + _bytes(2, shape)
    return _text(1, value.name) + _bytes(2, _bytes(1, tensor))


def _varint(number: int) -> bytes:
    """A number below 2^63 in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())
