"""The one book of requests in flight: each stands here from its sending until it ends. Pure.

A driver (`mdp.client.dispatcher`, `partitioner.simulation.engine`) sends what a call's session asks
for and tells the book what comes of it, once. The book closes the request, tells the session, and
hands one stream of events to all that follow devices: circuit breakers, lateness, replica
statistics and hedging. Clock and chance are arguments.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from mdp.requests.choice import Choice, exclude, others_by_s
from mdp.requests.health import CircuitBreakers
from mdp.requests.hedging import DEFAULT_SHARE, Hedging
from mdp.requests.latency import SlowDevices
from mdp.requests.reason import DISCONNECTED, Code, Reason
from mdp.requests.replicas import HEARTBEAT_S, Chance, ReplicaSelector
from mdp.requests.request import DeviceEvent, Request, What
from mdp.requests.session import Action, Failed, Hedge, Replied, Session

#: What a failure of a code means; any other one is `failed`.
_MEANING: Mapping[Code, What] = {
    "overloaded": "refused", "too_late": "refused", "no_frame": "no_frame",
    "not_ready": "unready", "draining": "unready", "wrong_bundle": "unready",
    "wrong_submodel": "unready",
}  # fmt: skip
#: Requests of one device that ended as silent and may still be answered: later answers to older
#: ones are no sign of life.
OVERDUE = 64


class InCall(Protocol):
    """A driver's record of one call."""

    session: Session


C = TypeVar("C", bound=InCall)


class _Entry(Struct):
    """The requests of one call, or one status request."""

    until_s: float
    #: Device -> the request that has not ended.
    requests: dict[str, Request]


