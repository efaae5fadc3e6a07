"""The agent's queue: bounded, deadline-aware, first come first served."""

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from devices.admission import CAPACITY, Admission, Job
from mdp.wire import Infer

INFER = Infer(request_id=1, digest="0" * 64, k=0, budget_ms=1.0, image_size=4, encoding="raw")


def job(deadline_s: float = 1e9) -> Job:
    return Job(peer=b"p", infer=INFER, pixels=b"", arrived_s=0.0, deadline_s=deadline_s)


def ran(admission: Admission, took_s: float, now_s: float = 0.0) -> None:
    """Let one request through, so that the estimate is known."""
    assert admission.offer(job(), now_s=now_s) is None
    taken, _ = admission.take(now_s=now_s)
    assert taken is not None
    admission.done(took_s=took_s)


def test_first_come_first_served_one_at_a_time() -> None:
    admission, jobs = Admission(), [job() for _ in range(3)]
    for each in jobs:
        assert admission.offer(each, now_s=0.0) is None
    assert len(admission) == 3
    for each in jobs:
        assert admission.take(now_s=0.0) == (each, [])
        assert admission.take(now_s=0.0) == (None, []), "one is running"
        assert not admission.idle
        admission.done(took_s=0.001)
    assert admission.idle
    assert admission.take(now_s=0.0) == (None, [])


def test_the_queue_is_bounded() -> None:
    admission = Admission(capacity=2)
    assert admission.offer(job(), now_s=0.0) is None
    assert admission.offer(job(), now_s=0.0) is None
    assert admission.offer(job(), now_s=0.0) == "overloaded"
    admission.take(now_s=0.0)
    assert admission.offer(job(), now_s=0.0) is None, "the running one does not wait"
    assert Admission().capacity == CAPACITY


def test_nothing_is_too_late_as_long_as_nothing_is_known() -> None:
    admission = Admission()
    assert admission.offer(job(deadline_s=1.0), now_s=1.0) is None
    assert admission.offer(job(deadline_s=0.9), now_s=1.0) == "too_late"


def test_too_late_counts_those_ahead() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    assert admission.estimate_s == pytest.approx(0.1)
    assert admission.offer(job(deadline_s=0.11), now_s=0.0) is None
    admission.take(now_s=0.0)
    # One runs: this one would end at 0.2.
    assert admission.offer(job(deadline_s=0.19), now_s=0.0) == "too_late"
    assert admission.offer(job(deadline_s=0.21), now_s=0.0) is None
    assert admission.offer(job(deadline_s=0.25), now_s=0.0) == "too_late"


def test_what_waited_too_long_is_dropped_when_its_turn_comes() -> None:
    admission = Admission()
    jobs = [job(deadline_s=0.5), job(deadline_s=0.6), job(deadline_s=9.0), job(deadline_s=0.1)]
    for each in jobs[:3]:
        assert admission.offer(each, now_s=0.0) is None
    assert admission.take(now_s=1.0) == (jobs[2], jobs[:2])
    admission.done(took_s=None)
    assert admission.offer(jobs[3], now_s=0.0) is None
    assert admission.take(now_s=1.0) == (None, [jobs[3]])
    assert admission.idle


def test_what_cannot_be_done_in_the_time_left_is_dropped_too() -> None:
    admission, tight = Admission(), job(deadline_s=0.15)
    ran(admission, took_s=0.1)
    assert admission.offer(tight, now_s=0.0) is None
    assert admission.take(now_s=0.06) == (None, [tight])
    assert admission.offer(tight, now_s=0.0) is None
    assert admission.take(now_s=0.05) == (tight, [])


def test_the_estimate_follows_what_runs_took() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    ran(admission, took_s=0.2)
    assert admission.estimate_s == pytest.approx(0.12)
    ran(admission, took_s=0.12)
    assert admission.estimate_s == pytest.approx(0.12)


def test_a_failed_run_teaches_nothing() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    admission.offer(job(), now_s=0.0)
    admission.take(now_s=0.0)
    admission.done(took_s=None)
    assert admission.estimate_s == pytest.approx(0.1)
    assert admission.idle


@pytest.mark.parametrize("slow_s", [1.0, 60.0, 3600.0])
def test_one_slow_run_does_not_shut_the_door_for_good(slow_s: float) -> None:
    admission, refused, now_s = Admission(), 0, 0.0
    ran(admission, took_s=slow_s)
    while admission.offer(job(deadline_s=now_s + 0.1), now_s=now_s) == "too_late":
        refused += 1
        now_s += 0.1
        assert refused < 300
    taken, _ = admission.take(now_s=now_s)
    assert taken is not None


def test_clear_hands_back_what_waits() -> None:
    admission, jobs = Admission(), [job() for _ in range(3)]
    for each in jobs:
        admission.offer(each, now_s=0.0)
    admission.take(now_s=0.0)
    assert admission.clear() == jobs[1:]
    assert len(admission) == 0
    assert not admission.idle, "one still runs"


class Queueing(RuleBasedStateMachine):
    """Any history of offers, takes and ends, beside a plain queue that is known to be right."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(capacity=3)
        self.now_s = 0.0
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None

    @rule(budget_s=st.floats(0, 2), step_s=st.floats(0, 1))
    def offer(self, budget_s: float, step_s: float) -> None:
        self.now_s += step_s
        new = job(deadline_s=self.now_s + budget_s)
        full = len(self.waiting) == 3
        estimate_s = self.admission.estimate_s
        answer = self.admission.offer(new, now_s=self.now_s)
        assert (answer == "overloaded") == full
        if answer is None:
            self.waiting.append(new)
        if answer == "too_late":
            ahead = len(self.waiting) + (self.running is not None)
            assert (ahead + 1) * estimate_s > budget_s * (1 - 1e-9) - 1e-9
            assert self.admission.estimate_s <= estimate_s

    @rule(step_s=st.floats(0, 1))
    def take(self, step_s: float) -> None:
        self.now_s += step_s
        taken, dropped = self.admission.take(now_s=self.now_s)
        if self.running is not None:
            assert (taken, dropped) == (None, [])
            return
        for each in dropped:
            assert each is self.waiting.popleft()
        if taken is not None:
            assert taken is self.waiting.popleft()
            left_s = taken.deadline_s - self.now_s
            assert left_s >= self.admission.estimate_s - 1e-9, "nobody will wait for that answer"
        else:
            assert not self.waiting
        self.running = taken

    @rule(took_s=st.one_of(st.none(), st.floats(0, 5)))
    def done(self, took_s: float | None) -> None:
        if self.running is not None:
            self.admission.done(took_s=took_s)
            self.running = None

    @invariant()
    def bounded(self) -> None:
        assert len(self.admission) == len(self.waiting) <= 3
        assert self.admission.idle == (not self.waiting and self.running is None)
        assert self.admission.estimate_s >= 0


TestAnyQueueing: Any = Queueing.TestCase
TestAnyQueueing.settings = settings(max_examples=200, stateful_step_count=30)
