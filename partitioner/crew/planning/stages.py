"""A network in stages of consecutive blocks, each on a trainer of a pipeline (1F1B). Pure.

Unequal stages after Luo's unified plan. Time is counted in units of one block's forward pass on a
trainer of speed 1; a backward pass takes two.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

FORWARD, BACKWARD = 1.0, 2.0
#: Most ways to cut blocks into stages that are all tried, and most stages whose order is.
_MOST_SPLITS, _MOST_ORDERED = 2000, 4


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
    if sum(limits) < blocks or count > blocks or min(limits) < 1:
        raise ValueError(f"{blocks} blocks do not fit in stages of at most {limits}")
    if math.comb(blocks - 1, count - 1) <= _MOST_SPLITS:
        return _best_of(_splits(blocks, limits), pipeline)
    cut = _least_slowest(blocks, pipeline.speeds, limits)
    now = pipeline_time(cut, pipeline)
    while True:
        tried = [(pipeline_time(near, pipeline), near) for near in _near(cut, limits)]
        least, near = min(tried)
        if least >= now:
            return cut, now
        cut, now = near, least


def in_best_order(
    blocks: int, pipeline: PipelineFacts, most: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """The order of trainers (indices into `speeds`), their stages and time: the least of all.

    `most` blocks fit on each trainer, by the place of its stage: later ones keep fewer
    micro-batches. Up to four trainers are tried in all orders, more only as given. Raises
    ValueError where the blocks fit in no order.
    """
    count = len(pipeline.speeds)
    limits = [[blocks] * count] * count if most is None else most
    given = tuple(range(count))
    found: dict[object, tuple[float, tuple[int, ...], tuple[int, ...]]] = {}
    for order in permutations(given) if count <= _MOST_ORDERED else [given]:
        alike = tuple((pipeline.speeds[i], limits[i][place]) for place, i in enumerate(order))
        fits = [limit for _, limit in alike]
        if alike in found or sum(fits) < blocks or min(fits) < 1:
            continue
        ordered = PipelineFacts(
            speeds=tuple(pipeline.speeds[i] for i in order),
            micro_batches=pipeline.micro_batches,
            sync=pipeline.sync,
            transfer=pipeline.transfer,
            in_flight=pipeline.in_flight,
        )
        cut, time = split(blocks, ordered, fits)
        found[alike] = time, order, cut
    if not found:
        raise ValueError(f"{blocks} blocks do not fit in {count} stages")
    time, order, cut = min(found.values())
    return order, cut, time


def _splits(blocks: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to cut blocks into stages of at most so many, all of them."""
    for cuts in combinations(range(1, blocks), len(most) - 1):
        ends = (0, *cuts, blocks)
        sizes = tuple(b - a for a, b in pairwise(ends))
        if all(size <= limit for size, limit in zip(sizes, most, strict=True)):
            yield sizes


def _best_of(
    cuts: Iterator[tuple[int, ...]], pipeline: PipelineFacts
) -> tuple[tuple[int, ...], float]:
    """The first of the quickest; those whose lower bound is above the best are not simulated."""
    best, least = next(cuts), math.inf
    for cut in (best, *cuts):
        if _at_least(cut, pipeline) < least and (time := pipeline_time(cut, pipeline)) < least:
            best, least = cut, time
    return best, least


def _at_least(blocks: Sequence[int], pipeline: PipelineFacts) -> float:
    """A stage begins after the forward passes before it, and ends before their backward passes."""
    before = least = 0.0
    for size, speed in zip(blocks, pipeline.speeds, strict=True):
        busy = (FORWARD + BACKWARD) * size / speed
        least = max(least, before + pipeline.micro_batches * busy)
        before += busy
    return least


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
