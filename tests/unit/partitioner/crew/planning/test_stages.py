"""Stages of 24 blocks on four trainers, and splits against all others."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.crew.planning import stages
from partitioner.crew.planning.stages import PipelineFacts, in_best_order, pipeline_time, split

BLOCKS, ALIKE = 24, (1.0, 1.0, 1.0, 1.0)
BALANCED = (6, 6, 6, 6)


def pipeline(
    micro_batches: int, sync: float = 0.0, speeds: tuple[float, ...] = ALIKE
) -> PipelineFacts:
    return PipelineFacts(speeds=speeds, micro_batches=micro_batches, sync=sync)


@pytest.mark.parametrize(
    ("micro_batches", "sync", "balanced", "best", "sizes"),
    [
        (1, 6, 108, 96, (4, 5, 6, 9)),
        (4, 0, 126, 122, (8, 6, 5, 5)),
        (4, 6, 162, 161, (5, 7, 6, 6)),
        (8, 0, 198, 198, BALANCED),
        (8, 6, 234, 234, BALANCED),
        (16, 0, 342, 342, BALANCED),
        (16, 6, 378, 378, BALANCED),
    ],
)
def test_unbalanced_stages_are_quicker_with_few_micro_batches(
    micro_batches: int, sync: float, balanced: float, best: float, sizes: tuple[int, ...]
) -> None:
    assert pipeline_time(BALANCED, pipeline(micro_batches, sync)) == balanced
    assert pipeline_time(sizes, pipeline(micro_batches, sync)) == best
    assert split(BLOCKS, pipeline(micro_batches, sync)) == (sizes, best)


def test_unequal_trainers_and_their_order() -> None:
    four = pipeline(8, speeds=(4.0, 2.0, 1.0, 1.0))
    assert pipeline_time(BALANCED, four) == 175.5
    assert split(BLOCKS, four) == ((14, 6, 1, 3), 96.5)
    assert pipeline_time((14, 1, 3, 6), pipeline(8, speeds=(4.0, 1.0, 1.0, 2.0))) == 94.5
    order, sizes, _, time = in_best_order(BLOCKS, four)
    assert time <= 94.5
    speeds = tuple(four.speeds[i] for i in order)
    assert pipeline_time(sizes, pipeline(8, speeds=speeds)) == time


@pytest.mark.parametrize(
    ("in_flight", "time"), [((4, 3, 2, 1), 198), ((2, 2, 2, 1), 414), ((1, 1, 1, 1), 576)]
)
def test_fewer_micro_batches_in_flight_are_slower(in_flight: tuple[int, ...], time: float) -> None:
    limited = PipelineFacts(speeds=ALIKE, micro_batches=8, in_flight=in_flight)
    assert pipeline_time(BALANCED, limited) == time


@pytest.mark.parametrize(
    ("in_flight", "stage"), [((1, 2, 1, 1), 1), ((4, 2, 3, 1), 2), ((3, 3, 3, 4), 3)]
)
def test_more_in_flight_than_at_the_stage_before_would_wait_for_ever(
    in_flight: tuple[int, ...], stage: int
) -> None:
    limited = PipelineFacts(speeds=ALIKE, micro_batches=8, in_flight=in_flight)
    most, found = in_flight[stage - 1], in_flight[stage]
    expected = f"^stage {stage}: expected at most {most} micro-batches in flight, .*, got {found}$"
    with pytest.raises(ValueError, match=expected):
        pipeline_time(BALANCED, limited)
    # Of one micro-batch there are no more.
    assert pipeline_time(
        BALANCED, PipelineFacts(speeds=ALIKE, micro_batches=1, in_flight=in_flight)
    )


@pytest.mark.parametrize(
    ("cap", "time", "sizes", "in_flight"),
    [
        (72, 198, BALANCED, (4, 3, 2, 1)),
        (60, 216, (5, 6, 7, 6), (4, 3, 2, 1)),
        (54, 261, (4, 5, 6, 9), (3, 3, 2, 1)),
        (48, 312, (4, 6, 6, 8), (3, 2, 2, 1)),
        (42, 366, (5, 5, 7, 7), (2, 2, 1, 1)),
        (36, 576, BALANCED, (1, 1, 1, 1)),
    ],
)
def test_stages_and_what_they_keep_are_chosen_together(
    cap: int, time: float, sizes: tuple[int, ...], in_flight: tuple[int, ...]
) -> None:
    """A block is 4 units, and 2 for each micro-batch in flight; trainers have room for `cap`."""
    most = [[cap // (4 + 2 * kept) for kept in range(1, 5)]] * 4
    found = in_best_order(BLOCKS, pipeline(8), most)
    assert (found.time, found.blocks, found.in_flight) == (time, sizes, in_flight)
    with pytest.raises(ValueError, match="24 blocks do not fit in 4 stages"):
        in_best_order(BLOCKS, pipeline(8), [[cap // 13] * 4] * 4)


def test_given_limits_stay() -> None:
    limited = PipelineFacts(speeds=ALIKE, micro_batches=8, in_flight=(2, 2, 2, 1))
    assert in_best_order(BLOCKS, limited).in_flight == (2, 2, 2, 1)
    assert in_best_order(BLOCKS, limited).time <= 414


@settings(max_examples=10)
@given(
    st.integers(3, 8),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=2, max_size=3),
    st.integers(1, 5),
    st.lists(st.integers(8, 40), min_size=3, max_size=3),
    st.sampled_from([0.0, 1.5, 20.0]),
)
def test_stages_under_memory_are_the_best_of_all(
    blocks: int, speeds: list[float], many: int, memory: list[int], transfer: float
) -> None:
    count = len(speeds)
    most = [[room // (4 + 2 * kept) for kept in range(1, count + 1)] for room in memory[:count]]
    tried = []
    for order in permutations(range(count)):
        ordered = tuple(speeds[i] for i in order)
        for kept in product(range(1, count + 1), repeat=count):
            never_waits = all(n <= count - i for i, n in enumerate(kept))
            if not never_waits or list(kept) != sorted(kept, reverse=True):
                continue
            one = PipelineFacts(
                speeds=ordered, micro_batches=many, transfer=transfer, in_flight=kept
            )
            for sizes in product(range(1, blocks + 1), repeat=count):
                rooms = [most[i][n - 1] for i, n in zip(order, kept, strict=True)]
                fits = all(size <= room for size, room in zip(sizes, rooms, strict=True))
                if sum(sizes) == blocks and fits:
                    tried.append(pipeline_time(sizes, one))
    given_facts = PipelineFacts(speeds=tuple(speeds), micro_batches=many, transfer=transfer)
    if tried:
        assert in_best_order(blocks, given_facts, most).time == pytest.approx(min(tried))
    else:
        with pytest.raises(ValueError, match="do not fit"):
            in_best_order(blocks, given_facts, most)


def test_a_transfer_delays_every_stage() -> None:
    one = PipelineFacts(speeds=(1.0, 1.0), micro_batches=1, transfer=5.0)
    # 2 forward, way, 2 forward, 4 backward, way back, 4 backward.
    assert pipeline_time((2, 2), one) == 22
    assert pipeline_time((3,), PipelineFacts(speeds=(1.5,), micro_batches=4)) == 24


def test_stages_are_no_larger_than_what_fits() -> None:
    sizes, _ = split(BLOCKS, pipeline(8), most=[3, 9, 9, 9])
    assert sizes[0] <= 3
    with pytest.raises(ValueError, match="24 blocks do not fit in stages of at most"):
        split(BLOCKS, pipeline(8), most=[3, 3, 3, 3])
    with pytest.raises(ValueError, match="3 blocks do not fit"):
        split(3, pipeline(8))


@settings(max_examples=10)
@given(
    st.integers(5, 14),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=4),
    st.integers(1, 6),
    st.sampled_from([0.0, 3.0]),
)
def test_climbing_is_near_the_best_of_all(
    blocks: int, speeds: list[float], micro_batches: int, sync: float
) -> None:
    one = pipeline(micro_batches, sync, tuple(speeds))
    _, best = split(blocks, one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_MOST_SPLITS", 0)
        sizes, climbed = split(blocks, one)
    assert sum(sizes) == blocks
    assert best <= climbed <= 1.25 * best
