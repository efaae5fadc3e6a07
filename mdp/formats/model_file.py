"""A sub-model's ONNX file as the checked bytes, which are also loaded.

Given a path, a runtime would read the file again, and any file that the model refers to; the
bundle's hashes cover neither.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import ConfigError
from mdp.files import read_regular

#: Largest message of protobuf.
MAX_MODEL_BYTES = 2**31 - 1
#: Messages of onnx.proto that lead to a tensor -> field number -> message in that field.
_FIELDS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse tensor",
        23: "sparse tensor",
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
#: Fields of a tensor: `external_data`, and `data_location` with its value EXTERNAL.
_EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 13, 14, 1
#: A node of this type may name a file with a compiled model.
_OP_TYPE, _COMPILED = 4, b"EPContext"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An ONNX file's content, and the path for messages about it."""

    path: Path
    content: bytes

    def __post_init__(self) -> None:
        """Raise ConfigError if the model refers to other files, or is no model."""
        try:
            found = names_other_files(self.content)
        except ValueError as error:
            raise ConfigError(f"{self.path}: expected an ONNX model: {error}") from error
        if found:
            raise ConfigError(
                f"{self.path}: the model names another file for its weights; expected all of them "
                "in the model file, as no hash covers the other one"
            )

    @classmethod
    def read(cls, path: Path) -> "ModelFile":
        """A file that is in no bundle; raises ConfigError."""
        content, _ = read_regular(path, MAX_MODEL_BYTES)
        return cls(path, content)


def names_other_files(content: bytes) -> bool:
    """Tell whether an ONNX model refers to other files, for external tensors or compiled parts.

    Raises ValueError for content that is no protobuf message, which a runtime might accept.
    """
    waiting = [("model", memoryview(content))]
    while waiting:
        message, part = waiting.pop()
        inside = _FIELDS[message]
        for field, value in _fields(part):
            if message == "tensor" and _is_external(field, value):
                return True
            if isinstance(value, int):
                continue
            if message == "node" and field == _OP_TYPE and bytes(value) == _COMPILED:
                return True
            if field in inside:
                waiting.append((inside[field], value))
    return False


def _is_external(field: int, value: int | memoryview) -> bool:
    return field == _EXTERNAL_DATA or (field == _DATA_LOCATION and value == _EXTERNAL)


def _fields(part: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message; fixed-width numbers are left out."""
    at = 0
    while at < len(part):
        tag, at = _varint(part, at)
        wire, field = tag & 7, tag >> 3
        if wire == _VARINT:
            value, at = _varint(part, at)
            yield field, value
        elif wire == _BYTES:
            length, at = _varint(part, at)
            if length > len(part) - at:
                raise ValueError("a field is longer than the message that it is in")
            yield field, part[at : at + length]
            at += length
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")


def _varint(part: memoryview, at: int) -> tuple[int, int]:
    """A number and the position after it; its lower 32 bits, as protobuf reads tags and enums."""
    value = shift = 0
    while at < len(part) and shift < 70:
        byte = part[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFF, at
    raise ValueError("a number does not end")
