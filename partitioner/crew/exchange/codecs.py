"""Tensors to fewer bytes and back: what a mean sends instead of fp32.

A codec is pure and writes a fixed number of bytes. Int8 in blocks with a scale each is the usual
linear quantisation; error feedback after Seide et al., 1-bit stochastic gradient descent, 2014.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

CodecName = Literal["fp32", "fp16", "int8"]


class Codec(Protocol):
    """Flat fp32 vectors as bytes."""

    #: Whether decoding gives other numbers than were encoded.
    lossy: bool
    #: Whether what an encoding loses is added to the next vector.
    feeds_back: bool

    def bytes_of(self, count: int) -> int:
        """Bytes of an encoded vector of `count` numbers."""

    def encode(self, vector: Tensor) -> Tensor:
        """`[count]` fp32 -> `[bytes_of(count)]` uint8; not finite in, not finite out."""

    def decode(self, data: Tensor, count: int) -> Tensor:
        """The inverse of `encode`, `[count]` fp32."""


class Fp32:
    """The numbers as they are."""

    lossy = False
    feeds_back = False

    def bytes_of(self, count: int) -> int:
        """Four a number."""
        return 4 * count

    def encode(self, vector: Tensor) -> Tensor:
        """A view where `vector` is contiguous."""
        return vector.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """A copy: a part of a message need not be aligned."""
        return data.clone().view(torch.float32)


class Fp16:
    """Half precision; numbers above 65,504 become infinite."""

    lossy = True
    feeds_back = False

    def bytes_of(self, count: int) -> int:
        """Two a number."""
        return 2 * count

    def encode(self, vector: Tensor) -> Tensor:
        """Round to the nearest."""
        return vector.to(torch.float16).view(torch.uint8)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Widen."""
        return data.clone().view(torch.float16).to(torch.float32)


class Int8:
    """Blocks of 256 with a scale s = max|x| each, codes round(127 x / s); error at most s/254."""

    lossy = True
    feeds_back = True
    BLOCK = 256

    def bytes_of(self, count: int) -> int:
        """One a number and four a block."""
        return count + 4 * -(-count // self.BLOCK)

    def encode(self, vector: Tensor) -> Tensor:
        """All scales, then all codes."""
        count = vector.numel()
        blocks = F.pad(vector, (0, -count % self.BLOCK)).view(-1, self.BLOCK)
        scales = blocks.abs().amax(dim=1) if count else vector.new_zeros(0)
        divisors = torch.where(scales > 0, scales, 1.0)[:, None]
        codes = (blocks / divisors).mul_(127).round_().nan_to_num_().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8).flatten()[:count]])

    def decode(self, data: Tensor, count: int) -> Tensor:
        """Codes times scale / 127."""
        cut = data.numel() - count
        scales = data[:cut].clone().view(torch.float32)
        codes = F.pad(data[cut:].view(torch.int8), (0, -count % self.BLOCK)).to(torch.float32)
        return (codes.view(-1, self.BLOCK) * (scales / 127)[:, None]).flatten()[:count]


CODECS: dict[CodecName, Codec] = {"fp32": Fp32(), "fp16": Fp16(), "int8": Int8()}
