"""The agent's queue: bounded, fair between clients, deadline-aware. Pure functions of time.

Every client that has requests waiting has a queue of its own (Nagle, On Packet Switches With
Infinite Storage, RFC 970, 1985), and the one that has used the least computing time is next: a
picture that takes long to decode costs its own client. When all room is taken, a client that holds
less than its share gets the place of the newest request of the client that holds most. So nobody is
kept out by what others send, and at most `capacity` requests are remembered.

A request that cannot be answered within its budget is refused as it comes, sent back as soon as
others go before it, and dropped when its turn comes too late, so that the compute thread only works
on answers that somebody still waits for.

Where several wait and computing them together pays, as many as are all on time are taken at once.
Nothing ever waits for more to come.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal

from msgspec import Struct

from devices.agent.clients import Client, Clients
from devices.agent.compute_times import Durations
from devices.camera.frames import Sighting
from mdp.protocol.messages import Buffer, Infer, Look

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
        self._clients = Clients()
        #: By client, never empty; of those that have used the same time, the first is next.
        self._queues: dict[str, deque[Job]] = {}
        #: How many wait.
        self.waiting = 0
        self._running: Sequence[Job] = ()
        #: The accounts of their clients.
        self._charged: Sequence[Client] = ()
        #: When what runs is expected to end.
        self._busy_until_s = float("-inf")

    @property
    def clients(self) -> int:
        """How many clients have requests waiting."""
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

    def takes_s(self, jobs: Sequence[Job]) -> float:
        """Seconds of computing `jobs` at once, as the least trusting of their clients judges."""
        accounts = [self._clients.of(job.client) for job in jobs]
        trust = min([account.trust for account in accounts])
        return trust * self.durations.of(len(jobs)) + sum([each.decoding_s for each in accounts])

    def is_quick(self, longest_s: float) -> bool:
        """Whether the next inference is known to take at most so long; not as long as none ran."""
        decoding_s = max((self._clients.of(name).decoding_s for name in self._queues), default=0.0)
        return self.durations.of(1) > 0 and self.durations.of(1) + decoding_s <= longest_s

    def takes_at_once(self, job: Job, longest_s: float, *, now_s: float) -> bool:
        """Whether `job` has been taken past the queue, as `offer` and `take` would have in the end.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        takes_s = self.durations.of(1)
        if self.waiting or self._running or not 0 < takes_s <= longest_s:
            return False
        account = self._clients.enter(job.client, (), idle=True)
        expected_s = account.trust * takes_s + account.decoding_s
        if takes_s + account.decoding_s > longest_s or now_s + expected_s > job.deadline_s:
            return False
        self._running, self._charged = (job,), (account,)
        self._busy_until_s = now_s + expected_s
        return True

    def offer(self, job: Job, *, now_s: float) -> SentBack:
        """Queue `job`; returns whom to refuse, which may be `job` itself or others."""
        crowd = None
        if self.waiting >= self.capacity:
            crowd = self._crowd(than=job.client)
            if crowd is None:
                return [(job, "overloaded")]
        idle = job.client not in self._queues and not self._runs(job.client)
        self._clients.enter(job.client, self._queues, idle=idle)
        self._queues.setdefault(job.client, deque()).append(job)
        self.waiting += 1
        order = self._in_order()
        newest = None if crowd is None else self._queues[crowd][-1]
        if newest is not None:
            # Its place is free then, be it before or behind the new one.
            order.remove(newest)
        place = order.index(job)
        decoding_s = self._decoding_s(order[: place + 1])
        if self._ends_s(job, place, decoding_s, now_s) > job.deadline_s:
            self._remove(job)
            self._clients.refused(job.client)
            return [(job, "too_late")]
        sent_back: SentBack = []
        if newest is not None:
            self._remove(newest)
            sent_back.append((newest, "overloaded"))
        ahead = place + 1
        for waiting in order[ahead:]:
            own_s = self._clients.of(waiting.client).decoding_s
            if self._ends_s(waiting, ahead, decoding_s + own_s, now_s) > waiting.deadline_s:
                self._remove(waiting)
                sent_back.append((waiting, "too_late"))
            else:
                ahead, decoding_s = ahead + 1, decoding_s + own_s
        return sent_back

    def take(self, *, now_s: float) -> tuple[list[Job], list[Job]]:
        """The next jobs to run together, all still on time, and those dropped on the way to them.

        None while anything is running: there is one computation at a time.
        """
        dropped: list[Job] = []
        if self._running or not self.waiting:
            return [], dropped
        while (order := self._in_order()) and (
            now_s + self.takes_s(order[:1]) > order[0].deadline_s
        ):
            self._remove(order[0])
            self._clients.refused(order[0].client)
            dropped.append(order[0])
        jobs = order[: self._together(order, now_s)]
        for job in jobs:
            self._remove(job)
            # The others are next among those that have used as much.
            if job.client in self._queues:
                self._queues[job.client] = self._queues.pop(job.client)
        if jobs:
            self._begin(jobs, now_s)
        return jobs, dropped

    def done(
        self,
        *,
        took_s: float | None,
        pictures: int = 1,
        decoding_s: Sequence[float] = (),
        elapsed_s: float | None = None,
    ) -> None:
        """What was taken last has ended.

        Computing so many `pictures` took `took_s` seconds; None if it failed. Each job's client is
        charged for its own `decoding_s`, and for its part of what computing took, failed or not.
        """
        jobs, accounts = self._running, self._charged
        self._running, self._charged, self._busy_until_s = (), (), float("-inf")
        if took_s is not None:
            trust = 1.0
            for account in accounts:
                trust, account.trust = min(trust, account.trust), 1.0
            self.durations.learn(pictures, took_s, trust)
        elapsed_s = elapsed_s or took_s or 0.0
        competing = len(self._queues)
        for number, account in enumerate(accounts):
            own_s = decoding_s[number] if decoding_s else 0.0
            self._clients.charge(account, elapsed_s / len(jobs), own_s)
            # Each client once.
            competing += (
                jobs[number].client not in self._queues and account not in accounts[:number]
            )
        if competing:
            self._clients.advance(elapsed_s + sum(decoding_s), competing)

    def clear(self) -> list[Job]:
        """Everything that waits, which will not be run."""
        waiting = self._in_order()
        self._queues.clear()
        self.waiting = 0
        return waiting

    def _begin(self, jobs: Sequence[Job], now_s: float) -> None:
        self._busy_until_s = now_s + self.takes_s(jobs)
        self._running, self._charged = jobs, [self._clients.of(job.client) for job in jobs]

    def _runs(self, client: str) -> bool:
        return any(job.client == client for job in self._running)

    def _in_order(self) -> list[Job]:
        """What waits in the order in which it would run if each took as long as estimated."""
        if len(self._queues) == 1:
            return list(*self._queues.values())
        running = [job.client for job in self._running]
        takes_s = self.durations.of(1)
        order = []
        for place, (name, queue) in enumerate(self._queues.items()):
            account = self._clients.of(name)
            used_s, each_s = account.used_s, takes_s + account.decoding_s
            for number, job in enumerate(queue, start=running.count(name)):
                order.append((used_s + number * each_s, number, place, job))
        # Jobs are not compared: no two have the same number and place.
        order.sort()
        return [job for _, _, _, job in order]

    def _decoding_s(self, jobs: Sequence[Job]) -> float:
        return sum(self._clients.of(job.client).decoding_s for job in jobs)

    def _ends_s(self, job: Job, ahead: int, decoding_s: float, now_s: float) -> float:
        """When `job` is expected to end, so many others before it, and all of them decoded."""
        trust = self._clients.of(job.client).trust
        begins_s = max(now_s, self._busy_until_s)
        return begins_s + trust * self.durations.of_queue(ahead + 1) + decoding_s

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
        size, chosen, earliest_s = 0, list[Job](), float("inf")
        for job in alike:
            chosen.append(job)
            earliest_s = min(earliest_s, job.deadline_s)
            if size and now_s + self.takes_s(chosen) > earliest_s:
                break
            size += 1
        return self.durations.choose(range(1, size + 1))

    def _remove(self, job: Job) -> None:
        queue = self._queues[job.client]
        queue.remove(job)
        if not queue:
            del self._queues[job.client]
        self.waiting -= 1
