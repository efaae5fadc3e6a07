"""One flat vector of what a network's means are taken of: parameters, statistics, moments."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partitioner.crew.averaging.codecs import CODECS, Codec
from partitioner.crew.averaging.mean import Segment
from partitioner.crew.coordinator.sizes import CodecName

CodecOf = Callable[[str], CodecName]


class Flat:
    """Trainable parameters in one vector, those of a codec in a row, then batch norms' statistics.

    codec_of: the codec of a parameter by its name, and `codecs` what that is; statistics are always
    fp32 and travel in every mean, in a segment of their own from `learned` on.
    """

    def __init__(
        self, module: nn.Module, codec_of: CodecOf, codecs: Mapping[CodecName, Codec] = CODECS
    ) -> None:
        named = [(codec_of(n), p) for n, p in module.named_parameters() if p.requires_grad]
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        statistics = [b for norm in norms for b in norm.buffers() if b.is_floating_point()]
        self.parameters = [p for _, p in named]
        self._tensors: list[Tensor] = []
        self.segments: list[Segment] = []
        start = 0
        rows: list[tuple[Codec, list[Tensor]]] = [
            (codec, [p for wanted, p in named if wanted == name]) for name, codec in codecs.items()
        ]
        self.learned = sum(parameter.numel() for parameter in self.parameters)
        for codec, tensors in (*rows, (CODECS["fp32"], statistics)):
            stop = start + sum(t.numel() for t in tensors)
            if stop > start:
                whole = tensors is statistics
                self.segments.append(Segment(start, stop, codec, whole))
            self._tensors += tensors
            start = stop

    def read(self) -> Tensor:
        """A copy, on the processor."""
        return join(self._tensors)

    def write(self, vector: Tensor) -> None:
        """Replace the network's numbers."""
        write(self._tensors, vector)


def moments_of(optimiser: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """AdamW's moments and counts of steps; zeros, as it begins with, before its first step."""
    found: list[Tensor] = []
    for parameter in parameters:
        state = optimiser.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        found += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return found


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors in a row, as one fp32 vector on the processor."""
    if not tensors:
        return torch.zeros(0)
    return torch.cat([t.detach().reshape(-1).to("cpu", torch.float32) for t in tensors])


def write(tensors: Sequence[Tensor], vector: Tensor) -> None:
    """The inverse of `joined`, in place."""
    with torch.no_grad():
        parts = torch.split(vector, [t.numel() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
