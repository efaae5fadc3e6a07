"""Gradients whose means reach all trainers during the forward pass of the next step.

A mean has two phases. During the backward pass the mean of each of DDP's buckets is brought to its
owners; it is sent to all while the next step's forward pass is under way, the layers that run first
before the others. A bucket's parameters take their step just before the first of their layers runs.
Of the seconds of a mean one half is then hidden by each pass. After DeAR (Zhang, Shi, Chu, Wang and
Li, arXiv 2302.12445).
"""

import math
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.mean import Mean, Shards
from partitioner.training.synchroniser import MAX_GRADIENT_NORM


class NextForwardGradients(Gradients):
    """`Gradients` in two phases, of which the second takes place in the next forward pass.

    Needs a route of two phases. With fp32 the weights are those of one process, up to rounding.
    """

    #: Means of this step's buckets at their owners, in DDP's order.
    _collected: list["_Collected"]
    #: The same of the last step, in the order in which layers run.
    _clipped: list["_Coming"]
    #: Means on their way, by each parameter that waits for its own.
    _coming: dict[Tensor, "_Coming"]
    #: Parameters by the layer that has them.
    _waiting: dict[nn.Module, list[nn.Parameter]]
    #: Layers that have run in the first pass; None afterwards.
    _ran: set[nn.Module] | None
    #: Parameters of layers that did not.
    _used_elsewhere: list[nn.Parameter]

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """DDP around the module, and a step of a layer's parameters before it runs."""
        self._optimiser = optimiser
        self._collected, self._clipped, self._coming = [], [], {}
        self._ran, self._used_elsewhere = set(), []
        wrapped = super().wrap(module, optimiser, device)
        if self.crew.size > 1:
            self._waiting = {
                layer: own
                for layer in module.modules()
                if (own := [p for p in layer.parameters(recurse=False) if p.requires_grad])
            }
            self._hooks = [
                layer.register_forward_pre_hook(self._before_layer) for layer in self._waiting
            ]
            self._hooks.append(module.register_forward_pre_hook(self._before_network))
            self._hooks.append(module.register_forward_hook(self._after_network))
        return wrapped

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """The norm of all gradients, by which they are clipped; steps are taken as means come.

        Step sizes are those of now.
        """
        if self.crew.size == 1:
            return super().update(optimiser)
        assert self._module is not None
        collected, self._collected = self._collected, []
        # Each number of a mean has one owner.
        squares = torch.tensor([sum(one.square for one in collected)], dtype=torch.float64)
        self.crew.require_group().allreduce([squares]).wait()
        norm = math.sqrt(float(squares))
        # What is there now is neither the own gradient nor the mean.
        self._module.zero_grad(set_to_none=True)
        if math.isfinite(norm):
            # As torch.nn.utils.clip_grad_norm_ has it.
            factor = min(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))
            rates = [float(group["lr"]) for group in optimiser.param_groups]
            self._clipped = [_Coming(one, factor, rates) for one in reversed(collected)]
        return norm

    def after_step(self, pictures: int) -> None:
        """Begin to send means to all: only now, as a step's losses would wait behind them."""
        for coming in self._clipped:
            coming.start(self._thread)
            self._coming |= dict.fromkeys(coming.collected.views, coming)
        self._clipped = []

    def settle(self, sums: Tensor) -> Tensor:
        """Take the steps of all means that are on their way."""
        self._take_steps(list(self._coming))
        return super().settle(sums)

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, of_bucket = bucket.buffer(), self._mean_of(bucket)
        start = int(buffer.storage_offset())
        views = {
            parameter: _BucketView(view.size(), view.stride(), int(view.storage_offset()) - start)
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }

        def collect() -> Tensor:
            shards = of_bucket.collect(buffer.cpu(), self._meeting())
            self._collected.append(_Collected(of_bucket.mean, shards, views))
            return buffer

        return self._start(collect, buffer.device)

    def _before_network(self, *_: Any) -> None:
        self._take_steps(self._used_elsewhere)

    def _before_layer(self, layer: nn.Module, *_: Any) -> None:
        if self._ran is None:
            self._take_steps(self._waiting[layer])
        else:
            self._ran.add(layer)

    def _after_network(self, *_: Any) -> None:
        """Take the steps of layers that did not run, in this batch or ever.

        Parameters of layers that were not called in the first pass may be used by others, as those
        within torch's attention are: from then on they are waited for before the network runs.
        """
        if self._ran is not None:
            left = self._waiting.keys() - self._ran
            self._used_elsewhere = [p for layer in left for p in self._waiting[layer]]
            self._ran = None
        self._take_steps(list(self._coming))

    def _take_steps(self, parameters: Sequence[Tensor]) -> None:
        """Take the steps of the buckets of some parameters, once their means have come."""
        for parameter in parameters:
            if (coming := self._coming.get(parameter)) is None:
                continue
            try:
                mean = coming.result()
            except RuntimeError:  # of gloo: a member is lost
                self._remove_hooks()
                raise
            self._take_step(coming, mean)
            for one in coming.collected.views:
                del self._coming[one]

    def _take_step(self, coming: "_Coming", mean: Tensor) -> None:
        groups = self._optimiser.param_groups
        now = [group["lr"] for group in groups]
        for group, rate in zip(groups, coming.rates, strict=True):
            group["lr"] = rate
        views = coming.collected.views
        for parameter, view in views.items():
            gradient = torch.as_strided(mean, view.size, view.stride, view.offset)
            parameter.grad = (gradient * coming.factor).to(parameter.device)
        self._optimiser.step()
        for parameter in views:
            parameter.grad = None
        for group, rate in zip(groups, now, strict=True):
            group["lr"] = rate

    def _remove_hooks(self) -> None:
        """End the wait for means: another crew may train the same network."""
        self._coming.clear()
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class _BucketView:
    """The view of a bucket that is a parameter's gradient."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Collected:
    """The mean of a bucket at its owners."""

    mean: Mean
    shards: Shards
    #: By parameter.
    views: dict[Tensor, _BucketView]

    @property
    def square(self) -> float:
        """The sum of squares of the own shard's numbers."""
        return float(self.shards.own.double().square().sum())

    def spread(self) -> Tensor:
        """Send the own shard to all; returns the mean."""
        found = self.mean.spread(self.shards)
        self.mean.commit()
        return found


@dataclass(slots=True)
class _Coming:
    """A mean on its way, and the step that its parameters take by it."""

    collected: _Collected
    #: What the mean is multiplied by, so that the norm of all is at most the greatest allowed.
    factor: float
    #: Step sizes of the optimiser's groups.
    rates: list[float]
    _mean: Future[Tensor] | None = None

    def start(self, thread: Executor) -> None:
        """Begin to send it to all."""
        self._mean = thread.submit(self.collected.spread)

    def result(self) -> Tensor:
        """The mean, once it has come; raises RuntimeError where a member is lost."""
        assert self._mean is not None
        return self._mean.result()
