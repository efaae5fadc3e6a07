"""Bytes of encoded numbers: what codecs write and plans count. Pure."""

from typing import Literal

CodecName = Literal["fp32", "fp16", "int8"]

#: Numbers of int8 that share a scale, which has 4 bytes.
INT8_BLOCK = 256


def wire_bytes(codec: CodecName, count: int) -> int:
    """Bytes of so many encoded numbers."""
    match codec:
        case "fp32":
            return 4 * count
        case "fp16":
            return 2 * count
        case "int8":
            return count + 4 * -(-count // INT8_BLOCK)
