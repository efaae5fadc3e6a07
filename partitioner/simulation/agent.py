"""An agent's queue as the simulator sees it: the rules of `devices.agent.queue`, without its bytes.

Of one client and without batches, which is what is simulated. This room may not import that one; a
test holds the two together, over any history.
"""

from typing import Generic, Literal, Protocol, TypeVar

CAPACITY = 16
_NEWEST = 0.2
_LONGEST = 6.0
_FORGET = 0.95

#: When nothing runs: one object for all queues, as there may be thousands.
_IDLE = float("-inf")

Refusal = Literal["overloaded", "too_late"]


class Timed(Protocol):
    """What waits: something with a deadline by the agent's own clock, in seconds."""

    deadline_s: float


J = TypeVar("J", bound=Timed)


class AgentQueue(Generic[J]):
    """Bounded, first come first served; refuses and drops what cannot be on time."""

    __slots__ = (
        "_trust",
        "_was_long",
        "busy_until_s",
        "capacity",
        "estimate_s",
        "running",
        "waiting",
    )

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        #: Estimated seconds of one inference; 0 until one has run.
        self.estimate_s = 0.0
        #: At most `capacity`, for which a list does, and thousands of queues are mostly empty.
        self.waiting: list[J] = []
        self.running = False
        self.busy_until_s = _IDLE
        #: Share of the estimate that requests are judged by; each refusal lowers it.
        self._trust = 1.0
        self._was_long = False

    def offer(self, job: J, now_s: float) -> Refusal | None:
        """Queue `job`, or say why not."""
        waiting = len(self.waiting)
        if waiting >= self.capacity:
            return "overloaded"
        begins_s = self.busy_until_s if self.busy_until_s > now_s else now_s
        if begins_s + self._trust * ((waiting + 1) * self.estimate_s) > job.deadline_s:
            self._trust *= _FORGET
            return "too_late"
        self.waiting.append(job)
        return None

    def takes_at_once(self, job: J, now_s: float) -> bool:
        """Whether `job` has been taken past the queue, as `offer` and `take` would have."""
        takes_s = self._trust * self.estimate_s
        if self.running or self.waiting or now_s + takes_s > job.deadline_s:
            return False
        self.running = True
        self.busy_until_s = now_s + takes_s
        return True

    def take(self, now_s: float, dropped: list[J]) -> J | None:
        """The next job that can still be on time; those that cannot are put into `dropped`."""
        while self.waiting and not self.running:
            job = self.waiting.pop(0)
            takes_s = self._trust * self.estimate_s
            if now_s + takes_s <= job.deadline_s:
                self.running = True
                self.busy_until_s = now_s + takes_s
                return job
            dropped.append(job)
            self._trust *= _FORGET
        return None

    def done(self, took_s: float) -> None:
        """The job taken last has ended."""
        self.running = False
        self.busy_until_s = _IDLE
        known_s, trust = self.estimate_s, self._trust
        self._trust = 1.0
        if not known_s:
            self.estimate_s = took_s
            return
        if trust < 1.0 and took_s < known_s:
            known_s *= max(trust, took_s / known_s)
        is_long = took_s > _LONGEST * known_s
        if is_long and not self._was_long:
            took_s = _LONGEST * known_s
        self._was_long = is_long
        self.estimate_s = known_s + _NEWEST * (took_s - known_s)

    def clear(self) -> None:
        """Forget everything, as a process that ends does."""
        self.waiting.clear()
        self.running = False
        self.busy_until_s = _IDLE
        self.estimate_s = 0.0
        self._trust = 1.0
        self._was_long = False
