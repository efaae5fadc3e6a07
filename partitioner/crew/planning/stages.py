"""A network in stages of consecutive blocks, each on a trainer of a pipeline (1F1B). Pure.

Unequal stages, and what each keeps in its memory, after Luo's unified plan. Time is counted in
units of one block's forward pass on a trainer of speed 1; a backward pass takes two.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise, permutations
from typing import NamedTuple

FORWARD, BACKWARD = 1.0, 2.0
#: Most ways to cut blocks into stages that are all tried, and most stages whose order is.
_MOST_SPLITS, _MOST_ORDERED = 2000, 4
#: What rounding may add to a bound.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """Facts that all splits of one network have in common."""

    #: Of a trainer each, in the order of the stages: blocks per unit of time.
    speeds: tuple[float, ...]
    micro_batches: int
    #: After a stage's last backward pass, for each of its blocks.
    sync: float = 0.0
    #: A micro-batch's way from a stage to the next, or back.
    transfer: float = 0.0
    #: Most micro-batches between forward and backward, by stage, none more than the one before;
    #: S - i never waits.
    in_flight: tuple[int, ...] | None = None


def pipeline_time(blocks: Sequence[int], pipeline: PipelineFacts) -> float:
    """Units until the last stage of a step has ended, by simulating 1F1B pass by pass.

    Stage i does as many forward passes as may be in flight, then backward and forward in turns.
    Raises ValueError where more may be than at the stage before: both would wait for ever.
    """
    count, many = len(blocks), pipeline.micro_batches
    limits = [min(n, many) for n in pipeline.in_flight or range(count, 0, -1)]
    for i, (before, limit) in enumerate(pairwise(limits), 1):
        if limit > before:
            raise ValueError(
                f"stage {i}: expected at most {before} micro-batches in flight, as many as at the "
                f"stage before, got {limit}"
            )
    orders = [_passes(limit, many) for limit in limits]
    ended: list[dict[tuple[bool, int], float]] = [{} for _ in range(count)]
    at = [0.0] * count
    done = [0] * count
    moved = True
    while moved:
        moved = False
        for i in range(count):
            while done[i] < 2 * many:
                is_forward, micro = one = orders[i][done[i]]
                ready = _ready(i, one, ended, pipeline.transfer)
                if ready is None:
                    break
                passes = FORWARD if is_forward else BACKWARD
                at[i] = max(at[i], ready) + passes * blocks[i] / pipeline.speeds[i]
                ended[i][is_forward, micro] = at[i]
                done[i] += 1
                moved = True
    return max(end + pipeline.sync * size for end, size in zip(at, blocks, strict=True))


def _passes(limit: int, many: int) -> list[tuple[bool, int]]:
    """A stage's forward (True) and backward passes, in order."""
    order = [(True, micro) for micro in range(limit)]
    for micro in range(many):
        order.append((False, micro))
        if micro + limit < many:
            order.append((True, micro + limit))
    return order


def _ready(
    i: int, one: tuple[bool, int], ended: list[dict[tuple[bool, int], float]], transfer: float
) -> float | None:
    """The earliest begin of a pass; None while what it needs has not ended."""
    is_forward, micro = one
    neighbour = i - 1 if is_forward else i + 1
    if 0 <= neighbour < len(ended):
        end = ended[neighbour].get(one)
        return None if end is None else end + transfer
    return 0.0 if is_forward else ended[i][True, micro]


def split(
    blocks: int, pipeline: PipelineFacts, most: Sequence[int] | None = None
) -> tuple[tuple[int, ...], float]:
    """The stages of a pipeline, in blocks, that take least, and their time.

    `most` blocks fit on each trainer; raises ValueError where all of them do not suffice. Up to
    `_MOST_SPLITS` ways are all tried; of more, the one with the least slowest stage is improved by
    moving blocks while that helps.
    """
    count = len(pipeline.speeds)
    limits = [blocks] * count if most is None else list(most)
    found = _quickest(blocks, pipeline, limits)
    if found is None:
        raise ValueError(f"{blocks} blocks do not fit in stages of at most {limits}")
    return found


def _quickest(
    blocks: int, pipeline: PipelineFacts, limits: Sequence[int], most_time: float = math.inf
) -> tuple[tuple[int, ...], float] | None:
    """`split`; None where the blocks do not fit, or all tried ways take more than `most_time`."""
    count = len(pipeline.speeds)
    if sum(limits) < blocks or count > blocks or min(limits) < 1:
        return None
    if most_time < math.inf and _least_of_all(blocks, pipeline, limits) > most_time:
        return None
    if math.comb(blocks - 1, count - 1) <= _MOST_SPLITS:
        return _best_of(_splits(blocks, limits), pipeline, most_time)
    cut = _least_slowest(blocks, pipeline.speeds, limits)
    now = pipeline_time(cut, pipeline)
    while True:
        tried = [(pipeline_time(near, pipeline), near) for near in _near(cut, limits)]
        least, near = min(tried)
        if least >= now:
            return cut, now
        cut, now = near, least


class Staged(NamedTuple):
    """Stages of a pipeline: of each the trainer (index into `speeds`), and what it keeps."""

    order: tuple[int, ...]
    blocks: tuple[int, ...]
    in_flight: tuple[int, ...]
    time: float


def in_best_order(
    blocks: int, pipeline: PipelineFacts, most: Sequence[Sequence[int]] | None = None
) -> Staged:
    """The order of trainers, stages and micro-batches in flight that together take least.

    After Luo's trade-off of memory against speed: `most[i][n - 1]` blocks fit on trainer i while it
    keeps n micro-batches, n up to the number of trainers. Up to four trainers are tried in all
    orders, more only as given; of equals the first order, then the fewest in flight. All
    `in_flight` are tried, or the pipeline's own. Raises ValueError where the blocks fit in no way.
    """
    count = len(pipeline.speeds)
    rows = [(blocks,) * count] * count if most is None else [tuple(row) for row in most]
    own = pipeline.in_flight
    given = tuple(range(count))
    best: tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
    seen = set[object]()
    for kept in _in_flight(count, pipeline.micro_batches) if own is None else [own]:
        for order in permutations(given) if count <= _MOST_ORDERED else [given]:
            speeds = tuple(pipeline.speeds[i] for i in order)
            fits = tuple(rows[i][n - 1] for i, n in zip(order, kept, strict=True))
            if (kept, speeds, fits) in seen:
                continue
            seen.add((kept, speeds, fits))
            one = replace(pipeline, speeds=speeds, in_flight=kept)
            found = _quickest(blocks, one, fits, math.inf if best is None else best[0])
            if found is not None:
                tried = found[1], order, kept, found[0]
                best = tried if best is None else min(best, tried)
    if best is None:
        raise ValueError(f"{blocks} blocks do not fit in {count} stages")
    time, order, kept, cut = best
    return Staged(order, cut, kept, time)


def _in_flight(count: int, many: int) -> Iterator[tuple[int, ...]]:
    """Micro-batches that stages may keep, most first: none more than before, or never waits."""

    def longer(kept: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(kept) == count:
            yield kept
            return
        for limit in range(min(*kept[-1:], many, count - len(kept)), 0, -1):
            yield from longer((*kept, limit))

    return longer(())


def _splits(blocks: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to cut blocks into stages of at most so many, all of them."""
    for cuts in combinations(range(1, blocks), len(most) - 1):
        ends = (0, *cuts, blocks)
        sizes = tuple(b - a for a, b in pairwise(ends))
        if all(size <= limit for size, limit in zip(sizes, most, strict=True)):
            yield sizes


def _best_of(
    cuts: Iterator[tuple[int, ...]], pipeline: PipelineFacts, most_time: float
) -> tuple[tuple[int, ...], float] | None:
    """The first of the quickest; those whose lower bound is above the best are not simulated."""
    best, least = None, math.nextafter(most_time, math.inf)
    for cut in cuts:
        if _at_least(cut, pipeline) < least and (time := pipeline_time(cut, pipeline)) < least:
            best, least = (cut, time), time
    return best


def _at_least(blocks: Sequence[int], pipeline: PipelineFacts) -> float:
    """A lower bound of `pipeline_time`: of a stage's own passes, and of waiting for those after it.

    A stage begins after the forward passes before it, and ends before their backward passes, with
    the ways between. Of what it keeps, each micro-batch goes to the last stage and back before its
    place is free.
    """
    many, count = pipeline.micro_batches, len(blocks)
    busy = [(FORWARD + BACKWARD) * n / s for n, s in zip(blocks, pipeline.speeds, strict=True)]
    there_and_back = 2 * pipeline.transfer
    starts = list(accumulate([own + there_and_back for own in busy[:-1]], initial=0.0))
    end = starts[-1] + busy[-1]
    kept = pipeline.in_flight or range(count, 0, -1)
    least = 0.0
    for own, start, limit in zip(busy, starts, kept, strict=True):
        turns = -(-many // limit)
        least = max(least, start + many * own, start + turns * (end - start))
    # Rounding may put the sum above the time of the passes.
    return least * (1 - _EPSILON)


def _least_of_all(blocks: int, pipeline: PipelineFacts, most: Sequence[int]) -> float:
    """A lower bound of `_at_least` over all cuts: dynamic programming from the last stage.

    Of the stages so far and each number of blocks: the shortest way to the end and back, and the
    least bound; both need not be of the same cut.
    """
    many = pipeline.micro_batches
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    kept = pipeline.in_flight or range(len(most), 0, -1)
    for speed, limit, places in reversed(list(zip(pipeline.speeds, most, kept, strict=True))):
        turns = -(-many // places)
        before: dict[int, tuple[float, float]] = {}
        for used, (way, least) in best.items():
            for size in range(1, min(limit, blocks - used) + 1):
                own = (FORWARD + BACKWARD) * size / speed
                # With the ways to the stages after it and back.
                on = own + 2 * pipeline.transfer * (used > 0)
                shortest, lowest = before.get(used + size, (math.inf, math.inf))
                tried = max(many * own, turns * (on + way), on + least)
                before[used + size] = min(shortest, on + way), min(lowest, tried)
        best = before
    return best[blocks][1] * (1 - _EPSILON)


def _least_slowest(blocks: int, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Stages whose slowest is the quickest: dynamic programming over blocks and trainers used."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for i, (speed, limit) in enumerate(zip(speeds, most, strict=True)):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (slowest, sizes) in best.items():
            left = len(speeds) - i - 1
            for size in range(1, min(limit, blocks - used - left) + 1):
                tried = max(slowest, size / speed), (*sizes, size)
                if used + size not in after or tried < after[used + size]:
                    after[used + size] = tried
        best = after
    return best[blocks][1]


def _near(cut: tuple[int, ...], most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """One or two blocks from one stage to another."""
    for source, size in enumerate(cut):
        for target in range(len(cut)):
            for moved in (1, 2):
                fits = size > moved and cut[target] + moved <= most[target]
                if source != target and fits:
                    changed = list(cut)
                    changed[source] -= moved
                    changed[target] += moved
                    yield tuple(changed)
