"""Leases of frozen work: nothing lost, nothing counted twice, an end while one trainer lives."""

import heapq
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.crew.coordinator.leases import CHUNK, FIRST, LEASE_S, Leases
from partitioner.crew.messages import Chunk


def test_the_first_chunk_is_small_and_shows_the_pace() -> None:
    leases = Leases([3], 20_000)
    chunk = leases.take(0, 0.0)
    assert chunk == Chunk(3, 0, FIRST)
    assert leases.finish(0, chunk, 0.5, b"")
    assert leases.pace(0) == 2 * FIRST
    assert leases.take(0, 1.0) == Chunk(3, FIRST, FIRST + CHUNK)


def test_variants_are_given_out_in_order() -> None:
    leases = Leases([5, 2], FIRST)
    assert [leases.take(0, 0.0), leases.take(1, 0.0)] == [Chunk(5, 0, FIRST), Chunk(2, 0, FIRST)]


def test_a_lease_that_ran_out_is_given_again_and_its_late_result_still_counts() -> None:
    leases = Leases([0], FIRST)
    chunk = leases.take(0, 0.0)
    assert chunk is not None
    assert leases.take(1, LEASE_S - 1) is None
    leases.renew(0, 10.0)
    assert leases.take(1, LEASE_S + 1) is None
    assert leases.take(1, LEASE_S + 10) == chunk
    assert leases.finish(0, chunk, 50.0, b"same")
    assert leases.is_done
    assert not leases.finish(1, chunk, 1.0, b"other")
    assert (leases.repeated, leases.unequal) == (1, 1)


def test_a_quicker_trainer_gets_what_a_slow_one_holds_at_the_end() -> None:
    leases = Leases([0], 4 * FIRST)
    slow, quick = leases.take(0, 0.0), leases.take(1, 0.0)
    assert slow is not None
    assert quick is not None
    assert leases.finish(0, slow, 100.0, b"")
    assert leases.finish(1, quick, 1.0, b"")
    held, last = leases.take(0, 100.0), leases.take(1, 100.0)
    assert held is not None
    assert last is not None
    leases.finish(1, last, 1.0, b"")
    assert leases.take(1, 101.0) == held
    assert leases.finish(1, held, 1.0, b"same")
    assert not leases.finish(0, held, 100.0, b"same")
    assert (leases.repeated, leases.unequal) == (1, 0)


def test_a_result_of_no_chunk_is_refused() -> None:
    leases = Leases([0], FIRST)
    with pytest.raises(ValueError, match="expected a chunk that was given out"):
        leases.finish(0, Chunk(0, 0, 7), 1.0, b"")


def test_no_pictures_are_done_at_once() -> None:
    assert Leases([0, 1], 0).is_done


@dataclass
class Trainer:
    """Computes so many pictures a second until it dies, hangs for a while once."""

    pace: float
    dies_s: float
    hangs: tuple[float, float]
    free_s: float = 0.0


@dataclass
class History:
    """A generated run in virtual time."""

    leases: Leases
    trainers: list[Trainer]
    told: bool
    counted: list[Chunk] = field(default_factory=list)

    def run(self) -> float:
        order = itertools.count()
        #: (moment, tie, rank, chunk whose result arrives or None for a question)
        events = [(t.free_s, next(order), rank, None) for rank, t in enumerate(self.trainers)]
        queue: list[tuple[float, int, int, tuple[Chunk, float] | None]] = [*events]
        heapq.heapify(queue)
        while queue and not self.leases.is_done:
            now_s, _, rank, result = heapq.heappop(queue)
            trainer = self.trainers[rank]
            if now_s >= trainer.dies_s:
                if self.told:
                    self.leases.drop(rank)
                continue
            if result is not None:
                chunk, took_s = result
                if self.leases.finish(rank, chunk, took_s, b""):
                    self.counted.append(chunk)
            taken = self.leases.take(rank, now_s)
            if taken is None:
                heapq.heappush(queue, (now_s + 1.0, next(order), rank, None))
                continue
            took_s = len(taken) / trainer.pace
            at, seconds = trainer.hangs
            if now_s <= at < now_s + took_s:
                took_s += seconds
            heapq.heappush(queue, (now_s + took_s, next(order), rank, (taken, took_s)))
        return now_s


moments = st.floats(0.0, 400.0)
trainers = st.builds(
    Trainer,
    pace=st.floats(5.0, 2000.0),
    dies_s=moments,
    hangs=st.tuples(moments, st.floats(0.0, 500.0)),
    free_s=st.floats(0.0, 50.0),
)


@settings(max_examples=150, deadline=None)
@given(
    others=st.lists(trainers, max_size=5),
    pace=st.floats(20.0, 500.0),
    pictures=st.integers(1, 9_000),
    variants=st.integers(1, 3),
    told=st.booleans(),
)
def test_generated_histories_count_every_picture_once(
    others: list[Trainer], pace: float, pictures: int, variants: int, told: bool
) -> None:
    survivor = Trainer(pace, float("inf"), (-1.0, 0.0))
    history = History(Leases(range(variants), pictures), [survivor, *others], told)
    took_s = history.run()
    assert history.leases.is_done
    seen = sorted(history.counted)
    for variant in range(variants):
        own = [chunk for chunk in seen if chunk.variant == variant]
        assert [chunk.start for chunk in own] == [0, *(chunk.stop for chunk in own[:-1])]
        assert own[-1].stop == pictures
    # What the others leave behind is waited for, once each at most, and then done alone.
    alone_s = variants * pictures / pace
    waits_s = sum(LEASE_S + 3 * CHUNK / other.pace + 1 for other in others)
    assert took_s <= 2 * alone_s + waits_s + 3 * CHUNK / pace + LEASE_S


def test_unequal_paces_end_together() -> None:
    paces = (400.0, 200.0, 100.0)
    crew = [Trainer(pace, float("inf"), (-1.0, 0.0)) for pace in paces]
    took_s = History(Leases([0], 45_000), crew, told=True).run()
    assert took_s < 1.02 * 45_000 / sum(paces) + 1
