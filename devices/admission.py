"""The agent's queue: bounded, fair between clients, deadline-aware. Pure functions of time.

Every client that has requests waiting has a queue of its own, and these take turns (Nagle, On
Packet Switches With Infinite Storage, RFC 970, 1985); as each request costs the same, whole turns
are fair. When all room is taken, a client that holds less than its share gets the place of the
newest request of the client that holds most. So nobody is kept out by what others send, and at
most `capacity` requests, with as many clients, are remembered.

A request that cannot be answered within its budget is refused as it comes, sent back as soon as
others go before it, and dropped when its turn comes too late, so that the compute thread only works
on answers that somebody still waits for.

Where several wait and computing them together pays, as many as are all on time are taken at once.
Nothing ever waits for more to come.
"""

from collections import deque
from itertools import islice, takewhile, zip_longest
from typing import Literal

from msgspec import Struct

from devices.durations import Durations
from devices.source import Sighting
from mdp.wire import Buffer, Infer, Look

#: Requests that may wait; beyond, the agent says `overloaded` at once.
CAPACITY = 16

Refusal = Literal["overloaded", "too_late"]


class Job(Struct, frozen=True, kw_only=True, eq=False):
    """One admitted request; `deadline_s` is this device's own reading of the budget's end."""

    #: Where the reply goes.
    peer: bytes
    #: Who has to share fairly with others.
    client: str
    infer: Infer | Look
    #: Of an Infer; nothing for a Look.
    pixels: Buffer
    arrived_s: float
    deadline_s: float
    #: Of a Look.
    sighting: Sighting | None = None


#: Requests that will not be answered, each with the reason.
SentBack = list[tuple[Job, Refusal]]


class Admission:
    """Decides which requests wait, run, or are sent back."""

    def __init__(self, capacity: int = CAPACITY, *, batch: int = 1) -> None:
        self.capacity = capacity
        self.durations = Durations(batch)
        #: By client, never empty; the one whose turn is next comes first.
        self._queues: dict[str, deque[Job]] = {}
        #: How many wait.
        self.waiting = 0
        self._running = 0
        #: When what runs is expected to end.
        self._busy_until_s = float("-inf")

    @property
    def clients(self) -> int:
        """How many clients are remembered, because they have requests waiting."""
        return len(self._queues)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._running

    def holds(self, digest: str) -> bool:
        """Whether a request for this bundle waits."""
        return any(job.infer.digest == digest for job in self._in_order())

    @property
    def estimate_s(self) -> float:
        """Estimated seconds of one inference; 0 until one has run."""
        return self.durations.of(1)

    def is_quick(self, longest_s: float) -> bool:
        """Whether the next inference is known to take at most so long; not as long as none ran."""
        return 0 < self.durations.of(1) <= longest_s

    def takes_at_once(self, job: Job, longest_s: float, *, now_s: float) -> bool:
        """Whether `job` has been taken past the queue, as `offer` and `take` would have in the end.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        takes_s = self.durations.of(1)
        if self.waiting or self._running or not 0 < takes_s <= longest_s:
            return False
        if now_s + takes_s > job.deadline_s:
            return False
        self._running, self._busy_until_s = 1, now_s + takes_s
        return True

    def offer(self, job: Job, *, now_s: float) -> SentBack:
        """Queue `job`; returns whom to refuse, which may be `job` itself or others."""
        crowd = None
        if self.waiting >= self.capacity:
            crowd = self._crowd(than=job.client)
            if crowd is None:
                return [(job, "overloaded")]
        self._queues.setdefault(job.client, deque()).append(job)
        self.waiting += 1
        order = self._in_order()
        place = order.index(job)
        if self._ends_s(place, now_s) > job.deadline_s:
            self._remove(job)
            self.durations.doubt()
            return [(job, "too_late")]
        sent_back: SentBack = []
        if crowd is not None:
            # Behind the new one in any case, as its client has more.
            newest = self._queues[crowd][-1]
            order.remove(newest)
            self._remove(newest)
            sent_back.append((newest, "overloaded"))
        ahead = place + 1
        for waiting in order[ahead:]:
            if self._ends_s(ahead, now_s) > waiting.deadline_s:
                self._remove(waiting)
                sent_back.append((waiting, "too_late"))
            else:
                ahead += 1
        return sent_back

    def take(self, *, now_s: float) -> tuple[list[Job], list[Job]]:
        """The next jobs to run together, all still on time, and those dropped on the way to them.

        None while anything is running: there is one computation at a time.
        """
        dropped: list[Job] = []
        if self._running or not self.waiting:
            return [], dropped
        while (order := self._in_order()) and now_s + self.estimate_s > order[0].deadline_s:
            dropped.append(self._next())
            self.durations.doubt()
        self._running = self._together(order, now_s)
        if self._running:
            self._busy_until_s = now_s + self.durations.of(self._running)
        return [self._next() for _ in range(self._running)], dropped

    def done(self, *, took_s: float | None, pictures: int = 1) -> None:
        """What was taken last has ended.

        Computing so many `pictures` took `took_s` seconds; None if it failed.
        """
        if took_s is not None:
            self.durations.learn(pictures, took_s)
        self._running = 0
        self._busy_until_s = float("-inf")

    def clear(self) -> list[Job]:
        """Everything that waits, which will not be run."""
        waiting = self._in_order()
        self._queues.clear()
        self.waiting = 0
        return waiting

    def _in_order(self) -> list[Job]:
        """What waits in the order in which it would run."""
        if len(self._queues) == 1:
            return list(*self._queues.values())
        rounds = zip_longest(*self._queues.values())
        return [job for turn in rounds for job in turn if job is not None]

    def _ends_s(self, ahead: int, now_s: float) -> float:
        """When a request is expected to end that has `ahead` others before it."""
        return max(now_s, self._busy_until_s) + self.durations.of_queue(ahead + 1)

    def _crowd(self, *, than: str) -> str | None:
        """The client with most requests waiting, if `than` would hold no more with one of its."""
        most = max(self._queues, key=lambda client: len(self._queues[client]))
        own = len(self._queues.get(than, ()))
        return most if own + 1 < len(self._queues[most]) else None

    def _together(self, order: list[Job], now_s: float) -> int:
        """How many of the first to run at once: alike, all on time, and quickest a picture."""
        if not order or self.durations.most == 1:
            return min(1, len(order))
        digest = order[0].infer.digest
        alike = takewhile(
            lambda job: job.infer.digest == digest, islice(order, self.durations.most)
        )
        size, earliest_s = 0, float("inf")
        for job in alike:
            earliest_s = min(earliest_s, job.deadline_s)
            if size and now_s + self.durations.of(size + 1) > earliest_s:
                break
            size += 1
        return self.durations.choose(range(1, size + 1))

    def _next(self) -> Job:
        """Take out the first in order; its client's next turn comes after all others'."""
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        job = queue.popleft()
        if queue:
            self._queues[client] = queue
        self.waiting -= 1
        return job

    def _remove(self, job: Job) -> None:
        queue = self._queues[job.client]
        queue.remove(job)
        if not queue:
            del self._queues[job.client]
        self.waiting -= 1
