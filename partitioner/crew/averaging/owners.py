"""Changes of a mean at the owners of its shards, before all have it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partitioner.crew.averaging.mean import Owner, Segment, Shard


class OuterStep:
    """An outer step from the last parameters R towards their mean, with Nesterov's momentum.

    v = momentum v + d, R -= step (d + momentum v), where d = R - mean: after DiLoCo (Douillard et
    al., 2023, arXiv 2311.08105). With step 1 and no momentum R becomes the mean. An owner keeps v
    of its shard while the same members meet, and begins anew with others.
    """

    def __init__(self, step: float, momentum: float) -> None:
        self._step, self._momentum = step, momentum
        self._members: tuple[int, ...] = ()
        #: By the ends of a segment: v as committed, and of the meeting under way.
        self._velocity: dict[tuple[int, int], Tensor] = {}
        self._pending: dict[tuple[int, int], Tensor] = {}

    def of(self, members: tuple[int, ...], learned: int) -> Owner:
        """The change of mean differences mean - R, in a meeting of these members.

        learned: numbers from there on are no parameters, and stay as they are.
        """
        known = self._velocity if members == self._members else {}
        self._pending = {}

        def change(own: Tensor, shard: Shard) -> Tensor:
            parts = torch.split(own, [s.stop - s.start for s in shard])
            changed = [own.new_zeros(0)]
            for s, mean in zip(shard, parts, strict=True):
                changed.append(mean if s.start >= learned else self._take_step(mean, s, known))
            return torch.cat(changed)

        return change

    def _take_step(
        self, mean: Tensor, segment: Segment, known: Mapping[tuple[int, int], Tensor]
    ) -> Tensor:
        key = segment.start, segment.stop
        velocity = self._momentum * known[key] - mean if key in known else -mean
        self._pending[key] = velocity
        return self._step * (mean - self._momentum * velocity)

    def commit(self, members: Sequence[int]) -> None:
        """Keep v of the last meeting, which was of these members; of none, begin anew."""
        self._members = tuple(members)
        self._velocity = self._pending if members else {}
