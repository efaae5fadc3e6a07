"""The simulated agent's queue obeys the rules of the real one, over any history."""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from devices.agent import compute_times as durations
from devices.agent import queue as admission
from devices.agent.queue import Admission, Job
from mdp.protocol.messages import Infer
from partitioner.simulation import agent
from partitioner.simulation.agent import AgentQueue

INFER = Infer(request_id=1, digest="0" * 64, k=0, budget_ms=1.0, image_size=4, encoding="raw")
JOB = Job(peer=b"", client="", infer=INFER, pixels=b"", arrived_s=0.0, deadline_s=0.0)


@dataclass
class Plain:
    deadline_s: float


def test_the_numbers_are_the_real_ones() -> None:
    assert agent.CAPACITY == admission.CAPACITY == AgentQueue().capacity
    assert agent._NEWEST == durations._NEWEST
    assert agent._FORGET == durations.FORGET
    assert agent._LONGEST == durations._LONGEST


class SideBySide(RuleBasedStateMachine):
    """Both queues are offered the same requests, and have to say and do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Admission(capacity=3)
        self.simulated: AgentQueue[Plain] = AgentQueue(capacity=3)
        self.now_s = 0.0
        self.running = False

    @rule(budget_s=st.floats(0, 2), step_s=st.floats(0, 1))
    def offer(self, budget_s: float, step_s: float) -> None:
        self.now_s += step_s
        deadline_s = self.now_s + budget_s
        job = replace(JOB, arrived_s=self.now_s, deadline_s=deadline_s)
        sent_back = self.real.offer(job, now_s=self.now_s)
        said = self.simulated.offer(Plain(deadline_s), self.now_s)
        assert sent_back == ([] if said is None else [(job, said)])

    @rule(budget_s=st.floats(0, 2), step_s=st.floats(0, 1))
    def take_at_once(self, budget_s: float, step_s: float) -> None:
        """What is taken past the queue is what the real one would have queued and taken."""
        self.now_s += step_s
        deadline_s = self.now_s + budget_s
        waiting = self.real.waiting
        if self.simulated.takes_at_once(Plain(deadline_s), self.now_s):
            job = replace(JOB, arrived_s=self.now_s, deadline_s=deadline_s)
            assert self.real.offer(job, now_s=self.now_s) == []
            assert self.real.take(now_s=self.now_s) == ([job], [])
            self.running = True
        else:
            late = self.now_s + self.real.estimate_s > deadline_s
            assert waiting or self.running or late

    @rule(step_s=st.floats(0, 1))
    def take(self, step_s: float) -> None:
        self.now_s += step_s
        jobs, late = self.real.take(now_s=self.now_s)
        dropped: list[Plain] = []
        taken = self.simulated.take(self.now_s, dropped)
        assert [each.deadline_s for each in dropped] == [each.deadline_s for each in late]
        assert [job.deadline_s for job in jobs] == ([taken.deadline_s] if taken else [])
        self.running |= bool(jobs)

    @rule(took_s=st.floats(0, 5))
    def done(self, took_s: float) -> None:
        if self.running:
            self.real.done(took_s=took_s)
            self.simulated.done(took_s)
            self.running = False

    @invariant()
    def alike(self) -> None:
        assert self.real.waiting == len(self.simulated.waiting)
        assert self.real.estimate_s == self.simulated.estimate_s
        assert self.real.idle == (not self.simulated.waiting and not self.simulated.running)


TestSideBySide: Any = SideBySide.TestCase
TestSideBySide.settings = settings(max_examples=100, stateful_step_count=30)


def test_a_process_that_ends_forgets_everything() -> None:
    queue: AgentQueue[Plain] = AgentQueue()
    queue.offer(Plain(9.0), 0.0)
    queue.offer(Plain(9.0), 0.0)
    queue.take(0.0, [])
    queue.done(1.0)
    queue.clear()
    assert (len(queue.waiting), queue.running, queue.estimate_s) == (0, False, 0.0)
