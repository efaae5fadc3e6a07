"""The rungs of an agent's queue: admitted by the quickest, run at the highest that is in time."""

import random
from heapq import heappop, heappush

import pytest
from msgspec import Struct

from mdp.queueing.compute_times import ComputeTimes, highest_rung
from mdp.queueing.queue import AgentQueue

#: Seconds of one picture at each rung, the top one first, and the share that it is right on.
SECONDS, RIGHT = (0.008, 0.004, 0.002), (0.78, 0.765, 0.74)
BUDGET_S = 0.05


class Job(Struct, frozen=True, eq=False):
    arrived_s: float
    deadline_s: float
    client: str = "one"
    digest: str = "0" * 64
    size_bytes: int = 0


def job(arrived_s: float = 0.0, budget_s: float = BUDGET_S, client: str = "one") -> Job:
    return Job(arrived_s, arrived_s + budget_s, client)


def times(*one_s: float, most: int = 1, fixed: float = 0.0) -> list[ComputeTimes]:
    """Rungs of which a batch of n takes one_s (fixed + (1 - fixed) n)."""
    rungs = [ComputeTimes() for _ in one_s]
    for rung, own_s in zip(rungs, measured(*one_s, most=most, fixed=fixed), strict=True):
        rung.renew(most, own_s)
    return rungs


def measured(*one_s: float, most: int = 1, fixed: float = 0.0) -> list[dict[int, float]]:
    return [{n: own_s * (fixed + (1 - fixed) * n) for n in range(1, most + 1)} for own_s in one_s]


def queue_of(*one_s: float, most: int = 1, fixed: float = 0.0) -> AgentQueue[Job]:
    queue: AgentQueue[Job] = AgentQueue()
    queue.renew(most, measured(*one_s, most=most, fixed=fixed))
    return queue


@pytest.mark.parametrize(("waiting", "rung"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (30, 2)])
def test_the_highest_rung_that_is_well_in_time(waiting: int, rung: int) -> None:
    """Budget 50 ms, all just arrived: the top for up to 3, the middle for up to 7."""
    assert highest_rung([(0.0, BUDGET_S, 0.0)] * waiting, 0.0, times(*SECONDS)) == rung
    queue = queue_of(*SECONDS)
    for _ in range(waiting):
        queue.offer(job(), 0.0)
    assert len(queue.take(0.0)[0]) == 1
    assert queue.rung == rung


def play(one_s: tuple[float, ...], right: tuple[float, ...], seed: int, **batches: float) -> float:
    """Answers in time times their accuracy, of 60 s with ten times the arrivals each tenth s."""
    draw, now_s, arrivals = random.Random(seed), 0.0, list[float]()
    while now_s < 60:
        # Thinned, so that the rate changes at once.
        now_s += draw.expovariate(600)
        if int(now_s) % 10 == 9 or draw.random() < 0.1:
            arrivals.append(now_s)
    queue = queue_of(*one_s, **batches)  # type: ignore[arg-type]
    events: list[tuple[float, int, list[Job]]] = []
    for number, arrived_s in enumerate(arrivals):
        heappush(events, (arrived_s, number, []))
    score, number, busy = 0.0, len(arrivals), False
    while events:
        now_s, _, ended = heappop(events)
        if ended:
            took_s = queue.rungs[queue.rung].of(len(ended))
            queue.done(took_s, pictures=len(ended))
            # Refusals lower the estimates, so that one may end a moment too late.
            score += right[queue.rung] * sum(now_s <= each.deadline_s + 1e-9 for each in ended)
            busy = False
        else:
            queue.offer(job(now_s), now_s)
        if not busy:
            taken, _ = queue.take(now_s)
            if taken:
                busy, number = True, number + 1
                heappush(events, (now_s + queue.rungs[queue.rung].of(len(taken)), number, taken))
    return 100 * score / len(arrivals)


def mean(one_s: tuple[float, ...], right: tuple[float, ...], **batches: float) -> float:
    return sum(play(one_s, right, seed, **batches) for seed in range(3)) / 3


