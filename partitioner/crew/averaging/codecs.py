"""Tensors to fewer bytes and back: what a mean sends instead of fp32.

A codec is pure and writes a fixed number of bytes. Int8 in blocks with a scale each is the usual
linear quantisation; error feedback after Seide et al., 1-bit stochastic gradient descent, 2014.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from partitioner.crew.coordinator.sizes import (
    FOUR_BIT_BLOCK,
    INT8_BLOCK,
    KEEP,
    CodecName,
    bitmap_bytes,
    count_kept,
    four_bit_bytes,
    wire_bytes,
)


class Codec(ABC):
    """Flat fp32 vectors as bytes."""

    name: ClassVar[CodecName]
    #: Whether decoding gives other numbers than were encoded.
    lossy: ClassVar[bool]
    #: Whether what an encoding loses is added to the next vector.
    feeds_back: ClassVar[bool]
    #: Whether it leaves most numbers out, so that owners of shards encode their own part too.
    sparse: ClassVar[bool] = False

    def bytes_of(self, count: int) -> int:
        """Bytes of an encoded vector of `count` numbers."""
        return wire_bytes(self.name, count)

    @abstractmethod
    def encode(self, vector: Tensor) -> Tensor:
        """`[count]` fp32 -> `[bytes_of(count)]` uint8; not finite in, not finite out."""

    @abstractmethod
    def decode(self, data: Tensor, count: int) -> Tensor:
        """The inverse of `encode`, `[count]` fp32."""


class SinglePrecision(Codec):
    """The numbers as they are."""

    name = "fp32"
    lossy = False
    feeds_back = False

    def encode(self, vector: Tensor) -> Tensor:
        """A view where `vector` is contiguous."""
        return vector.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """A copy: a part of a message need not be aligned."""
        return data.clone().view(torch.float32)


class HalfPrecision(Codec):
    """Half precision; numbers above 65,504 become infinite."""

    name = "fp16"
    lossy = True
    feeds_back = False

    def encode(self, vector: Tensor) -> Tensor:
        """Round to the nearest."""
        return vector.to(torch.float16).view(torch.uint8)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Widen."""
        return data.clone().view(torch.float16).to(torch.float32)


class Int8(Codec):
    """Blocks of 256 with a scale s = max|x| each, codes round(127 x / s); error at most s/254."""

    name = "int8"
    lossy = True
    feeds_back = True

    def encode(self, vector: Tensor) -> Tensor:
        """Write all scales, then all codes."""
        count = vector.numel()
        blocks = F.pad(vector, (0, -count % INT8_BLOCK)).view(-1, INT8_BLOCK)
        scales = blocks.abs().amax(dim=1) if count else vector.new_zeros(0)
        divisors = torch.where(scales > 0, scales, 1.0)[:, None]
        codes = (blocks / divisors).mul_(127).round_().nan_to_num_().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8).flatten()[:count]])

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Codes times scale / 127."""
        cut = data.numel() - count
        scales = data[:cut].clone().view(torch.float32)
        codes = F.pad(data[cut:].view(torch.int8), (0, -count % INT8_BLOCK)).to(torch.float32)
        return (codes.view(-1, INT8_BLOCK) * (scales / 127)[:, None]).flatten()[:count]


class FourBit:
    """Blocks of 128 with an fp16 scale s = max|x|; codes round(7 x / s) + 8, the low half first."""

    def bytes_of(self, count: int) -> int:
        """Bytes of `count` numbers."""
        return four_bit_bytes(count)

    def encode(self, vector: Tensor) -> Tensor:
        """Write all scales, then all codes."""
        count = vector.numel()
        blocks = F.pad(vector, (0, -count % FOUR_BIT_BLOCK)).view(-1, FOUR_BIT_BLOCK)
        scales = blocks.abs().amax(dim=1) if count else vector.new_zeros(0)
        halves = scales.to(torch.float16)
        divisors = torch.where(halves > 0, halves.to(torch.float32), 1.0)[:, None]
        # A scale that half precision has rounded down a lot is below some numbers.
        codes = (blocks / divisors).mul_(7).round_().nan_to_num_(0.0).clamp_(-7, 7).add_(8)
        flat = codes.to(torch.uint8).flatten()[: count + count % 2].view(-1, 2)
        return torch.cat([halves.view(torch.uint8), flat[:, 0] | flat[:, 1] << 4])

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Codes times scale / 7."""
        cut = 2 * -(-count // FOUR_BIT_BLOCK)
        scales = data[:cut].clone().view(torch.float16).to(torch.float32)
        codes = torch.stack([data[cut:] & 15, data[cut:] >> 4], dim=1).flatten()[:count]
        numbers = F.pad(codes.to(torch.float32) - 8, (0, -count % FOUR_BIT_BLOCK))
        return (numbers.view(-1, FOUR_BIT_BLOCK) * (scales / 7)[:, None]).flatten()[:count]


class Largest(Codec):
    """A bit for each number, and codes of the `keep` that are largest by size; the others are 0.

    Of equals those with the lower index are sent. After CocktailSGD (Wang et al., ICML 2023).
    """

    name = "top4"
    lossy = True
    feeds_back = True
    sparse = True

    def __init__(self, keep: float = KEEP, codes: FourBit | Codec | None = None) -> None:
        self._keep, self._codes = keep, codes or FourBit()

    def bytes_of(self, count: int) -> int:
        """Bytes of an encoded vector of `count` numbers."""
        return bitmap_bytes(count) + self._codes.bytes_of(count_kept(count, self._keep))

    def encode(self, vector: Tensor) -> Tensor:
        """Write the bits, lowest first, then the codes by index; what is no number is largest."""
        count = vector.numel()
        order = vector.abs().sort(descending=True, stable=True).indices
        bits = torch.zeros(8 * bitmap_bytes(count), dtype=torch.uint8)
        bits[order[: count_kept(count, self._keep)]] = 1
        bitmap = (bits.view(-1, 8) << _BITS).sum(dim=1).to(torch.uint8)
        return torch.cat([bitmap, self._codes.encode(vector[bits[:count].bool()])])

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Numbers at their places."""
        cut = bitmap_bytes(count)
        bits = (data[:cut, None] >> _BITS & 1).flatten()[:count].bool()
        found = torch.zeros(count)
        found[bits] = self._codes.decode(data[cut:], count_kept(count, self._keep))
        return found


#: By how much a bit of a byte is moved.
_BITS = torch.arange(8, dtype=torch.uint8)

CODECS: dict[CodecName, Codec] = {
    codec.name: codec for codec in (SinglePrecision(), HalfPrecision(), Int8(), Largest())
}