class InFlight(Generic[C]):
    """The requests of one client to `members` (k -> its devices), k by device in `k_of`.

    A hedge goes out after `hedge_after_s`, or after what was observed if that is None, and takes
    `hedge_share` of all requests at most. `chance` draws two of many replicas.
    """

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        k_of: Mapping[str, int],
        *,
        chance: Chance,
        hedge_after_s: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        first: frozenset[int] = frozenset(),
    ) -> None:
        """With `first`, `others_by_s` is asked for: when the others have to be asked."""
        self._k_of, self._first = k_of, first
        self._breakers, self._slow = CircuitBreakers(), SlowDevices()
        self._selector = ReplicaSelector(members, self._breakers, chance)
        self._hedging = Hedging(members, k_of, hedge_after_s, hedge_share)
        hedges = bool(self._selector.members) and hedge_share > 0
        #: What sessions hedge by, if there is anything to hedge with.
        self.hedge: Hedge | None = self._hedging if hedges else None
        #: Whether replica statistics and hedging have anything to follow.
        self._selects, self._observes = bool(self._selector.members), bool(hedges or first)
        #: The calls that are not decided, by number.
        self.calls: dict[int, C] = {}
        self._entries: dict[int, _Entry] = {}
        self._last_number = 0
        self._next_end_s = math.inf
        #: Device -> number -> the request that ended as silent, and the end of its time.
        self._overdue: dict[str, dict[int, tuple[Request, float]]] = {}

    # Calls.

    def choose(self, now_s: float, gone: Mapping[str, Reason], decide_s: float) -> Choice:
        """Which devices a call may ask; `gone` (device -> reason) are not connected."""
        self._expire(now_s)
        unavailable: Mapping[str, Reason] = gone
        probing: Mapping[str, int] = {}
        if self._breakers or self._slow:
            tests = {d for e in self._entries.values() for d, r in e.requests.items() if r.is_test}
            unavailable, probing = exclude(
                self._k_of, gone, self._breakers, self._slow, tests, now_s, decide_s - now_s
            )
        out = {*unavailable, *probing} if probing else unavailable
        return Choice(self._selector.ordered(out, now_s), unavailable, probing)

    def others_by_s(self, choice: Choice, now_s: float, decide_s: float) -> float:
        """When a cascade's second stage has to be asked at the latest."""
        return others_by_s(choice, self._first, self._slow_s, now_s, decide_s)

    def number(self) -> int:
        """A number that no other request has."""
        self._last_number += 1
        return self._last_number

    def begin(self, call: C) -> int:
        """Enter `call`; returns its number."""
        number = self.number()
        self.calls[number] = call
        self._entries[number] = _Entry(call.session.decide_s, {})
        return number

    def decided(self, number: int) -> None:
        """The call needs no more answers; requests in flight still tell of their devices."""
        del self.calls[number]
        if not self._entries[number].requests:
            del self._entries[number]

    # Requests.

    def sent(self, number: int, request: Request) -> None:
        """`request` of a call has gone out."""
        entry, device, now_s = self._entries[number], request.device, request.sent_s
        until_s = entry.until_s
        if self._breakers and (breaker := self._breakers.get(device)) is not None:
            request.is_test = breaker.half_open
        if self._slow and (slow := self._slow.get(device)) is not None:
            request.is_test = request.is_test or slow.is_late_for(until_s - now_s)
        entry.requests[device] = request
        if until_s < self._next_end_s:
            self._next_end_s = until_s
        if self._selects or self._observes or self._slow:
            self._tell(DeviceEvent("sent", device, now_s, request, until_s))

    def handle(self, number: int, event: Replied | Failed) -> list[Action] | None:
        """A device has answered a request, or said that it will not; None: no call waits for that.

        A request that had ended as silent was late. An answer to nothing is no sign of life: a
        device that sends only such would be waited for every time.
        """
        device, now_s = event.device, event.now_s
        what: What = "answered"
        reason = None
        if isinstance(event, Failed):
            reason = event.reason
            what = _MEANING.get(reason.code, "failed")
        ended = self._close(number, device, now_s)
        if ended.request is not None or what in ("unready", "failed"):
            in_time = ended.in_flight and now_s <= ended.until_s
            ended.what = what if in_time or what not in ("answered", "refused") else "late"
            ended.reason = reason
            self._tell(ended)
        call = self.calls.get(number)
        if call is None or not call.session.waits_for(device):
            return None
        return call.session.handle(event)

    # Devices.

    def connected(self, device: str, now_s: float) -> None:
        """The connection to `device` is up, for the first time or again."""
        self._tell(DeviceEvent("connected", device, now_s))

    def lost(
        self, device: str, now_s: float, reason: Reason = DISCONNECTED
    ) -> list[tuple[int, list[Action]]]:
        """What the calls do, by number, now that no answer of `device` will come.

        Its connection was lost or, for any other reason, its messages cannot be read.
        """
        self._expire(now_s)
        self._overdue.pop(device, None)
        numbers = [number for number, e in self._entries.items() if device in e.requests]
        for number in numbers:
            self._tell(self._close(number, device, now_s))
        if reason is not DISCONNECTED:
            self._tell(DeviceEvent("failed", device, now_s, reason=reason))
        elif numbers:
            self._tell(DeviceEvent("lost", device, now_s))
        failed = Failed(device=device, reason=reason, now_s=now_s)
        return [
            (number, self.calls[number].session.handle(failed))
            for number in numbers
            if number in self.calls
        ]

    def due(self, now_s: float) -> list[str]:
        """Devices to ask for their status: those excluded and paused, and idle replicas."""
        if not (self._breakers or self._selects):
            return []
        due = [device for device, breaker in self._breakers.items() if breaker.due(now_s)]
        idle = self._selector.idle(now_s)
        return due + [device for device in idle if not self._breakers.is_open(device)]

    def asked(self, number: int, device: str, now_s: float) -> None:
        """Status request `number` has gone out to `device`."""
        if self._breakers.is_open(device):
            self._breakers[device].asked(now_s)
        elif self._selector.knows(device):
            until_s = now_s + HEARTBEAT_S
            request = Request(k=self._k_of[device], device=device, sent_s=now_s)
            self._entries[number] = _Entry(until_s, {device: request})
            self._next_end_s = min(self._next_end_s, until_s)
            self._tell(DeviceEvent("asked", device, now_s, request, until_s))

    def told(self, number: int, device: str, trouble: Reason | None, now_s: float) -> None:
        """A status of `device` has come; `trouble` is what keeps it from serving."""
        ended = self._close(number, device, now_s)
        ended.what, ended.reason = "told", trouble
        self._tell(ended)

    def _close(self, number: int, device: str, now_s: float) -> DeviceEvent:
        """The end of a request, if there was such a one, after those that ended before."""
        entry = self._entries.get(number)
        if entry is None or (request := entry.requests.pop(device, None)) is None:
            self._expire(now_s)
            request, until_s = self._overdue.get(device, {}).pop(number, (None, 0.0))
            return DeviceEvent("dropped", device, now_s, request, until_s)
        if not entry.requests and number not in self.calls:
            del self._entries[number]
        self._expire(now_s)
        return DeviceEvent("dropped", device, now_s, request, entry.until_s, in_flight=True)

    def _expire(self, now_s: float) -> None:
        """Whatever has not been answered by the end of its time was met with silence."""
        if now_s < self._next_end_s:
            return
        ended = [(n, e) for n, e in self._entries.items() if e.until_s <= now_s]
        for number, entry in ended:
            requests, entry.requests = entry.requests, {}
            if number not in self.calls:
                del self._entries[number]
            for device, request in requests.items():
                overdue = self._overdue.setdefault(device, {})
                overdue[number] = request, entry.until_s
                if len(overdue) > OVERDUE:
                    del overdue[next(iter(overdue))]
                silent = DeviceEvent("silent", device, entry.until_s, request, entry.until_s, True)
                self._tell(silent)
        self._next_end_s = min(
            (e.until_s for e in self._entries.values() if e.requests), default=math.inf
        )

    def _tell(self, event: DeviceEvent) -> None:
        """Hand `event` to all listeners to which it can mean anything."""
        is_good = event.what in ("sent", "answered")
        if self._slow or not is_good:
            self._slow.handle(event)
        if self._breakers or not is_good:
            self._breakers.handle(event)
        if self._selects:
            self._selector.handle(event)
        if self._observes:
            self._hedging.handle(event)

    def _slow_s(self, device: str) -> float:
        """What `device` may well take: longer where it was late lately; infinity if unknown."""
        slow = self._slow.get(device)
        return self._hedging.slow_s(device) if slow is None else max(slow.trips)
