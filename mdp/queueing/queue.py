"""An agent's queue: bounded, fair between clients, deadline-aware. A state machine without a clock.

Agents and simulated agents report events with their times, and follow its decisions: `offer` an
arrived request, `take` what to run while nothing runs, report it `done`.

Each client has a queue of its own (Nagle, On Packet Switches With Infinite Storage, RFC 970, 1985),
and the one that has used the least computing time is next; decoding is charged to the picture's
client. When all `capacity` places are taken, a client with less than its share gets the place of
the newest request of the client with most. So no client is locked out by others' requests.

A request that cannot be answered within its budget is refused on arrival, rejected as soon as
others precede it, and dropped when its turn comes too late, so that no late answer is computed.

Where several wait and a batch pays, as many as are on time together are taken at once. Nothing
waits for a batch to fill.
"""

import math
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeVar

from mdp.queueing.accounts import Account, Accounts
from mdp.queueing.compute_times import FORGET, ComputeTimes

#: Requests that may wait; more are refused as `overloaded`.
CAPACITY = 16

#: When nothing runs, that ends at this time.
_IDLE = -math.inf
_used_s = attrgetter("used_s")

Reason = Literal["overloaded", "too_late"]


class Request(Protocol):
    """A waiting request."""

    @property
    def client(self) -> str:
        """The client that fair queueing charges."""

    @property
    def digest(self) -> str:
        """Of its bundle; a batch is of one bundle."""

    @property
    def deadline_s(self) -> float:
        """The end of the budget, by this device's clock."""


R = TypeVar("R", bound=Request)


