"""Bytes of encoded numbers: what codecs write and plans count. Pure."""

from typing import Literal

CodecName = Literal["fp32", "fp16", "int8", "top4"]
#: Beside them, of a dense layer's gradient, the two factors that it is the product of.
TensorCodec = Literal["fp32", "fp16", "int8", "top4", "factors"]

#: Numbers of int8 that share a scale, which has 4 bytes.
INT8_BLOCK = 256
#: Numbers of 4 bits that share a scale, which has 2 bytes.
FOUR_BIT_BLOCK = 128
#: The part of its numbers that `top4` sends, where nothing else is said.
KEEP = 0.2


def wire_bytes(codec: CodecName, count: int) -> int:
    """Bytes of so many encoded numbers."""
    match codec:
        case "fp32":
            return 4 * count
        case "fp16":
            return 2 * count
        case "int8":
            return count + 4 * -(-count // INT8_BLOCK)
        case "top4":
            return bitmap_bytes(count) + four_bit_bytes(count_kept(count, KEEP))


def factors_ratio(outputs: int, inputs: int, pictures: int) -> float:
    """Bytes of a dense layer's factors over those of its gradient's mean in fp32.

    pictures: of a step of all trainers together, of which each sends the factors of its own to all
    others. The mean goes round a ring, or through the owners of its shards.
    """
    return pictures * (outputs + inputs) / (2 * outputs * inputs)


def count_kept(count: int, keep: float) -> int:
    """Numbers that are sent of so many: at least one, if there is any."""
    # Rounding of a product that is whole, as 0.29 x 100, takes nothing away.
    return min(count, max(1, int(keep * count + 1e-6)))


def bitmap_bytes(count: int) -> int:
    """Bytes of a bit for each of so many numbers."""
    return -(-count // 8)


def four_bit_bytes(count: int) -> int:
    """Bytes of so many codes of 4 bits, and their scales."""
    return -(-count // 2) + 2 * -(-count // FOUR_BIT_BLOCK)


def whole_codec(codec: CodecName) -> CodecName:
    """The codec of a mean in which every number travels, as of an epoch's last."""
    return "int8" if codec == "top4" else codec
