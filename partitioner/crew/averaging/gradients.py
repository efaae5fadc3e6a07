"""Gradients averaged in every step, over DDP: shares by pace, any route, fewer bytes."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore, ProcessGroup

from partitioner.crew.averaging.codecs import CODECS
from partitioner.crew.averaging.factors import Factors
from partitioner.crew.averaging.flat import CodecOf
from partitioner.crew.averaging.kfac import Kfac, KfacSettings
from partitioner.crew.averaging.mean import Mean, Means, Meeting, Segment, Shards
from partitioner.crew.averaging.muon import MuonSettings, MuonSteps
from partitioner.crew.coordinator.shares import by_pace
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import EveryStep, Index, Share


class Gradients(EveryStep):
    """A `Synchroniser` of a fixed crew in which every step's gradients are averaged.

    members: by their rank in the group, the ranks by which `means` knows trainers; by default the
    same. paces: pictures/s by rank in the group, none for equal shares. Whatever the route and the
    shares, fp32 gives the weights of one process, up to rounding; int8 and fp16 do not. What a
    codec leaves out of a gradient is added to the next one (error feedback, after Seide et al.,
    2014), anew when DDP rebuilds its buckets, after the first step. is_factored: tells of a tensor
    that factors of its gradient travel, where they are fewer bytes; None: of none. owner: of
    layers of which each has an owner that takes its step; None: all take the optimiser's steps.
    """

    def __init__(
        self,
        crew: Crew,
        means: Means,
        codec_of: CodecOf,
        *,
        paces: Sequence[float] = (),
        bucket_bytes: int,
        members: tuple[int, ...] = (),
        is_factored: Callable[[str], bool] | None = None,
        owner: KfacSettings | MuonSettings | None = None,
    ) -> None:
        super().__init__(crew)
        self._means, self._codec_of = means, codec_of
        self._paces = paces or [1.0] * crew.size
        self._bucket_bytes = bucket_bytes
        self._members = members or tuple(range(crew.size))
        self._is_factored = is_factored
        self._factors: Factors | None = None
        self._owner_settings = owner
        self._owner: Kfac | MuonSteps | None = None
        #: Pictures of the step that goes on, of each member.
        self._sizes: list[int] = []
        self._names: dict[Tensor, str] = {}
        #: The mean of each of DDP's buckets, by its first parameter and its size.
        self._of_bucket: dict[tuple[Tensor, int], _BucketMean] = {}
        #: One thread takes all means, in DDP's order, while the backward pass goes on.
        self._thread = ThreadPoolExecutor(1)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this trainer has sent."""
        others = sum(one.sent_bytes for one in (self._factors, self._owner) if one is not None)
        return others + sum(bucket.mean.sent_bytes for bucket in list(self._of_bucket.values()))

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """DDP around the module, with these means instead of its own.

        Raises InputError where factors are asked for of what is not a dense layer, and where no
        layer can have an owner.
        """
        self._module = module
        if self._owner_settings is not None:
            self._owner = self._owner_settings.prepare(module, self._means)
        if self.crew.size == 1:
            return module
        if self._owner is not None:
            self._owner.share_weights(self._meeting())
        if self._is_factored is not None:
            self._factors = Factors(module, self._is_factored, self._means)
            self._factors.share_weights(self._meeting())
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        wrapped = nn.parallel.DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=_for_ddp(self.crew),
            bucket_cap_mb=self._bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def shares(self, batches: Sequence[Index], epoch: int) -> Iterator[Share]:
        """A share of every batch, in proportion to the paces.

        A trainer without a picture takes one with share 0, as all have to take part in the mean.
        """
        rank = self.crew.rank
        for number, index in enumerate(batches):
            sizes = by_pace(self._paces, len(index))
            start, self._sizes = sum(sizes[:rank]), sizes
            share = index[start : start + sizes[rank]]
            if len(share):
                yield number, share, len(share) / len(index)
            else:
                yield number, index[:1], 0.0

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """A step of one's own, once the gradients that DDP leaves out are averaged too.

        Layers that have an owner have taken theirs before, and count in no norm but by not being
        finite.
        """
        if self._owner is not None:
            meeting = self._meeting() if self.crew.size > 1 else None
            if not self._owner.take_step(optimiser, self._sizes, meeting):
                return math.inf
        if self._factors is not None:
            self._factors.average(self._meeting(), self._sizes)
        return super().update(optimiser)

    def settle(self, sums: Tensor) -> Tensor:
        """Take the first one's weights of layers whose gradients each multiplies by itself."""
        if self._factors is not None:
            self._factors.share_weights(self._meeting())
        return super().settle(sums)

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, of_bucket = bucket.buffer(), self._mean_of(bucket)

        def average() -> Tensor:
            shards = of_bucket.collect(buffer.cpu(), self._meeting())
            found = of_bucket.mean.spread(shards)
            of_bucket.mean.commit()
            buffer.copy_(found)
            return buffer

        return self._start(average, buffer.device)

    def _start(
        self, action: Callable[[], Tensor], device: torch.device
    ) -> torch.futures.Future[Tensor]:
        """Begin what makes of a bucket on `device` what DDP takes for its gradients."""
        future = torch.futures.Future[Tensor]()
        if device.type == "cpu":
            self._thread.submit(_settle, future, action)
        else:
            # A copy from a device waits for the backward pass anyway.
            _settle(future, action)
        return future

    def _meeting(self) -> Meeting:
        return Meeting(
            group=self.crew.require_group(),
            members=self._members,
            weights=(1.0,) * self.crew.size,
            rank=self._members[self.crew.rank],
        )

    def _mean_of(self, bucket: GradBucket) -> "_BucketMean":
        """The mean of a bucket, whose consecutive parameters of one codec are a segment."""
        parameters = bucket.parameters()
        key = (parameters[0], bucket.buffer().numel())
        if key not in self._of_bucket:
            segments, start = [], 0
            named = [(self._codec_of(self._names[p]), p.numel()) for p in parameters]
            for codec, run in groupby(named, key=lambda one: one[0]):
                stop = start + sum(count for _, count in run)
                segments.append(Segment(start, stop, CODECS[codec]))
                start = stop
            self._of_bucket[key] = _BucketMean(Mean(segments, self._means))
        return self._of_bucket[key]


@dataclass(slots=True)
class _BucketMean:
    """The means of a bucket, and what its codecs left out of the last gradient."""

    mean: Mean
    left: Tensor | None = None

    def collect(self, gradient: Tensor, meeting: Meeting) -> Shards:
        """Bring the mean to its owners; `gradient` is the own one, of which nothing was sent."""
        if self.left is not None:
            gradient = gradient + self.left
        shards = self.mean.collect(gradient, meeting)
        if shards.sent is not gradient:
            self.left = gradient - shards.sent
        return shards


def _for_ddp(crew: Crew) -> ProcessGroup | None:
    """The crew's group; DDP takes no group of gloo's own type, but one that holds it.

    Only torch.distributed.new_group makes such a one, of members of a fixed default group.
    """
    group = crew.group
    if group is None or isinstance(group, ProcessGroup):
        return group
    holding = ProcessGroup(HashStore(), crew.rank, crew.size)
    gloo = ProcessGroup.BackendType.GLOO
    holding._set_default_backend(gloo)
    holding._register_backend(torch.device("cpu"), gloo, group)
    return holding


def _settle(future: torch.futures.Future[Tensor], action: Callable[[], Tensor]) -> None:
    """Give a future the outcome of `action`."""
    try:
        future.set_result(action())
    except RuntimeError as error:  # of gloo: a member is lost
        future.set_exception(error)  # type: ignore[arg-type]
