"""Step sizes and lengths of rounds with which means of parameters lose little. Pure."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from partitioner.run.step_size import learning_rate, warmup_steps

#: Pictures of a round, after so many steps of the whole training.
Period = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class RoundLengths:
    """Lengths of the rounds and epochs of a network that several trainers share."""

    #: Pictures of a round, unless `period` says another number.
    every_pictures: int
    #: Batches of an epoch, of all trainers.
    batches: int
    epochs: int
    #: Pictures of a round, after so many batches of all epochs.
    period: Period | None = None


def step_factor(steps: Sequence[float], parts: int) -> float:
    """The factor of AdamW's step size in rounds of trainers that took `steps` in the last one.

    A batch is cut into `parts` steps. A step of AdamW on an n-th of a batch has the signal of a
    whole batch's divided by sqrt(n): its step size goes with the square root of the batch (Malladi
    et al., 2022, arXiv 2205.10287). A mean weighted by steps then moves as far as averaged
    gradients if each step is n_eff / sqrt(n) as long, n_eff = (sum k)^2 / sum k^2.
    """
    return sum(steps) ** 2 / sum(k * k for k in steps) / math.sqrt(parts)


def averages_moments(seq: int, every: int, *, whole: bool) -> bool:
    """Tell whether AdamW's moments are averaged in meeting `seq`: in one of `every`, of 0 in none.

    Meetings of some are drawn: their numbers can come in turns, those of one site always even.
    """
    if not every:
        return False
    digest = hashlib.sha256(str(seq).encode()).digest()
    return (seq if whole else int.from_bytes(digest[:8], "big")) % every == 0


def constant_period(pictures: int) -> Period:
    """Rounds of the same number of pictures."""
    return lambda done: pictures


def lengthen(pictures: int, share: float) -> int:
    """The pictures of a round at a step size that is this share of the peak."""
    return math.floor(pictures / share**2)


@lru_cache(maxsize=1000)
def growing_means(first: int, steps: int, epoch: int) -> int:
    """Means of a training whose rounds grow from `first` steps, with one at each epoch's end."""
    period, since, means = growing_period(first, steps), 0, 0
    for done in range(1, steps + 1):
        since += 1
        if since >= period(done) or done % epoch == 0 or done == steps:
            since, means = 0, means + 1
    return means


def growing_period(pictures: int, steps: int) -> Period:
    """Rounds that grow as the step size falls, over a training of `steps`.

    They have `pictures` in the warm-up, and then (peak / step size)^2 times as many, by the size of
    the last step done: after the quadratic synchronisation rule (Gu et al., 2023, arXiv
    2310.14423).
    """
    warmup = warmup_steps(steps)

    def period(done: int) -> int:
        last = max(0, done - 1)
        if last < warmup:
            return pictures
        share = learning_rate(last, steps, 1.0)
        # At the very end the step size is 0: a round ends with its epoch anyway.
        return lengthen(pictures, max(share, 1e-6))

    return period
