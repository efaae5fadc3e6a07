"""Whom one client asks: what it has seen of its devices, and the order of replicas. Pure.

Everything comes from its own requests: when they were sent and what became of them. Replicas share
the load by the better of two (Mitzenmacher, The Power of Two Choices, IEEE TPDS 2001), better being
fewer requests under way times the usual round trip. Clock and chance are arguments.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec import Struct

from mdp.health import Health
from mdp.hedging import DEFAULT_SHARE, NEWEST, Bucket, RoundTrips
from mdp.ranked import Ranked
from mdp.session import PROBATION, Send

#: A replica that has sent nothing for so long is asked how it is, and has so long to say it.
IDLE_S = 2.0
HEARTBEAT_S = 1.0
#: So many replicas are looked at every HEARTBEAT_S, in turns: a client of hundreds would do little
#: else.
LOOKED_AT = 8
#: Of more replicas than this two that are there are drawn until found, not picked from a list.
_FEW, _DRAWS = 16, 16
#: What is known of a replica's time counts this much less with every request given to another one,
#: so that one slow spell is not held against it for good.
_FADE = 0.98
#: Failures that say that the device cannot serve this client, now or at all; and those that say
#: that it has no time. All others are failures of what it does.
UNREADY = frozenset({"not_ready", "draining", "wrong_bundle", "wrong_submodel"})
NO_TIME_THERE = frozenset({"overloaded", "too_late"})
#: Its camera has nothing to show, which says nothing of how it answers pictures.
NO_FRAME = "no_frame"

Chance = Callable[[], float]


class Choice(Struct, frozen=True):
    """Whom a new request may ask."""

    #: Index k -> the devices that serve it, best first.
    members: Mapping[int, Sequence[str]]
    #: Device -> why it is not to be asked.
    unavailable: Mapping[str, str]
    #: Device on probation -> k: to be asked beside, and not waited for.
    probing: Mapping[str, int]


@dataclass(slots=True)
class _Pending:
    """A call's requests that have not been answered."""

    until_s: float
    #: Device -> when it was asked.
    asked: dict[str, float]


class Roster:
    """What one client knows of the devices of `members` (k -> its devices), k by device in `k_of`.

    A hedge goes out after `hedge_after_s`, or after what was observed if that is None, and takes
    `hedge_share` of all requests at most; with 0 there are none. `chance` gives numbers from 0 to
    1, with which two of many replicas are drawn.
    """

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        k_of: Mapping[str, int],
        *,
        chance: Chance,
        hedge_after_s: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
    ) -> None:
        self.bucket = Bucket(hedge_share)
        self._members, self._k_of, self._chance = members, k_of, chance
        self._replicated = [k for k, devices in members.items() if len(devices) > 1]
        self._hedge_after_s = hedge_after_s
        #: Of those only of which there is something to remember.
        self._health: dict[str, Health] = {}
        self._pending: dict[int, _Pending] = {}
        self._next_end_s = math.inf
        #: Device on probation -> the call that is its test.
        self._probes: dict[str, int] = {}
        #: Of replicas: requests under way, round trips, when last heard, and the turn last taken.
        self._load: Counter[str] = Counter()
        self._trips: dict[str, RoundTrips] = {}
        self._seen_s: dict[str, float] = {}
        #: Since when a replica has had requests under way.
        self._owes_s: dict[str, float] = {}
        self._turns: Counter[str] = Counter()
        self._turn = 0
        #: How many turns had gone to others before a replica's last one.
        self._ages: Counter[str] = Counter()
        self._next_look_s = -math.inf
        self._in_turn = self._replicas()
        self._looked_at = min(LOOKED_AT, sum(len(members[k]) for k in self._replicated))

    @property
    def hedges(self) -> bool:
        """Whether there is anything to hedge with."""
        return bool(self._replicated) and self.bucket.share > 0

    def begin(self, now_s: float, gone: Mapping[str, str]) -> Choice:
        """Whom a request that begins now may ask; `gone` (device -> reason) are not connected."""
        self._expire(now_s)
        unavailable: Mapping[str, str] = gone
        probing: Mapping[str, int] = {}
        if self._health:
            unavailable, probing = self._judged(gone)
        members = self._members
        if self._replicated:
            members = dict(members)
            for k in self._replicated:
                members[k] = self._ordered(members[k], unavailable, probing, now_s)
        return Choice(members, unavailable, probing)

    def _judged(self, gone: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, int]]:
        out = {d: h.reason for d, h in self._health.items() if h.cause and d not in gone}
        proving = [d for d, h in self._health.items() if h.on_probation and d not in gone]
        left = len(self._k_of) - len(gone) - len(out) - len(proving)
        if not left and proving:
            # Nobody else is there: they are waited for.
            return {**gone, **out}, {}
        if not left:
            # Even those that are out are a chance; whoever takes it is not kept waiting for others.
            return gone, {device: self._k_of[device] for device in out}
        unavailable, probing = {**gone, **out}, dict[str, int]()
        for device in proving:
            if device in self._probes or self._k_of[device] in probing.values():
                unavailable[device] = PROBATION
            else:
                probing[device] = self._k_of[device]
        return unavailable, probing

    def _ordered(
        self,
        devices: Sequence[str],
        unavailable: Mapping[str, str],
        probing: Mapping[str, int],
        now_s: float,
    ) -> Sequence[str]:
        """`devices` with the better of two that are there first, and the other one second."""
        there: Sequence[str] = devices
        if unavailable or probing:
            if len(devices) > _FEW and (drawn := self._drawn(devices, unavailable, probing)):
                return self._ranked(drawn, devices, now_s)
            there = [d for d in devices if d not in unavailable and d not in probing]
        if len(there) < 2:
            return devices
        first = second = 0
        if len(there) > 2:
            first = int(self._chance() * len(there))
            second = int(self._chance() * (len(there) - 1))
        second += second >= first
        return self._ranked((there[first], there[second]), devices, now_s)

    def _ranked(self, pair: Sequence[str], devices: Sequence[str], now_s: float) -> Sequence[str]:
        return Ranked(sorted(pair, key=lambda device: self._cost(device, now_s)), devices)

    def _drawn(
        self, devices: Sequence[str], unavailable: Mapping[str, str], probing: Mapping[str, int]
    ) -> list[str]:
        """Two of many `devices` that are there; nothing where most of them are not."""
        found: list[str] = []
        for _ in range(_DRAWS):
            device = devices[int(self._chance() * len(devices))]
            if device not in unavailable and device not in probing and device not in found:
                found.append(device)
                if len(found) == 2:
                    return found
        return []

    def _replicas(self) -> Iterator[str]:
        """All replicas, again and again."""
        while True:
            for k in self._replicated:
                yield from self._members[k]

    def _cost(self, device: str, now_s: float) -> tuple[bool, float, int, int]:
        trips, load = self._trips.get(device), self._load[device]
        usual_s = trips.usual_s if trips is not None else 0.0
        usual_s *= _FADE ** (self._turn - self._turns[device])
        if load:
            # Whoever has owed answers for so long, and given none, is likely to take as long again.
            usual_s = max(usual_s, now_s - max(self._owes_s[device], self._seen_s[device]))
        known = self._health.get(device)
        # Whoever has left a request unanswered has to give a sign of life before the next one.
        silent = known is not None and known.silences > 0
        return silent, (load + 1) * usual_s, load, self._turns[device]

    # What became of requests.

    def sent(self, call: int, send: Send, now_s: float, until_s: float) -> None:
        """`send` of `call` has gone out; its answer is in time until `until_s`."""
        device = send.device
        self._ask(call, device, now_s, until_s)
        if not send.hedged:
            self.bucket.earn(1)
        if self._replicated and len(self._members[send.k]) > 1:
            if not self._load[device]:
                self._owes_s[device] = now_s
            self._load[device] += 1
            self._turn += 1
            self._ages[device] = self._turn - self._turns[device]
            self._turns[device] = self._turn
            self._seen_s.setdefault(device, now_s)
        if self._health:
            known = self._health.get(device)
            if known is not None and known.on_probation:
                self._probes[device] = call

    def answered(self, call: int, device: str, now_s: float) -> None:
        """The answer of `device` to `call` has come, in time or not."""
        pending = self._pending.get(call)
        asked_s = self._settle(call, device)
        self._expire(now_s)
        if pending is not None and asked_s is not None and now_s <= pending.until_s:
            self._took(device, now_s, now_s - asked_s)
            if self._health:
                known = self._health.get(device)
                if known is not None:
                    known.answered()
                    self._forget_if_well(device, known)
        else:
            self._heard(device, now_s)

    def failed(self, call: int, device: str, code: str, reason: str, now_s: float) -> None:
        """`device` has answered `call` with a failure of `code`; `reason` says it for people."""
        pending = self._pending.get(call)
        asked_s = self._settle(call, device)
        self._expire(now_s)
        if code in NO_TIME_THERE:
            if pending is not None and asked_s is not None:
                # As if it had used all the time it had: others are likely to be sooner.
                self._took(device, now_s, pending.until_s - asked_s)
            self._heard(device, now_s)
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

    # Asking how they are.

    def due(self, now_s: float) -> list[str]:
        """Devices that should be asked how they are: those out and rested, and idle replicas."""
        due = [device for device, known in self._health.items() if known.due(now_s)]
        if self._seen_s and now_s >= self._next_look_s:
            self._next_look_s = now_s + HEARTBEAT_S
            due += [
                device
                for device in islice(self._in_turn, self._looked_at)
                if now_s >= self._seen_s.setdefault(device, now_s) + IDLE_S
                and not self._load[device]
                and not self._is_out(device)
            ]
        return due

    def asked(self, call: int, device: str, now_s: float) -> None:
        """`device` has been asked how it is, by a message of number `call`."""
        if self._is_out(device):
            self._health[device].asked(now_s)
        elif device in self._seen_s:
            self._owes_s[device] = now_s
            self._load[device] += 1
            self._ask(call, device, now_s, now_s + HEARTBEAT_S)

    def told(self, call: int, device: str, trouble: str, now_s: float) -> None:
        """`device` has said how it is; `trouble` is what keeps it from serving, or empty."""
        self._settle(call, device)
        self._expire(now_s)
        self._saw(device, now_s)
        known = self._of(device) if trouble else self._health.get(device)
        if known is not None:
            known.told(now_s, trouble)

    # Hedging: a roster is a session's `Hedge`.

    def after_s(self, device: str) -> float:
        """How long `device` is given before its replica is asked beside it; infinity if unknown."""
        if self._hedge_after_s is not None:
            return self._hedge_after_s
        own = self._trips.get(device)
        if own is not None and own.slow_s < math.inf:
            return own.slow_s
        others = (self._trips.get(other) for other in self._members[self._k_of[device]])
        return min((other.slow_s for other in others if other is not None), default=math.inf)

    def allowed(self) -> bool:
        """Whether one more request may be spent on hedging now; True spends it."""
        return self.bucket.spend()

    # Keeping count.

    def _ask(self, call: int, device: str, now_s: float, until_s: float) -> None:
        pending = self._pending.get(call)
        if pending is None:
            pending = self._pending[call] = _Pending(until_s, {})
            self._next_end_s = min(self._next_end_s, until_s)
        pending.asked[device] = now_s

    def _settle(self, call: int, device: str) -> float | None:
        """When `device` was asked by `call`, which is no longer under way; None if it was not."""
        pending = self._pending.get(call)
        if pending is None or device not in pending.asked:
            return None
        asked_s = pending.asked.pop(device)
        if not pending.asked:
            del self._pending[call]
        if self._load and self._load[device]:
            self._load[device] -= 1
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
            for device in list(pending.asked):
                self._settle(call, device)
                self._of(device).silent(pending.until_s)
        self._next_end_s = min((p.until_s for p in self._pending.values()), default=math.inf)

    def _drop(self, device: str) -> bool:
        """Forget what is under way to `device`; whether there was anything."""
        calls = [call for call, pending in self._pending.items() if device in pending.asked]
        for call in calls:
            self._settle(call, device)
        return bool(calls)

    def _took(self, device: str, now_s: float, seconds: float) -> None:
        if self._load and device in self._load:
            weight = max(NEWEST, 1 - _FADE ** self._ages[device])
            self._trips.setdefault(device, RoundTrips()).add(seconds, weight)
            self._seen_s[device] = now_s

    def _saw(self, device: str, now_s: float) -> None:
        if device in self._seen_s:
            self._seen_s[device] = now_s

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
