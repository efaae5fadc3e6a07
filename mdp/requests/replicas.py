"""Whom one client asks: what it has seen of its devices, and the order of replicas. Pure.

Everything comes from its own requests: when they were sent and what became of them. Replicas share
the load by the better of two (Mitzenmacher, The Power of Two Choices, IEEE TPDS 2001), better being
fewer requests under way times the usual round trip. Clock and chance are arguments.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from mdp.requests.choice import Choice
from mdp.requests.exclusion import left_out
from mdp.requests.health import Health
from mdp.requests.hedging import DEFAULT_SHARE, Bucket, RoundTrips
from mdp.requests.latency import Lateness
from mdp.requests.ranked import Ranked
from mdp.requests.replica_stats import Replica
from mdp.requests.session import Send

#: A replica that has sent nothing for so long is asked how it is, and has so long to say it.
IDLE_S = 2.0
HEARTBEAT_S = 1.0
#: So many replicas are looked at every HEARTBEAT_S, in turns: a client of hundreds would do little
#: else.
LOOKED_AT = 8
#: Of more replicas than this two that are there are drawn until found, not picked from a list.
_FEW, _DRAWS = 16, 16
#: What a replica costs of which nothing is known.
_UNKNOWN = (False, 0.0, 0, 0)
#: Failures that say that the device cannot serve this client, now or at all; and those that say
#: that it has no time. All others are failures of what it does.
UNREADY = frozenset({"not_ready", "draining", "wrong_bundle", "wrong_submodel"})
NO_TIME_THERE = frozenset({"overloaded", "too_late"})
#: Its camera has nothing to show, which says nothing of how it answers pictures.
NO_FRAME = "no_frame"

Chance = Callable[[], float]


class _Pending(Struct):
    """A call's requests that have not been answered."""

    until_s: float
    #: Device -> when it was asked.
    asked: dict[str, float]


