"""An agent's queue: bounded, fair between clients, deadline-aware. A state machine without a clock.

Agents and simulated agents report events with their times, and follow its decisions: `offer` an
arrived request, `take` what to run while nothing runs, report it `done`.

Each client has a queue of its own (Nagle, On Packet Switches With Infinite Storage, RFC 970, 1985),
and the one that has used the least computing time is next; decoding is charged to the picture's
client. Requests may wait as long as their deadlines allow, in `capacity_bytes` of memory. When that
is full, the newest requests of the client that holds most make room for a client that holds less.
So no client is locked out by others' requests.

A request that cannot be answered within its budget is refused on arrival, rejected as soon as
others precede it, and dropped when its turn comes too late, so that no late answer is computed.

Where several wait and a batch pays, as many as are on time together are taken at once. Nothing
waits for a batch to fill.

A device may have its sub-model at several rungs, of which the lower ones are quicker and less
accurate. Requests are admitted by the lowest, and run at the highest that is well in time.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeVar

from mdp.queueing.accounts import Account, Accounts
from mdp.queueing.compute_times import FORGET, ComputeTimes, highest_rung

#: Memory of the requests that may wait; more are refused as `overloaded`.
CAPACITY_BYTES = 64 * 2**20
#: What a small request counts as, so that their number is bounded too, to 1,024.
LEAST_BYTES = 64 * 2**10

#: When nothing runs, that ends at this time.
_IDLE = -math.inf
_used_s = attrgetter("used_s")

Reason = Literal["overloaded", "too_late"]


class WaitingRequest(Protocol):
    """A waiting request."""

    @property
    def client(self) -> str:
        """The client that fair queueing charges."""

    @property
    def digest(self) -> str:
        """Of its bundle; a batch is of one bundle."""

    @property
    def arrived_s(self) -> float:
        """Moment of arrival, by this device's clock; looked at where there are rungs."""

    @property
    def deadline_s(self) -> float:
        """The end of the budget, by this device's clock."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds while it waits."""


R = TypeVar("R", bound=WaitingRequest)


def memory_bytes(request: WaitingRequest) -> int:
    """Memory that a waiting request counts as."""
    return max(request.size_bytes, LEAST_BYTES)


