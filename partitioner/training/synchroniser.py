"""The interface of a training to other processes of the same one; by default torchrun's.

The loop asks one object, so that a process may train one network with some others and the next
one alone. Crews with other ways to synchronise are in `partitioner.crew.averaging`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from partitioner.training.distributed import (
    Crew,
    all_started,
    from_first,
    share_of,
    share_statistics,
    sum_over_all,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

#: Gradients are clipped to this norm.
MAX_GRADIENT_NORM = 1.0

Index = NDArray[np.int64]
#: Number of a step in its epoch, the own pictures, their share of the step's.
Share = tuple[int, Index, float]


class Synchroniser(Protocol):
    """One network's training by this process and others."""

    @property
    def crew(self) -> Crew:
        """The processes that take every step together: whom errors and files are shared with."""

    @property
    def parts(self) -> int:
        """Into how many steps a batch is cut."""

    def wrap(
        self, module: "nn.Module", optimiser: "torch.optim.Optimizer", device: "torch.device"
    ) -> "nn.Module":
        """Called once, before the first step; returns the network to run."""

    def begin(self, epoch: int) -> int:
        """The epoch to begin with: that of the others, where these are elsewhere than `epoch`."""

    def shares(self, batches: Sequence[Index], epoch: int) -> Iterator[Share]:
        """The steps of this process in an epoch."""

    def step_losses(self, losses: "Tensor") -> "Tensor":
        """A step's losses, from those of each process times the share of its pictures."""

    def update(self, optimiser: "torch.optim.Optimizer") -> float:
        """Clip the gradients, which are complete, and take the step; returns their norm before.

        Without a step where the norm is not finite, which every process then sees.
        """

    def after_step(self, pictures: int) -> None:
        """Weights have changed by a step on `pictures` own pictures."""

    def settle(self, sums: "Tensor") -> "Tensor":
        """End an epoch with one network on every process; returns all processes' sums of losses.

        `sums` `[losses]` are those that `step_losses` returned here.
        """

    def from_first(self, value_of: Callable[[], float]) -> float:
        """A number that the first process computes, of the settled network."""

    def all_stop(self, stop: bool) -> bool:
        """Tell whether all stop at the end of an epoch; `stop` is what this process makes of it."""


def step_clipped(
    module: "nn.Module", optimiser: "torch.optim.Optimizer", norm: "Tensor | None" = None
) -> float:
    """Clip the gradients of `module` to `MAX_GRADIENT_NORM` and take a step; returns their norm.

    norm: that of all gradients, where `module` has a part of them. A norm that is not finite is
    returned without a step.
    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    if norm is None:
        norm = get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    if math.isfinite(found := float(norm)):
        clip_grads_with_norm_(module.parameters(), MAX_GRADIENT_NORM, norm)
        optimiser.step()
    return found


class EveryStep:
    """Gradients are averaged in every step, in equal shares; one process does nothing more."""

    def __init__(self, crew: Crew | None = None) -> None:
        self._crew = crew
        self._module: nn.Module | None = None

    @property
    def crew(self) -> Crew:
        """By default torchrun's processes."""
        return all_started(self._crew)

    @property
    def parts(self) -> int:
        """A step is a batch."""
        return 1

    def wrap(
        self, module: "nn.Module", optimiser: "torch.optim.Optimizer", device: "torch.device"
    ) -> "nn.Module":
        """DDP around the module; itself for one process.

        Every trainable parameter has to take part in every batch's loss, if only times zero.
        """
        self._module = module
        if self.crew.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, process_group=self.crew.group)

    def begin(self, epoch: int) -> int:
        """All begin together."""
        return epoch

    def shares(self, batches: Sequence[Index], epoch: int) -> Iterator[Share]:
        """A share of every batch."""
        crew = self.crew
        for number, index in enumerate(batches):
            yield number, *share_of(index, crew)

    def step_losses(self, losses: "Tensor") -> "Tensor":
        """Means over the pictures of all."""
        return sum_over_all(losses, self.crew)

    def update(self, optimiser: "torch.optim.Optimizer") -> float:
        """A step of one's own: DDP has averaged the gradients."""
        assert self._module is not None
        return step_clipped(self._module, optimiser)

    def after_step(self, pictures: int) -> None:
        """Nothing: the weights are the same on all."""

    def settle(self, sums: "Tensor") -> "Tensor":
        """Take the first process's statistics of batch norms."""
        assert self._module is not None
        share_statistics(self._module, self.crew)
        return sums

    def from_first(self, value_of: Callable[[], float]) -> float:
        """The others wait for it."""
        return from_first(value_of, self.crew)

    def all_stop(self, stop: bool) -> bool:
        """All have seen the same."""
        return stop
