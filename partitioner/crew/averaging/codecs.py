"""Tensors to fewer bytes and back: what a mean sends instead of fp32.

A codec is pure and writes a fixed number of bytes. Int8 in blocks with a scale each is the usual
linear quantisation; error feedback after Seide et al., 1-bit stochastic gradient descent, 2014.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from partitioner.crew.coordinator.sizes import INT8_BLOCK, CodecName, wire_bytes


class Codec(ABC):
    """Flat fp32 vectors as bytes."""

    name: ClassVar[CodecName]
    #: Whether decoding gives other numbers than were encoded.
    lossy: ClassVar[bool]
    #: Whether what an encoding loses is added to the next vector.
    feeds_back: ClassVar[bool]

    def bytes_of(self, count: int) -> int:
        """Bytes of an encoded vector of `count` numbers."""
        return wire_bytes(self.name, count)

    @abstractmethod
    def encode(self, vector: Tensor) -> Tensor:
        """`[count]` fp32 -> `[bytes_of(count)]` uint8; not finite in, not finite out."""

    @abstractmethod
    def decode(self, data: Tensor, count: int) -> Tensor:
        """The inverse of `encode`, `[count]` fp32."""


class Fp32(Codec):
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


class Fp16(Codec):
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


CODECS: dict[CodecName, Codec] = {codec.name: codec for codec in (Fp32(), Fp16(), Int8())}