class AgentQueue(Generic[R]):
    """Decides which requests wait, run, or are rejected."""

    __slots__ = (
        "_accounts",
        "_busy_until_s",
        "_charged",
        "_competing",
        "_running",
        "capacity_bytes",
        "held_bytes",
        "rung",
        "rungs",
        "times",
        "waiting",
    )

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES, *, batch: int = 1) -> None:
        self.capacity_bytes = capacity_bytes
        #: Of every rung, the top one first; `times` are those of the lowest.
        self.rungs = [ComputeTimes(batch)]
        self.times = self.rungs[-1]
        #: The rung of the batch that was taken last.
        self.rung = 0
        #: How many wait, and the memory that they count as.
        self.waiting = 0
        self.held_bytes = 0
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
        """The number of clients that have requests waiting."""
        return len(self._competing)

    @property
    def idle(self) -> bool:
        """Tell whether nothing waits and nothing runs."""
        return not self.waiting and not self._running

    def renew(self, batch: int, measured_s: Sequence[Mapping[int, float]]) -> None:
        """Reset to the measurements of another bundle: of each rung, batch size -> seconds."""
        self.rungs = [ComputeTimes() for _ in measured_s]
        self.times = self.rungs[-1]
        for times, own_s in zip(self.rungs, measured_s, strict=True):
            times.renew(batch, own_s)

    def holds(self, digest: str) -> bool:
        """Tell whether a request for this bundle waits."""
        competing = self._competing.values()
        return any(each.digest == digest for account in competing for each in account.waiting)

    def takes_at_once(self, request: R, now_s: float, longest_s: float = math.inf) -> bool:
        """Take a request past the queue, as `offer` and `take` would; whether it was taken.

        Only while nothing waits or runs, and if computing is known to take at most `longest_s`.
        """
        if self.waiting or self._running or not 0 < self.times.one_s <= longest_s:
            return False
        account = self._accounts.enter(request.client, (), ())
        rung = self._highest([(request, account)], now_s) if len(self.rungs) > 1 else 0
        takes_s, decoding_s = self.rungs[rung].one_s, account.decoding_s
        ends_s = now_s + (account.factor * takes_s + decoding_s)
        if not 0 < takes_s <= longest_s - decoding_s or ends_s > request.deadline_s:
            return False
        self.rung = rung
        self._running, self._charged, self._busy_until_s = (request,), (account,), ends_s
        return True

    def offer(self, request: R, now_s: float) -> list[tuple[R, Reason]]:
        """Queue it; returns rejected requests and why, itself or others."""
        leaving: dict[Account[R], int] = {}
        if self.held_bytes + memory_bytes(request) > self.capacity_bytes:
            leaving = self._leaving_for(request)
            if not leaving:
                return [(request, "overloaded")]
        account = self._accounts.enter(request.client, self._competing, self._charged)
        self._enter(request, account)
        if len(self._competing) == 1:
            count = len(account.waiting)
            if self._ends_s(account, count, count * account.decoding_s, now_s) > request.deadline_s:
                self._refuse(request, account)
                return [(request, "too_late")]
            return []
        ahead = self._ahead_of_newest(account, leaving)
        count = sum(ahead.values()) + 1
        decoding_s = account.decoding_s + sum([own.decoding_s * n for own, n in ahead.items()])
        if self._ends_s(account, count, decoding_s, now_s) > request.deadline_s:
            self._refuse(request, account)
            return [(request, "too_late")]
        rejected: list[tuple[R, Reason]] = []
        for own, number in leaving.items():
            for newest in own.waiting[-number:]:
                rejected.append((newest, "overloaded"))
                self._leave(newest, own)
        for behind, own in self._in_order(ahead):
            if behind is request:
                continue
            ends_s = self._ends_s(own, count + 1, decoding_s + own.decoding_s, now_s)
            if ends_s > behind.deadline_s:
                self._leave(behind, own)
                rejected.append((behind, "too_late"))
            else:
                count, decoding_s = count + 1, decoding_s + own.decoding_s
        return rejected

    def take(self, now_s: float) -> tuple[list[R], list[R]]:
        """The next batch, all on time, and the requests before it that are too late.

        It is to be run at `rung`. Empty while a batch is running.
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
                continue
            self.rung = 0
            if len(self.rungs) > 1:
                self.rung = self._highest(self._in_order(), now_s)
                one_s = self.rungs[self.rung].one_s
                ends_s = now_s + (account.factor * one_s + account.decoding_s)
            if self.times.most > 1:
                return self._take_together(now_s), dropped
            self._leave_for_turn(first, account)
            self._running, self._charged, self._busy_until_s = [first], (account,), ends_s
            return [first], dropped
        return [], dropped

    def _highest(self, order: Sequence[tuple[R, Account[R]]], now_s: float) -> int:
        """The rung to run at while `order` waits."""
        waiting = ((each.arrived_s, each.deadline_s, own.decoding_s) for each, own in order)
        return highest_rung(waiting, now_s, self.rungs)

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
            # There may be fewer rungs since another bundle was installed.
            ran = self.rungs[min(self.rung, len(self.rungs) - 1)]
            ratio = ran.learn(pictures, took_s, factor)
            for times in self.rungs:
                if times is not ran:
                    times.follow(pictures, ratio)
        # A single client does not compete; what decoding takes is known all the same.
        if len(self._accounts) > 1 or any(decoding_s) or (decoding_s and accounts[0].decoding_s):
            self._charge(accounts, decoding_s, elapsed_s or took_s or 0.0)

    def clear(self) -> list[R]:
        """Remove and return everything that waits."""
        waiting = [request for request, _ in self._in_order()]
        for account in self._competing.values():
            account.waiting.clear()
            account.held_bytes = 0
        self._competing.clear()
        self.waiting = self.held_bytes = 0
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

    def _in_order(
        self, passed: Mapping[Account[R], int] | None = None, most: int | None = None
    ) -> list[tuple[R, Account[R]]]:
        """Waiting requests in the order in which they would run by the estimates.

        Without the first `passed` of each account, and at most `most` of each.
        """
        order = []
        for place, account in enumerate(self._competing.values()):
            first = 0 if passed is None else passed[account]
            last = None if most is None else first + most
            for number, request in enumerate(account.waiting[first:last], first):
                order.append((self._turn(account, place, number), request, account))
        # Never compares requests: no two have the same turn.
        order.sort()
        return [(request, account) for _, request, account in order]

    def _turn(self, account: Account[R], place: int, number: int) -> tuple[float, int, int]:
        """Orders requests: the time that its client has used by then, its requests, its place."""
        number += self._charged.count(account)
        return account.used_s + number * (self.times.one_s + account.decoding_s), number, place

    def _ahead_of_newest(
        self, account: Account[R], leaving: Mapping[Account[R], int]
    ) -> dict[Account[R], int]:
        """Count the requests of each account that would run before the newest one of `account`.

        Those that are `leaving`, the newest ones of their accounts, are not counted. Looks at few
        of those that wait, so that refusing is quick however many there are.
        """
        competing = list(self._competing.values())
        newest = self._turn(account, competing.index(account), len(account.waiting) - 1)
        ahead = {}
        for place, own in enumerate(competing):
            staying = range(len(own.waiting) - leaving.get(own, 0))
            ahead[own] = bisect_left(staying, newest, key=partial(self._turn, own, place))
        return ahead

    def _takes_s(self, taken: Sequence[tuple[R, Account[R]]]) -> float:
        """Seconds of computing and decoding them as a batch, by the lowest factor."""
        factor = min([own.factor for _, own in taken])
        return factor * self.rungs[self.rung].of(len(taken)) + sum(
            [own.decoding_s for _, own in taken]
        )

    def _ends_s(self, account: Account[R], count: int, decoding_s: float, now_s: float) -> float:
        """Moment at which the last of `count` requests, a client's, is expected to end."""
        begins_s = self._busy_until_s if self._busy_until_s > now_s else now_s
        times = self.times
        takes_s = count * times.one_s if times.most == 1 else times.of_queue(count)
        return begins_s + account.factor * takes_s + decoding_s

    def _leaving_for(self, request: R) -> dict[Account[R], int]:
        """Count the requests of each account that have to leave; none if the newcomer has to.

        The newest ones of the account that holds most, while the newcomer's holds no more.
        """
        size_bytes = memory_bytes(request)
        own = self._competing.get(request.client)
        own_bytes = size_bytes + (0 if own is None else own.held_bytes)
        held = {account: account.held_bytes for account in self._competing.values()}
        leaving: dict[Account[R], int] = {}
        missing_bytes = self.held_bytes + size_bytes - self.capacity_bytes
        while held and missing_bytes > 0:
            most = max(held, key=held.__getitem__)
            leaving[most] = leaving.get(most, 0) + 1
            given_bytes = memory_bytes(most.waiting[-leaving[most]])
            held[most] -= given_bytes
            missing_bytes -= given_bytes
            if held[most] < own_bytes:
                return {}
        return leaving

    def _take_together(self, now_s: float) -> list[R]:
        """The first requests as a batch: of one bundle, all on time, fastest a picture."""
        order = self._in_order(most=self.times.most)
        digest = order[0][0].digest
        alike = takewhile(lambda each: each[0].digest == digest, order[: self.times.most])
        size, chosen, earliest_s = 0, list[tuple[R, Account[R]]](), math.inf
        for each in alike:
            chosen.append(each)
            earliest_s = min(earliest_s, each[0].deadline_s)
            if size and now_s + self._takes_s(chosen) > earliest_s:
                break
            size += 1
        chosen = order[: self.rungs[self.rung].choose(range(1, size + 1))]
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

    def _enter(self, request: R, account: Account[R]) -> None:
        account.waiting.append(request)
        self._competing[account.name] = account
        self._count(account, 1, request)

    def _leave(self, request: R, account: Account[R]) -> None:
        account.waiting.remove(request)
        if not account.waiting:
            del self._competing[account.name]
        self._count(account, -1, request)

    def _count(self, account: Account[R], sign: int, request: R) -> None:
        size_bytes = sign * memory_bytes(request)
        self.waiting += sign
        self.held_bytes += size_bytes
        account.held_bytes += size_bytes

    def _leave_for_turn(self, request: R, account: Account[R]) -> None:
        """Remove a request for its turn; among accounts of equal use, others are next."""
        self._leave(request, account)
        if account.waiting and len(self._competing) > 1:
            self._competing[account.name] = self._competing.pop(account.name)
