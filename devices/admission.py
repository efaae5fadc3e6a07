"""The agent's queue: bounded, deadline-aware, first come first served. Pure functions of time.

A request that cannot be answered within its budget is refused as it comes, and dropped when its
turn comes too late, so that the compute thread only works on answers that somebody still waits for.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from mdp.wire import Buffer, Infer

#: Requests that may wait; beyond, the agent says `overloaded` at once.
CAPACITY = 16
#: Weight of the newest inference in the running estimate of how long one takes.
_NEWEST = 0.2
#: Each refusal lowers the estimate, so that one slow spell cannot shut the door for good.
_FORGET = 0.95

Refusal = Literal["overloaded", "too_late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One admitted request; `deadline_s` is this device's own reading of the budget's end."""

    peer: bytes
    infer: Infer
    pixels: Buffer
    arrived_s: float
    deadline_s: float


class Admission:
    """Decides which requests wait, run, or are sent back."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        #: Estimated seconds of one inference; 0 until one has run.
        self.estimate_s = 0.0
        self._queue: deque[Job] = deque()
        self._running = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._queue and not self._running

    def offer(self, job: Job, *, now_s: float) -> Refusal | None:
        """Queue `job`, or say why not."""
        if len(self._queue) >= self.capacity:
            return "overloaded"
        ahead = len(self._queue) + self._running
        if now_s + (ahead + 1) * self.estimate_s > job.deadline_s:
            self.estimate_s *= _FORGET
            return "too_late"
        self._queue.append(job)
        return None

    def take(self, *, now_s: float) -> tuple[Job | None, list[Job]]:
        """The next job that can still be on time, and those dropped on the way to it.

        None while one is running: there is one computation at a time.
        """
        dropped: list[Job] = []
        while self._queue and not self._running:
            job = self._queue.popleft()
            if now_s + self.estimate_s <= job.deadline_s:
                self._running = True
                return job, dropped
            dropped.append(job)
            self.estimate_s *= _FORGET
        return None, dropped

    def done(self, *, took_s: float | None) -> None:
        """The job taken last has ended after `took_s` seconds of computing; None if it failed."""
        self._running = False
        if took_s is not None:
            weight = _NEWEST if self.estimate_s else 1.0
            self.estimate_s += weight * (took_s - self.estimate_s)

    def clear(self) -> list[Job]:
        """Everything that waits, which will not be run."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting
