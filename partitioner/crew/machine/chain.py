"""Which sub-models may be trained now, given which are finished."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

#: What a later sub-model needs: all earlier ones, the first one, or its predecessor's first epochs.
Chain = Literal["strict", "star", "lead"]


def startable(
    chain: Chain,
    count: int,
    progress: Mapping[int, float],
    begun: Collection[int] = (),
    *,
    lead: float = 1.0,
) -> list[int]:
    """The sub-models of `count` that may start now, in order.

    `progress` is the share of the epochs that each one has done, 0 to 1, absent is 0; `begun` are
    under way or finished. With `lead`, sub-model k starts once k - 1 has done that share.
    """

    def done(k: int) -> float:
        return progress.get(k, 0.0)

    def ready(k: int) -> bool:
        if k == 0:
            return True
        if chain == "star":
            return done(0) >= 1
        return done(k - 1) >= (lead if chain == "lead" else 1)

    return [k for k in range(count) if k not in begun and done(k) < 1 and ready(k)]


def makespan(
    chain: Chain, works: Sequence[float], paces: Sequence[float], *, lead: float = 1.0
) -> float:
    """Units of time until all sub-models are trained, each by one trainer, the quickest free first.

    `works` are units of work by sub-model, `paces` units of work by unit of time and trainer.
    """
    now, begun, free = 0.0, set[int](), sorted(range(len(paces)), key=lambda r: -paces[r])
    #: Sub-model -> its start and its seconds; trainer by sub-model.
    runs: dict[int, tuple[float, float]] = {}
    by: dict[int, int] = {}

    def progress() -> dict[int, float]:
        # Rounding must not keep a successor from starting.
        return {k: min(1.0, (now - at) / took + 1e-12) for k, (at, took) in runs.items()}

    while len(begun) < len(works) or by:
        for k in startable(chain, len(works), progress(), begun, lead=lead)[: len(free)]:
            by[k] = free.pop(0)
            runs[k] = now, works[k] / paces[by[k]]
            begun.add(k)
        moments = [runs[k][0] + share * runs[k][1] for k in by for share in {lead, 1.0}]
        now = min(moment for moment in moments if moment > now)
        for k in [k for k in by if progress()[k] >= 1]:
            free.append(by.pop(k))
        free.sort(key=lambda r: -paces[r])
    return now