class AgentQueue(Generic[R]):
    """Decides which requests wait, run, or are rejected."""

    __slots__ = (
        "_accounts",
        "_busy_until_s",
        "_charged",
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
        self._accounts = Accounts[R]()
        #: Accounts with waiting requests; of those with equal use, the first is next.
        self._competing: dict[str, Account[R]] = {}
        #: The running requests, and the account of each.
        self._running: Sequence[R] = ()
        self._charged: Sequence[Account[R]] = ()
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
        """Take a request past the queue, as `offer` and `take` would; whether it was taken.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        takes_s = self.times.one_s
        if self.waiting or self._running or not 0 < takes_s <= longest_s:
            return False
        account = self._accounts.enter(request.client, (), ())
        decoding_s = account.decoding_s
        ends_s = now_s + (account.factor * takes_s + decoding_s)
        if takes_s + decoding_s > longest_s or ends_s > request.deadline_s:
            return False
        self._running, self._charged, self._busy_until_s = (request,), (account,), ends_s
        return True

    def offer(self, request: R, now_s: float) -> list[tuple[R, Reason]]:
        """Queue it; returns rejected requests and why, itself or others."""
        longest = None
        if self.waiting >= self.capacity:
            longest = self._longest(than=request.client)
            if longest is None:
                return [(request, "overloaded")]
        account = self._accounts.enter(request.client, self._competing, self._charged)
        account.waiting.append(request)
        self.waiting += 1
        self._competing[request.client] = account
        if len(self._competing) == 1:
            count = len(account.waiting)
            if self._ends_s(account, count, count * account.decoding_s, now_s) > request.deadline_s:
                self._refuse(request, account)
                return [(request, "too_late")]
            return []
        order = self._in_order()
        if longest is not None:
            # Its place becomes free, be it before or behind the new one.
            order.remove((longest.waiting[-1], longest))
        count = order.index((request, account)) + 1
        decoding_s = sum([own.decoding_s for _, own in order[:count]])
        if self._ends_s(account, count, decoding_s, now_s) > request.deadline_s:
            self._refuse(request, account)
            return [(request, "too_late")]
        rejected: list[tuple[R, Reason]] = []
        if longest is not None:
            rejected.append((longest.waiting[-1], "overloaded"))
            self._leave(longest.waiting[-1], longest)
        for behind, own in order[count:]:
            ends_s = self._ends_s(own, count + 1, decoding_s + own.decoding_s, now_s)
            if ends_s > behind.deadline_s:
                self._leave(behind, own)
                rejected.append((behind, "too_late"))
            else:
                count, decoding_s = count + 1, decoding_s + own.decoding_s
        return rejected

    def take(self, now_s: float) -> tuple[list[R], list[R]]:
        """The next batch, all on time, and the requests before it that are too late.

        Empty while a batch is running.
        """
        dropped: list[R] = []
        while self.waiting and not self._running:
            competing = self._competing.values()
            account = min(competing, key=_used_s) if len(competing) > 1 else next(iter(competing))
            first = account.waiting[0]
            ends_s = now_s + (account.factor * self.times.one_s + account.decoding_s)
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
        """The running batch has ended.

        Computing `pictures` took `took_s` seconds; None if it failed. Each request's client is
        charged for its `decoding_s` and its part of the computing time, failed or not.
        """
        accounts = self._charged
        self._running, self._charged, self._busy_until_s = (), (), _IDLE
        if took_s is not None:
            factor = 1.0
            for account in accounts:
                if account.factor < factor:
                    factor = account.factor
                account.factor = 1.0
            self.times.learn(pictures, took_s, factor)
        # A single client does not compete; what decoding takes is known all the same.
        if len(self._accounts) > 1 or any(decoding_s) or (decoding_s and accounts[0].decoding_s):
            self._charge(accounts, decoding_s, elapsed_s or took_s or 0.0)

    def clear(self) -> list[R]:
        """Remove and return everything that waits."""
        waiting = [request for request, _ in self._in_order()]
        for account in self._competing.values():
            account.waiting.clear()
        self._competing.clear()
        self.waiting = 0
        return waiting

    def _charge(
        self, accounts: Sequence[Account[R]], decoding_s: Sequence[float], elapsed_s: float
    ) -> None:
        competing = len(self._competing)
        for number, account in enumerate(accounts):
            own_s = decoding_s[number] if decoding_s else 0.0
            self._accounts.charge(account, elapsed_s / len(accounts), own_s)
            # Each client once.
            competing += not account.waiting and account not in accounts[:number]
        if competing:
            self._accounts.advance(elapsed_s + sum(decoding_s), competing)

    def _in_order(self) -> list[tuple[R, Account[R]]]:
        """Waiting requests in the order in which they would run by the estimates."""
        takes_s, order = self.times.one_s, []
        for place, account in enumerate(self._competing.values()):
            used_s, each_s = account.used_s, takes_s + account.decoding_s
            for number, request in enumerate(account.waiting, self._charged.count(account)):
                order.append((used_s + number * each_s, number, place, request, account))
        # Never compares requests: no two have the same number and place.
        order.sort()
        return [(request, account) for _, _, _, request, account in order]

    def _takes_s(self, taken: Sequence[tuple[R, Account[R]]]) -> float:
        """Seconds of computing and decoding them as a batch, by the lowest factor."""
        factor = min([own.factor for _, own in taken])
        return factor * self.times.of(len(taken)) + sum([own.decoding_s for _, own in taken])

    def _ends_s(self, account: Account[R], count: int, decoding_s: float, now_s: float) -> float:
        """When the last of `count` requests, a client's, is expected to end."""
        begins_s = self._busy_until_s if self._busy_until_s > now_s else now_s
        times = self.times
        takes_s = count * times.one_s if times.most == 1 else times.of_queue(count)
        return begins_s + account.factor * takes_s + decoding_s

    def _longest(self, *, than: str) -> Account[R] | None:
        """The client with most waiting requests, if `than` holds less with one more."""
        most = max(self._competing.values(), key=lambda account: len(account.waiting))
        own = len(self._competing[than].waiting) if than in self._competing else 0
        return most if own + 1 < len(most.waiting) else None

    def _take_together(self, now_s: float) -> list[R]:
        """The first requests as a batch: of one bundle, all on time, fastest a picture."""
        order = self._in_order()
        digest = order[0][0].digest
        alike = takewhile(lambda each: each[0].digest == digest, order[: self.times.most])
        size, chosen, earliest_s = 0, list[tuple[R, Account[R]]](), math.inf
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

    def _refuse(self, request: R, account: Account[R]) -> None:
        """Remove a request that cannot be on time."""
        self._leave(request, account)
        account.factor *= FORGET

    def _leave(self, request: R, account: Account[R]) -> None:
        account.waiting.remove(request)
        if not account.waiting:
            del self._competing[account.name]
        self.waiting -= 1

    def _leave_for_turn(self, request: R, account: Account[R]) -> None:
        """Remove a request for its turn; among accounts of equal use, others are next."""
        self._leave(request, account)
        if account.waiting and len(self._competing) > 1:
            self._competing[account.name] = self._competing.pop(account.name)
