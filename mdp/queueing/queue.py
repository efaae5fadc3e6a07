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

import math
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeVar

from mdp.queueing.clients import Client, Clients
from mdp.queueing.compute_times import FORGET, ComputeTimes

#: Requests that may wait; beyond, the agent says `overloaded` at once.
CAPACITY = 16

#: Until when nothing runs.
_IDLE = -math.inf
_used_s = attrgetter("used_s")

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
        "_competing",
        "_running",
        "capacity",
        "times",
        "waiting",
    )

    def __init__(self, capacity: int = CAPACITY, *, batch: int = 1) -> None:
        self.capacity = capacity
        self.times = ComputeTimes(batch)
        #: How many wait.
        self.waiting = 0
        self._clients = Clients[R]()
        #: Clients that have requests waiting; of those that have used as much, the first is next.
        self._competing: dict[str, Client[R]] = {}
        #: What runs, and the account of each one's client.
        self._running: Sequence[R] = ()
        self._charged: Sequence[Client[R]] = ()
        #: When it is expected to end.
        self._busy_until_s = _IDLE

    @property
    def clients(self) -> int:
        """How many clients have requests waiting."""
        return len(self._competing)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._running

    def holds(self, digest: str) -> bool:
        """Whether a request for this bundle waits."""
        return any(each.digest == digest for each, _ in self._in_order())

    def takes_at_once(self, request: R, now_s: float, longest_s: float = math.inf) -> bool:
        """Whether it has been taken past the queue, as `offer` and `take` would have in the end.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        takes_s = self.times.one_s
        if self.waiting or self._running or not 0 < takes_s <= longest_s:
            return False
        account = self._clients.enter(request.client, (), ())
        decoding_s = account.decoding_s
        ends_s = now_s + (account.trust * takes_s + decoding_s)
        if takes_s + decoding_s > longest_s or ends_s > request.deadline_s:
            return False
        self._running, self._charged, self._busy_until_s = (request,), (account,), ends_s
        return True

    def offer(self, request: R, now_s: float) -> list[tuple[R, Reason]]:
        """Queue it; returns whom to refuse and why, which may be itself or others."""
        crowd = None
        if self.waiting >= self.capacity:
            crowd = self._crowd(than=request.client)
            if crowd is None:
                return [(request, "overloaded")]
        account = self._clients.enter(request.client, self._competing, self._charged)
        account.waiting.append(request)
        self.waiting += 1
        self._competing[request.client] = account
        if len(self._competing) == 1:
            # Nobody waits behind it.
            count = len(account.waiting)
            if self._ends_s(account, count, count * account.decoding_s, now_s) > request.deadline_s:
                self._refuse(request, account)
                return [(request, "too_late")]
            return []
        order = self._in_order()
        if crowd is not None:
            # Its place is free then, be it before or behind the new one.
            order.remove((crowd.waiting[-1], crowd))
        count = order.index((request, account)) + 1
        decoding_s = sum([own.decoding_s for _, own in order[:count]])
        if self._ends_s(account, count, decoding_s, now_s) > request.deadline_s:
            self._refuse(request, account)
            return [(request, "too_late")]
        sent_back: list[tuple[R, Reason]] = []
        if crowd is not None:
            sent_back.append((crowd.waiting[-1], "overloaded"))
            self._leave(crowd.waiting[-1], crowd)
        for behind, own in order[count:]:
            ends_s = self._ends_s(own, count + 1, decoding_s + own.decoding_s, now_s)
            if ends_s > behind.deadline_s:
                self._leave(behind, own)
                sent_back.append((behind, "too_late"))
            else:
                count, decoding_s = count + 1, decoding_s + own.decoding_s
        return sent_back

    def take(self, now_s: float) -> tuple[list[R], list[R]]:
        """The next requests to run together, all on time, and those too late on the way to them.

        None while anything is running: there is one computation at a time.
        """
        dropped: list[R] = []
        while self.waiting and not self._running:
            competing = self._competing.values()
            account = min(competing, key=_used_s) if len(competing) > 1 else next(iter(competing))
            first = account.waiting[0]
            ends_s = now_s + (account.trust * self.times.one_s + account.decoding_s)
            if ends_s > first.deadline_s:
                self._refuse(first, account)
                dropped.append(first)
            elif self.times.most > 1:
                return self._take_together(now_s), dropped
            else:
                self._leave_for_turn(first, account)
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
        # One client alone competes with nobody.
        if decoding_s or len(self._clients) > 1:
            self._charge(accounts, decoding_s, elapsed_s or took_s or 0.0)

    def clear(self) -> list[R]:
        """Everything that waits, which will not be run."""
        waiting = [request for request, _ in self._in_order()]
        for account in self._competing.values():
            account.waiting.clear()
        self._competing.clear()
        self.waiting = 0
        return waiting

    def _charge(
        self, accounts: Sequence[Client[R]], decoding_s: Sequence[float], elapsed_s: float
    ) -> None:
        competing = len(self._competing)
        for number, account in enumerate(accounts):
            own_s = decoding_s[number] if decoding_s else 0.0
            self._clients.charge(account, elapsed_s / len(accounts), own_s)
            # Each client once.
            competing += not account.waiting and account not in accounts[:number]
        if competing:
            self._clients.advance(elapsed_s + sum(decoding_s), competing)

    def _in_order(self) -> list[tuple[R, Client[R]]]:
        """What waits, in the order in which it would run if each took as long as estimated."""
        takes_s, order = self.times.one_s, []
        for place, account in enumerate(self._competing.values()):
            used_s, each_s = account.used_s, takes_s + account.decoding_s
            for number, request in enumerate(account.waiting, self._charged.count(account)):
                order.append((used_s + number * each_s, number, place, request, account))
        # Requests are not compared: no two have the same number and place.
        order.sort()
        return [(request, account) for _, _, _, request, account in order]

    def _takes_s(self, taken: Sequence[tuple[R, Client[R]]]) -> float:
        """Seconds of computing them at once, as the least trusting of their clients judges."""
        trust = min([own.trust for _, own in taken])
        return trust * self.times.of(len(taken)) + sum([own.decoding_s for _, own in taken])

    def _ends_s(self, account: Client[R], count: int, decoding_s: float, now_s: float) -> float:
        """When a client's request is expected to end, the last of `count`, with all decoded."""
        begins_s = self._busy_until_s if self._busy_until_s > now_s else now_s
        times = self.times
        takes_s = count * times.one_s if times.most == 1 else times.of_queue(count)
        return begins_s + account.trust * takes_s + decoding_s

    def _crowd(self, *, than: str) -> Client[R] | None:
        """The client with most requests waiting, if `than` would hold no more with one of its."""
        most = max(self._competing.values(), key=lambda account: len(account.waiting))
        own = len(self._competing[than].waiting) if than in self._competing else 0
        return most if own + 1 < len(most.waiting) else None

    def _take_together(self, now_s: float) -> list[R]:
        """The first ones that are run at once: alike, all on time, and quickest a picture."""
        order = self._in_order()
        digest = order[0][0].digest
        alike = takewhile(lambda each: each[0].digest == digest, order[: self.times.most])
        size, chosen, earliest_s = 0, list[tuple[R, Client[R]]](), math.inf
        for each in alike:
            chosen.append(each)
            earliest_s = min(earliest_s, each[0].deadline_s)
            if size and now_s + self._takes_s(chosen) > earliest_s:
                break
            size += 1
        chosen = order[: self.times.choose(range(1, size + 1))]
        for request, account in chosen:
            self._leave_for_turn(request, account)
        self._busy_until_s = now_s + self._takes_s(chosen)
        self._running = jobs = [request for request, _ in chosen]
        self._charged = [account for _, account in chosen]
        return jobs

    def _refuse(self, request: R, account: Client[R]) -> None:
        """Because of what computing is expected to take."""
        self._leave(request, account)
        account.trust *= FORGET

    def _leave(self, request: R, account: Client[R]) -> None:
        account.waiting.remove(request)
        if not account.waiting:
            del self._competing[account.name]
        self.waiting -= 1

    def _leave_for_turn(self, request: R, account: Client[R]) -> None:
        """As its turn has come; others are next among those that have used as much."""
        self._leave(request, account)
        if account.waiting and len(self._competing) > 1:
            self._competing[account.name] = self._competing.pop(account.name)
