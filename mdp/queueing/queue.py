"""An agent's queue: bounded, fair between clients, deadline-aware. A state machine without a clock.

Agents and simulated agents tell it what happens and when, and do what it decides: `offer` a request
that has come, `take` what to run as nothing runs, say that it is `done`.

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

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Generic, Literal, Protocol, TypeVar

from mdp.queueing.clients import Client, Clients
from mdp.queueing.compute_times import FORGET, ComputeTimes

#: Requests that may wait; beyond, the agent says `overloaded` at once.
CAPACITY = 16

#: Until when nothing runs.
_IDLE = float("-inf")

Reason = Literal["overloaded", "too_late"]


class Request(Protocol):
    """What waits."""

    @property
    def client(self) -> str:
        """Who has to share fairly with others."""

    @property
    def digest(self) -> str:
        """Of the bundle that answers it; only those of one are computed together."""

    @property
    def deadline_s(self) -> float:
        """This device's own reading of the budget's end."""


R = TypeVar("R", bound=Request)


class AgentQueue(Generic[R]):
    """Decides which requests wait, run, or are sent back."""

    __slots__ = (
        "_busy_until_s",
        "_charged",
        "_clients",
        "_queues",
        "_running",
        "capacity",
        "times",
        "waiting",
    )

    def __init__(self, capacity: int = CAPACITY, *, batch: int = 1) -> None:
        self.capacity = capacity
        self.times = ComputeTimes(batch)
        self._clients = Clients()
        #: By client, never empty; of those that have used the same time, the first is next.
        self._queues: dict[str, list[R]] = {}
        #: How many wait.
        self.waiting = 0
        self._running: Sequence[R] = ()
        #: The accounts of their clients.
        self._charged: Sequence[Client] = ()
        #: When what runs is expected to end.
        self._busy_until_s = _IDLE

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
        return any(job.digest == digest for job in self._in_order())

    def takes_s(self, jobs: Sequence[R]) -> float:
        """Seconds of computing `jobs` at once, as the least trusting of their clients judges."""
        accounts = [self._clients.of(job.client) for job in jobs]
        trust = min([account.trust for account in accounts])
        return trust * self.times.of(len(jobs)) + sum([each.decoding_s for each in accounts])

    def takes_at_once(self, job: R, now_s: float, longest_s: float = float("inf")) -> bool:
        """Whether `job` has been taken past the queue, as `offer` and `take` would have in the end.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        takes_s = self.times.one_s
        if self.waiting or self._running or not 0 < takes_s <= longest_s:
            return False
        account = self._clients.enter(job.client, (), True)
        decoding_s = account.decoding_s
        ends_s = now_s + (account.trust * takes_s + decoding_s)
        if takes_s + decoding_s > longest_s or ends_s > job.deadline_s:
            return False
        self._running, self._charged, self._busy_until_s = (job,), (account,), ends_s
        return True

    def offer(self, job: R, now_s: float) -> list[tuple[R, Reason]]:
        """Queue `job`; returns whom to refuse and why, which may be `job` itself or others."""
        crowd = None
        if self.waiting >= self.capacity:
            crowd = self._crowd(than=job.client)
            if crowd is None:
                return [(job, "overloaded")]
        own = self._queues.get(job.client)
        if own is None:
            account = self._clients.enter(job.client, self._queues, not self._runs(job.client))
            own = self._queues[job.client] = []
        else:
            account = self._clients.enter(job.client, self._queues, False)
        own.append(job)
        self.waiting += 1
        if len(self._queues) == 1:
            # Nobody waits behind it.
            decoding_s = len(own) * account.decoding_s
            if self._ends_s(account, len(own), decoding_s, now_s) > job.deadline_s:
                self._refuse(job, account)
                return [(job, "too_late")]
            return []
        order = self._in_order()
        newest = None if crowd is None else self._queues[crowd][-1]
        if newest is not None:
            # Its place is free then, be it before or behind the new one.
            order.remove(newest)
        count = order.index(job) + 1
        decoding_s = sum([self._clients.of(each.client).decoding_s for each in order[:count]])
        if self._ends_s(account, count, decoding_s, now_s) > job.deadline_s:
            self._refuse(job, account)
            return [(job, "too_late")]
        sent_back: list[tuple[R, Reason]] = []
        if newest is not None:
            self._remove(newest)
            sent_back.append((newest, "overloaded"))
        for waiting in order[count:]:
            theirs = self._clients.of(waiting.client)
            ends_s = self._ends_s(theirs, count + 1, decoding_s + theirs.decoding_s, now_s)
            if ends_s > waiting.deadline_s:
                self._remove(waiting)
                sent_back.append((waiting, "too_late"))
            else:
                count, decoding_s = count + 1, decoding_s + theirs.decoding_s
        return sent_back

    def take(self, now_s: float) -> tuple[list[R], list[R]]:
        """The next requests to run together, all on time, and those too late on the way to them.

        None while anything is running: there is one computation at a time.
        """
        dropped: list[R] = []
        while self.waiting and not self._running:
            first = self._first()
            account = self._clients.of(first.client)
            ends_s = now_s + (account.trust * self.times.one_s + account.decoding_s)
            if ends_s > first.deadline_s:
                self._refuse(first, account)
                dropped.append(first)
            elif self.times.most > 1:
                return self._begin(self._together(now_s), now_s), dropped
            else:
                self._next_in_turn(first)
                self._running, self._charged, self._busy_until_s = [first], (account,), ends_s
                return [first], dropped
        return [], dropped

    def done(
        self,
        took_s: float | None,
        *,
        pictures: int = 1,
        decoding_s: Sequence[float] = (),
        elapsed_s: float | None = None,
    ) -> None:
        """What was taken last has ended.

        Computing so many `pictures` took `took_s` seconds; None if it failed. Each job's client is
        charged for its own `decoding_s`, and for its part of what computing took, failed or not.
        """
        accounts = self._charged
        self._running, self._charged, self._busy_until_s = (), (), _IDLE
        if took_s is not None:
            trust = 1.0
            for account in accounts:
                if account.trust < trust:
                    trust = account.trust
                account.trust = 1.0
            self.times.learn(pictures, took_s, trust)
        # One client competes with nobody.
        if decoding_s or self._clients.several:
            self._charge(accounts, decoding_s, elapsed_s or took_s or 0.0)

    def _charge(
        self, accounts: Sequence[Client], decoding_s: Sequence[float], elapsed_s: float
    ) -> None:
        competing = len(self._queues)
        for number, account in enumerate(accounts):
            own_s = decoding_s[number] if decoding_s else 0.0
            self._clients.charge(account, elapsed_s / len(accounts), own_s)
            # Each client once.
            competing += account.name not in self._queues and account not in accounts[:number]
        if competing:
            self._clients.advance(elapsed_s + sum(decoding_s), competing)

    def clear(self) -> list[R]:
        """Everything that waits, which will not be run."""
        waiting = self._in_order()
        self._queues.clear()
        self.waiting = 0
        return waiting

    def _runs(self, client: str) -> bool:
        for account in self._charged:  # noqa: SIM110, which takes three times as long
            if account.name == client:
                return True
        return False

    def _first(self) -> R:
        if len(self._queues) > 1:
            return self._in_order()[0]
        (queue,) = self._queues.values()
        return queue[0]

    def _begin(self, jobs: list[R], now_s: float) -> list[R]:
        for job in jobs:
            self._next_in_turn(job)
        self._busy_until_s = now_s + self.takes_s(jobs)
        self._running, self._charged = jobs, [self._clients.of(job.client) for job in jobs]
        return jobs

    def _next_in_turn(self, job: R) -> None:
        """`job` leaves, and others are next among the clients that have used as much."""
        self._remove(job)
        if len(self._queues) > 1 and job.client in self._queues:
            self._queues[job.client] = self._queues.pop(job.client)

    def _in_order(self) -> list[R]:
        """What waits in the order in which it would run if each took as long as estimated."""
        if len(self._queues) == 1:
            return list(*self._queues.values())
        running = [job.client for job in self._running]
        takes_s = self.times.one_s
        order = []
        for place, (name, queue) in enumerate(self._queues.items()):
            account = self._clients.of(name)
            used_s, each_s = account.used_s, takes_s + account.decoding_s
            for number, job in enumerate(queue, start=running.count(name)):
                order.append((used_s + number * each_s, number, place, job))
        # Jobs are not compared: no two have the same number and place.
        order.sort()
        return [job for _, _, _, job in order]

    def _ends_s(self, account: Client, count: int, decoding_s: float, now_s: float) -> float:
        """When a client's request is expected to end, the last of `count`, with all decoded."""
        begins_s = self._busy_until_s if self._busy_until_s > now_s else now_s
        return begins_s + account.trust * self.times.of_queue(count) + decoding_s

    def _crowd(self, *, than: str) -> str | None:
        """The client with most requests waiting, if `than` would hold no more with one of its."""
        most = max(self._queues, key=lambda client: len(self._queues[client]))
        own = len(self._queues.get(than, ()))
        return most if own + 1 < len(self._queues[most]) else None

    def _together(self, now_s: float) -> list[R]:
        """The first ones that are run at once: alike, all on time, and quickest a picture."""
        order = self._in_order()
        digest = order[0].digest
        alike = takewhile(lambda job: job.digest == digest, islice(order, self.times.most))
        size, chosen, earliest_s = 0, list[R](), float("inf")
        for job in alike:
            chosen.append(job)
            earliest_s = min(earliest_s, job.deadline_s)
            if size and now_s + self.takes_s(chosen) > earliest_s:
                break
            size += 1
        return order[: self.times.choose(range(1, size + 1))]

    def _refuse(self, job: R, account: Client) -> None:
        """Because of what computing is expected to take."""
        self._remove(job)
        account.trust *= FORGET

    def _remove(self, job: R) -> None:
        queue = self._queues[job.client]
        queue.remove(job)
        if not queue:
            del self._queues[job.client]
        self.waiting -= 1