def test_a_ladder_beats_each_fixed_rung_under_bursts() -> None:
    fixed = [mean(SECONDS[rung:][:1], RIGHT[rung:][:1]) for rung in range(3)]
    assert fixed == [
        pytest.approx(46, abs=0.7),
        pytest.approx(54, abs=0.7),
        pytest.approx(69, abs=0.7),
    ]
    assert 70.1 <= mean(SECONDS, RIGHT) <= 70.7


def test_a_ladder_beats_the_quickest_rung_in_batches() -> None:
    """Batches of up to 8, half of the time fixed."""
    assert mean(SECONDS[2:], RIGHT[2:], most=8, fixed=0.5) == pytest.approx(74.0, abs=0.2)
    assert mean(SECONDS, RIGHT, most=8, fixed=0.5) == pytest.approx(76.5, abs=0.3)


def test_requests_are_admitted_by_the_quickest_rung() -> None:
    queue = queue_of(0.04, 0.01)
    assert [queue.offer(job(), 0.0) for _ in range(5)] == [[]] * 5
    sixth = job()
    assert queue.offer(sixth, 0.0) == [(sixth, "too_late")]
    now_s = 0.0
    while queue.waiting:
        taken, dropped = queue.take(now_s)
        assert (len(taken), dropped, queue.rung) == (1, [], 1)
        now_s += 0.01
        assert now_s <= taken[0].deadline_s + 1e-9
        queue.done(0.01)


def test_a_batch_is_of_one_rung_and_as_large_as_pays_there() -> None:
    queue = queue_of(0.008, 0.002, most=4, fixed=0.5)
    for _ in range(2):
        queue.offer(job(), 0.0)
    assert (len(queue.take(0.0)[0]), queue.rung) == (2, 0)
    queue.done(0.012, pictures=2)
    for _ in range(9):
        queue.offer(job(1.0), 1.0)
    # In batches of four the top one would end the eighth after 40 ms, of which 30 are in time.
    assert (len(queue.take(1.0)[0]), queue.rung) == (4, 1)


def test_decoding_and_what_others_have_waited_count() -> None:
    queue = queue_of(0.02, 0.002)
    queue.offer(job(0.0), 0.012)
    queue.take(0.012)
    assert queue.rung == 1, "of 30 ms 12 are over"
    waiting = [(0.0, BUDGET_S, 0.012)]
    assert highest_rung(waiting, 0.0, times(0.02, 0.002)) == 1
    assert highest_rung([(0.0, BUDGET_S, 0.009)], 0.0, times(0.02, 0.002)) == 0


def test_what_is_taken_past_the_queue_has_its_rung() -> None:
    queue = queue_of(0.02, 0.002)
    assert queue.takes_at_once(job(), 0.0)
    assert queue.rung == 0
    queue.done(0.02)
    assert queue.takes_at_once(job(1.0, 0.03), 1.0)
    assert queue.rung == 1
    queue.done(0.002)
    assert not queue.takes_at_once(job(2.0), 2.0, longest_s=0.01), "the top one takes longer"


def test_rungs_that_do_not_run_follow_those_that_do() -> None:
    """A slow period at the lowest rung is one at the top, and its end too."""
    queue, now_s = queue_of(0.02, 0.004), 0.0
    for took_s, top_s in ((0.008, 0.04), (0.004, 0.02)):
        for _ in range(60):
            now_s += 1
            queue.offer(job(now_s, 0.01), now_s)
            queue.take(now_s)
            assert queue.rung == 1
            queue.done(took_s)
        assert queue.rungs[0].one_s == pytest.approx(top_s, rel=0.01)


def test_a_size_follows_that_size_alone() -> None:
    queue = queue_of(0.008, 0.002, most=2, fixed=0.5)
    queue.offer(job(0.0, 0.004), 0.0)
    queue.take(0.0)
    queue.done(0.004)
    top = queue.rungs[0]
    assert [top.of(1), top.of(2)] == pytest.approx([0.0096, 0.012])


def test_a_bundle_with_fewer_rungs_may_come_while_one_runs() -> None:
    queue = queue_of(0.02, 0.002)
    queue.offer(job(0.0, 0.01), 0.0)
    assert queue.take(0.0)[0]
    assert queue.rung == 1
    queue.renew(1, [{1: 0.01}])
    queue.done(0.002)
    queue.offer(job(1.0), 1.0)
    assert queue.take(1.0)[0]
    assert queue.rung == 0