class Roster:
    """What one client knows of the devices of `members` (k -> its devices), k by device in `k_of`.

    A hedge goes out after `hedge_after_s`, or after what was observed if that is None, and takes
    `hedge_share` of all requests at most; with 0 there are none. `chance` gives numbers from 0 to
    1, with which two of many replicas are drawn. With `cascade`, `slow_s` will be asked.
    """

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        k_of: Mapping[str, int],
        *,
        chance: Chance,
        hedge_after_s: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
    ) -> None:
        self.bucket = Bucket(hedge_share)
        self._members, self._k_of, self._chance = members, k_of, chance
        #: Devices of every member that has several, and how many: `len` costs the simulator a call.
        self._replicated = {k: (d, len(d)) for k, d in members.items() if len(d) > 1}
        self._hedge_after_s = hedge_after_s
        #: Whether there is anything to hedge with.
        self.hedges = bool(self._replicated) and hedge_share > 0
        #: Recent round trips by device, where somebody wants to know what 95 % of them take.
        self._trips: dict[str, RoundTrips] = {}
        self._observes = cascade or (self.hedges and hedge_after_s is None)
        #: Of those only of which there is something to remember.
        self._health: dict[str, Health] = {}
        self._lateness = Lateness()
        self._suspects = self._lateness.suspects
        self._pending: dict[int, _Pending] = {}
        self._next_end_s = math.inf
        #: Device on probation -> the call that is its test.
        self._probes: dict[str, int] = {}
        #: Replicas that were asked or looked at; how often any was asked.
        self._replicas: dict[str, Replica] = {}
        self._turn = 0
        self._next_look_s = -math.inf
        self._in_turn = self._round()
        self._looked_at = min(LOOKED_AT, sum(count for _, count in self._replicated.values()))

    def begin(self, now_s: float, gone: Mapping[str, str], until_s: float = math.inf) -> Choice:
        """Whom a request that begins now may ask; `gone` (device -> reason) are not connected.

        Answers to it are in time until `until_s`.
        """
        if now_s >= self._next_end_s:
            self._expire(now_s)
        unavailable: Mapping[str, str] = gone
        probing: Mapping[str, int] = {}
        if self._health or self._suspects:
            budget_s = until_s - now_s
            unavailable, probing = left_out(
                self._k_of, gone, self._health, self._lateness, self._probes, now_s, budget_s
            )
        members = self._members
        if self._replicated:
            members = dict(members)
            for k, (devices, count) in self._replicated.items():
                members[k] = self._ordered(devices, count, unavailable, probing, now_s)
        return Choice(members, unavailable, probing)

    def _ordered(
        self,
        devices: Sequence[str],
        count: int,
        unavailable: Mapping[str, str],
        probing: Mapping[str, int],
        now_s: float,
    ) -> Sequence[str]:
        """`count` devices with the better of two that are there first, and the other one second."""
        there: Sequence[str] = devices
        if unavailable or probing:
            if count > _FEW and (drawn := self._drawn(devices, count, unavailable, probing)):
                return self._ranked(*drawn, devices, now_s)
            there = [d for d in devices if d not in unavailable and d not in probing]
            count = len(there)
        if count < 2:
            return devices
        first = second = 0
        if count > 2:
            first = int(self._chance() * count)
            second = int(self._chance() * (count - 1))
        second += second >= first
        return self._ranked(there[first], there[second], devices, now_s)

    def _ranked(self, one: str, other: str, devices: Sequence[str], now_s: float) -> Sequence[str]:
        """`devices` with the better of two first, and the other one second."""
        known = self._replicas.get(one)
        # Nobody is better than one of which nothing is known.
        if known is not None and self._cost(other, now_s) < self._cost(one, now_s):
            one, other = other, one
        return Ranked((one, other), devices)

    def _drawn(
        self,
        devices: Sequence[str],
        count: int,
        unavailable: Mapping[str, str],
        probing: Mapping[str, int],
    ) -> tuple[str, str] | None:
        """Two of `count` devices that are there; None where most of them are not."""
        found, chance = "", self._chance
        for _ in range(_DRAWS):
            device = devices[int(chance() * count)]
            if device not in unavailable and device not in probing and device != found:
                if found:
                    return found, device
                found = device
        return None

    def _cost(self, device: str, now_s: float) -> tuple[bool, float, int, int]:
        replica = self._replicas.get(device)
        if replica is None:
            return _UNKNOWN
        known = self._health.get(device) if self._health else None
        # Whoever has left a request unanswered has to give a sign of life before the next one.
        silent = known is not None and known.silences > 0
        return silent, replica.cost_s(self._turn, now_s), replica.load, replica.turn

    # What became of requests.

    def sent(self, call: int, send: Send, now_s: float, until_s: float) -> None:
        """`send` of `call` has gone out; its answer is in time until `until_s`."""
        device = send.device
        self._ask(call, device, now_s, until_s)
        if self.hedges and not send.hedged:
            self.bucket.earn(1)
        if send.k in self._replicated:
            self._turn += 1
            replica = self._replicas.get(device)
            if replica is None:
                replica = self._replicas[device] = Replica(seen_s=now_s)
            replica.asked(now_s, self._turn)
        if self._health:
            known = self._health.get(device)
            if known is not None and known.on_probation:
                self._probes[device] = call
        if self._suspects:
            late = self._suspects.get(device)
            if late is not None and late.is_late_for(until_s - now_s):
                late.tried(now_s)
                self._probes[device] = call

    def answered(self, call: int, device: str, now_s: float) -> None:
        """The answer of `device` to `call` has come, in time or not."""
        pending = self._pending.get(call)
        tried = self._probes.get(device) == call if self._suspects else False
        asked_s = self._settle(call, device)
        if now_s >= self._next_end_s:
            self._expire(now_s)
        if pending is None or asked_s is None:
            # Else: no sign of life. A device that sends only such would be waited for every time.
            if times := self._lateness.settle(call, device):
                self._late(device, now_s, times)
        elif now_s > pending.until_s:
            self._late(device, now_s, (asked_s, pending.until_s))
        else:
            self._took(device, now_s, now_s - asked_s)
            if self._suspects:
                self._lateness.in_time(device, now_s - asked_s, tried=tried)
            if self._health:
                known = self._health.get(device)
                if known is not None:
                    known.answered()
                    self._forget_if_well(device, known)

    def failed(self, call: int, device: str, code: str, reason: str, now_s: float) -> None:
        """`device` has answered `call` with a failure of `code`; `reason` says it for people."""
        pending, tried = self._pending.get(call), self._probes.get(device) == call
        asked_s = self._settle(call, device)
        self._expire(now_s)
        late = self._lateness.settle(call, device)
        if (code in NO_TIME_THERE or code == NO_FRAME) and asked_s is None and late is None:
            return
        if code in NO_TIME_THERE:
            if pending is not None and asked_s is not None:
                # As if it had used all the time it had: others are likely to be sooner.
                self._took(device, now_s, pending.until_s - asked_s)
                if now_s > pending.until_s:
                    late = (asked_s, pending.until_s)
                elif tried:
                    self._lateness.refused(device)
            # To say so after the deadline is no better than to answer then.
            self._late(device, now_s, late)
        elif code == NO_FRAME:
            self._heard(device, now_s)
        elif code in UNREADY:
            self._of(device).unready(now_s, reason)
        else:
            self._of(device).failed(now_s, reason)

    def broken(self, device: str, reason: str, now_s: float) -> None:
        """`device` has sent what cannot be read: none of its answers will be recognised."""
        self._drop(device)
        self._of(device).failed(now_s, reason)

    def disconnected(self, device: str, now_s: float) -> None:
        """The connection to `device` was lost, and with it what was under way, if anything was."""
        self._expire(now_s)
        if self._drop(device):
            self._of(device).disconnected()

    def connected(self, device: str, now_s: float) -> None:
        """The connection to `device` is up, for the first time or again."""
        known = self._health.get(device)
        if known is not None:
            known.connected(now_s)
        if self._suspects:
            self._lateness.connected(device)

    # Asking how they are.

    def due(self, now_s: float) -> list[str]:
        """Devices that should be asked how they are: those out and rested, and idle replicas."""
        due = [device for device, known in self._health.items() if known.due(now_s)]
        if self._replicas and now_s >= self._next_look_s:
            self._next_look_s = now_s + HEARTBEAT_S
            for device in islice(self._in_turn, self._looked_at):
                replica = self._replicas.get(device)
                if replica is None:
                    self._replicas[device] = Replica(seen_s=now_s)
                    continue
                idle = now_s >= replica.seen_s + IDLE_S and not replica.load
                if idle and not self._is_out(device):
                    due.append(device)
        return due

    def _round(self) -> Iterator[str]:
        """All replicas, again and again."""
        while True:
            for devices, _ in self._replicated.values():
                yield from devices

    def asked(self, call: int, device: str, now_s: float) -> None:
        """`device` has been asked how it is, by a message of number `call`."""
        if self._is_out(device):
            self._health[device].asked(now_s)
        elif (replica := self._replicas.get(device)) is not None:
            replica.looked_at(now_s)
            self._ask(call, device, now_s, now_s + HEARTBEAT_S)

    def told(self, call: int, device: str, trouble: str, now_s: float) -> None:
        """`device` has said how it is; `trouble` is what keeps it from serving, or empty."""
        self._settle(call, device)
        self._expire(now_s)
        self._lateness.settle(call, device)
        self._saw(device, now_s)
        known = self._of(device) if trouble else self._health.get(device)
        if known is not None:
            known.told(now_s, trouble)

    # Hedging: a roster is a session's `Hedge`.

    def after_s(self, device: str) -> float:
        """How long `device` is given before its replica is asked beside it; infinity if unknown."""
        if self._hedge_after_s is not None:
            return self._hedge_after_s
        own, replicas = self._usual_s(device), self._members[self._k_of[device]]
        return own if own < math.inf else min(map(self._usual_s, replicas))

    def allowed(self) -> bool:
        """Whether one more request may be spent on hedging now; True spends it."""
        return self.bucket.spend()

    def _usual_s(self, device: str) -> float:
        trips = self._trips.get(device)
        return math.inf if trips is None else trips.slow_s

    def slow_s(self, device: str) -> float:
        """What `device` may well take: longer where it was late lately; infinity if unknown."""
        late = self._suspects.get(device)
        return self._usual_s(device) if late is None else max(late.trips)

    # Keeping count.

    def _ask(self, call: int, device: str, now_s: float, until_s: float) -> None:
        pending = self._pending.get(call)
        if pending is None:
            self._pending[call] = _Pending(until_s, {device: now_s})
            if until_s < self._next_end_s:
                self._next_end_s = until_s
        else:
            pending.asked[device] = now_s

    def _settle(self, call: int, device: str) -> float | None:
        """When `device` was asked by `call`, which is no longer under way; None if it was not."""
        pending = self._pending.get(call)
        if pending is None or device not in pending.asked:
            return None
        asked_s = pending.asked.pop(device)
        if not pending.asked:
            del self._pending[call]
        if self._replicas and (replica := self._replicas.get(device)) is not None and replica.load:
            replica.load -= 1
        if self._probes and self._probes.get(device) == call:
            del self._probes[device]
        return asked_s

    def _expire(self, now_s: float) -> None:
        """Whoever has not answered until the end of a call was silent.

        Before anything that came later is taken in, but for what it settles.
        """
        if now_s < self._next_end_s:
            return
        ended = [(call, p) for call, p in self._pending.items() if p.until_s <= now_s]
        for call, pending in ended:
            for device, asked_s in list(pending.asked.items()):
                self._settle(call, device)
                self._lateness.overdue(call, device, asked_s, pending.until_s)
                self._of(device).silent(pending.until_s)
        self._next_end_s = min((p.until_s for p in self._pending.values()), default=math.inf)

    def _drop(self, device: str) -> bool:
        """Forget what is under way to `device`; whether there was anything."""
        calls = [call for call, pending in self._pending.items() if device in pending.asked]
        for call in calls:
            self._settle(call, device)
        self._lateness.dropped(device)
        return bool(calls)

    def _took(self, device: str, now_s: float, seconds: float) -> None:
        if self._replicas and (replica := self._replicas.get(device)) is not None:
            replica.took(seconds, now_s)
        if self._observes:
            if (trips := self._trips.get(device)) is None:
                trips = self._trips[device] = RoundTrips()
            trips.add(seconds)

    def _saw(self, device: str, now_s: float) -> None:
        if self._replicas and (replica := self._replicas.get(device)) is not None:
            replica.seen_s = now_s

    def _late(self, device: str, now_s: float, times: tuple[float, float] | None) -> None:
        """An answer has come to what was asked and to be answered at these times; None: unknown."""
        if times is not None:
            self._lateness.late(device, now_s - times[0], times[1] - times[0])
        self._heard(device, now_s)

    def _heard(self, device: str, now_s: float) -> None:
        self._saw(device, now_s)
        known = self._health.get(device)
        if known is not None:
            known.heard()
            self._forget_if_well(device, known)

    def _is_out(self, device: str) -> bool:
        known = self._health.get(device)
        return known is not None and known.cause is not None

    def _of(self, device: str) -> Health:
        return self._health.setdefault(device, Health())

    def _forget_if_well(self, device: str, known: Health) -> None:
        if known.well:
            del self._health[device]
