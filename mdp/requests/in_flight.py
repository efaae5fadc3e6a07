"""The one book of requests in flight: each stands here from its sending until it ends. Pure.

A driver (`mdp.client.dispatcher`, `partitioner.simulation.engine`) sends what a call's session asks
for and tells the book what comes of it, once. The book closes the request, tells the session, and
hands one stream of events to all that follow devices: circuit breakers, lateness, replica
statistics and hedging. What its device's window has no room for, it `holds`, until `next_turn`
gives it out. Clock and chance are arguments.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from mdp.requests.choice import Choice, exclude, others_by_s
from mdp.requests.health import CircuitBreakers
from mdp.requests.hedging import DEFAULT_SHARE, Hedging
from mdp.requests.latency import SlowDevices
from mdp.requests.reason import DISCONNECTED, PROBATION, Code, Reason
from mdp.requests.replicas import HEARTBEAT_S, Chance, ReplicaSelector
from mdp.requests.request import DeviceEvent, Request, What
from mdp.requests.session import Action, DeviceFailed, Replied, Session
from mdp.requests.window import SendWindow, most_out

#: What a failure of a code means; any other one is `failed`.
_MEANING: Mapping[Code, What] = {
    "overloaded": "refused", "too_late": "refused", "quota": "refused", "no_frame": "no_frame",
    "not_ready": "unready", "draining": "unready", "wrong_bundle": "unready",
    "wrong_submodel": "unready",
}  # fmt: skip
#: Requests of one device that ended as silent and may still be answered: later answers to older
#: ones are no sign of life.
OVERDUE = 64
#: Of a member's replicas that are there, the first so many are asked whether one has time.
LOOKED_AT = 8


class InCall(Protocol):
    """A driver's record of one call."""

    session: Session


C = TypeVar("C", bound=InCall)


class _Outstanding(Struct):
    """The requests of one call, or one status request."""

    until_s: float
    #: Device -> the request that has not ended.
    requests: dict[str, Request]
    #: Device -> the request that waits for its turn there.
    held: dict[str, Request] = {}


class Turn(NamedTuple):
    """A request whose waiting has ended."""

    number: int
    request: Request
    #: Why it does not go out any more; None: it does.
    reason: Reason | None


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
        batches: Mapping[int, int] | None = None,
        rungs: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        """With `first`, `others_by_s` is asked for: when the others have to be asked.

        `batches` has the most pictures that a member's devices compute at once, 1 if left out;
        `rungs` the times of its rungs, the top one first, in any unit, none if left out.
        """
        self._k_of, self._first = k_of, first
        self._batches, self._rungs = batches or {}, rungs or {}
        self._breakers, self._slow = CircuitBreakers(), SlowDevices()
        self._windows: dict[str, SendWindow] = {}
        #: How many requests wait for their turn; devices where one may have come, where the end of
        #: a pause is awaited, and where none will come.
        self.held = 0
        self._open: dict[str, None] = {}
        self._paused: dict[str, None] = {}
        self._stranded: dict[str, None] = {}
        self._selector = ReplicaSelector(members, self._breakers, chance, self._count_held)
        self._hedging = Hedging(members, k_of, hedge_after_s, hedge_share)
        hedges = bool(self._selector.members) and hedge_share > 0
        #: What sessions hedge by, if there is anything to hedge with.
        self.hedge: Hedging | None = self._hedging if hedges else None
        #: Whether replica statistics and hedging have anything to follow.
        self._selects, self._observes = bool(self._selector.members), bool(hedges or first)
        #: The calls that are not decided, by number.
        self.calls: dict[int, C] = {}
        self._entries: dict[int, _Outstanding] = {}
        self._last_number = 0
        self._next_end_s = math.inf
        #: Device -> number -> the request that ended as silent, and the end of its time.
        self._overdue: dict[str, dict[int, tuple[Request, float]]] = {}

    # Calls.

    def choose(self, now_s: float, gone: Mapping[str, Reason], decide_s: float) -> Choice:
        """The devices that a call may ask; `gone` (device -> reason) are not connected."""
        self._expire(now_s)
        unavailable: Mapping[str, Reason] = gone
        probing: Mapping[str, int] = {}
        if self._breakers or self._slow:
            tests = {d for e in self._entries.values() for d, r in e.requests.items() if r.is_test}
            if self.held:
                held = (e.held for e in self._entries.values() if e.held)
                tests |= {d for each in held for d, r in each.items() if r.is_test}
            unavailable, probing = exclude(
                self._k_of, gone, self._breakers, self._slow, tests, now_s, decide_s - now_s
            )
        out = {*unavailable, *probing} if probing else unavailable
        choice = Choice(self._selector.rank(out, now_s), unavailable, probing)
        # Where nothing is in flight, nobody has to wait.
        if self._entries and (late := self._late_at(choice, decide_s - now_s)):
            too_late = self._without(choice, late)
            return Choice(choice.members, unavailable, probing, too_late)
        return choice

    def _late_at(self, choice: Choice, left_s: float) -> dict[str, Reason]:
        """Devices of members that would be late with so much time for all that waits already."""
        late: dict[str, Reason] = {}
        for k, devices in choice.members.items():
            if self._first and k not in self._first:
                continue
            there = (d for d in devices if d not in choice.unavailable and d not in choice.probing)
            own: dict[str, Reason] = {}
            for device in islice(there, LOOKED_AT):
                window = self._windows.get(device)
                if window is None or not window.is_late(left_s):
                    break
                waiting = window.out + len(window.line)
                text = f"{waiting} of this client's requests are before it"
                own[device] = Reason("too_late", text)
            else:
                late |= own
        return late

    @staticmethod
    def _without(choice: Choice, late: Mapping[str, Reason]) -> Mapping[str, Reason]:
        """Reason why no device is asked, for every member, as those of `late` would be late."""
        why = Reason("not asked", f"{', '.join(late)} would be late")
        missing = dict(late)
        for k, devices in choice.members.items():
            first = choice.first_to_ask(k)
            if first is None:
                missing |= {d: choice.unavailable.get(d, PROBATION) for d in devices}
            elif first not in late:
                missing[first] = why
        return missing

    def others_by_s(self, choice: Choice, now_s: float, decide_s: float) -> float:
        """Latest moment at which to ask a cascade's second stage."""
        return others_by_s(choice, self._first, self._slow_s, now_s, decide_s)

    def number(self) -> int:
        """A number that no other request has."""
        self._last_number += 1
        return self._last_number

    def begin(self, call: C) -> int:
        """Enter `call`; returns its number."""
        number = self.number()
        self.calls[number] = call
        self._entries[number] = _Outstanding(call.session.decide_s, {})
        return number

    def on_decision(self, number: int, now_s: float) -> None:
        """The call needs no more answers; requests in flight still tell of their devices."""
        del self.calls[number]
        entry = self._entries[number]
        for device in list(entry.held):
            self._drop(number, device, now_s)
        if not entry.requests:
            del self._entries[number]

    # Requests.

    def holds(self, number: int, request: Request) -> bool:
        """Tell whether `request` has to wait until `next_turn` gives it out."""
        window = self._windows.get(request.device) or self._new_window(request)
        if window.admits(request):
            return False
        self._mark(request, self._entries[number].until_s)
        self._hold(number, request, window)
        return True

    def next_turn(self, now_s: float) -> Turn | None:
        """The next request whose waiting has ended, with the time and budget of now.

        To be asked again until there is none, whenever something has happened or `wake_s` has come.
        """
        self._expire(now_s)
        while self._stranded:
            device = next(iter(self._stranded))
            window, breaker = self._windows[device], self._breakers.get(device)
            reason = None if breaker is None else breaker.reason
            if window.line and reason is not None:
                return self._turn(window.numbers[0], device, now_s, reason)
            del self._stranded[device]
        if self._paused:
            for device in [d for d in self._paused if self._windows[d].paused_until_s <= now_s]:
                del self._paused[device]
                self._open[device] = None
        while self._open:
            device = next(iter(self._open))
            window = self._windows[device]
            number = window.next(now_s)
            if number is not None:
                if now_s < self._entries[number].until_s:
                    return self._turn(number, device, now_s, None)
                # Its call will be decided as soon as it is told the time.
                self._drop(number, device, now_s)
                continue
            del self._open[device]
            if window.line and window.has_room:
                self._paused[device] = None
        # One that was dropped may have been the last straw.
        return self.next_turn(now_s) if self._stranded else None

    def wake_s(self) -> float:
        """Latest moment at which to call `next_turn`; infinity while nothing waits."""
        if not self.held:
            return math.inf
        paused_s = [self._windows[device].paused_until_s for device in self._paused]
        return min([self._next_end_s, *paused_s])

    def on_send(self, number: int, request: Request) -> None:
        """`request` of a call has gone out."""
        entry, device, now_s = self._entries[number], request.device, request.sent_s
        until_s = entry.until_s
        if self._breakers or self._slow:
            self._mark(request, until_s)
        (self._windows.get(device) or self._new_window(request)).on_send(request)
        entry.requests[device] = request
        if until_s < self._next_end_s:
            self._next_end_s = until_s
        if self._selects or self._observes or self._slow:
            self._tell(DeviceEvent("sent", device, now_s, request, until_s))

    def handle(self, number: int, event: Replied | DeviceFailed) -> list[Action] | None:
        """A device has answered a request, or said that it will not; None: no call waits for that.

        A request that had ended as silent was late. An answer to nothing is no sign of life: a
        device that sends only such would be waited for every time.
        """
        device, now_s = event.device, event.now_s
        what: What = "answered"
        reason = None
        if isinstance(event, DeviceFailed):
            reason = event.reason
            what = _MEANING.get(reason.code, "failed")
        ended = self._close(number, device, now_s)
        request, call = ended.request, self.calls.get(number)
        awaited = call is not None and call.session.waits_for(device)
        again = (
            reason is not None
            and reason.code == "overloaded"
            and request is not None
            and ended.in_flight
            and not request.is_test
            and now_s < ended.until_s
            and call is not None
            and awaited
            and call.session.is_alone(device)
        )
        if request is not None or what in ("unready", "failed"):
            in_time = ended.in_flight and now_s <= ended.until_s
            if request is not None and ended.in_flight and request.ahead >= 0:
                window = self._windows[device]
                if isinstance(event, Replied):
                    queue_s, compute_s = event.queue_ms / 1e3, event.compute_ms / 1e3
                    window.on_answer(request, queue_s, compute_s, now_s, event.rung)
                elif event.reason.code == "overloaded":
                    window.on_refusal(request, now_s)
                elif event.reason.code == "too_late":
                    window.was_late(request, ended.until_s)
            ended.what = what if in_time or what not in ("answered", "refused") else "late"
            if again:
                ended.what = "full"
            ended.reason = reason
            self._tell(ended)
        # Held: an answer again, to a request that will be sent again.
        if call is None or not awaited or device in self._entries[number].held:
            return None
        if again and request is not None:
            request.refusal = reason
            self._hold(number, request, self._windows[device])
            return []
        return call.session.handle(event)

    def _new_window(self, request: Request) -> SendWindow:
        times = self._rungs.get(request.k, ())
        most = most_out(self._batches.get(request.k, 1), bool(times))
        window = SendWindow(most, [times[-1] / one for one in times])
        self._windows[request.device] = window
        return window

    def _mark(self, request: Request, until_s: float) -> None:
        """Note whether `request` tests its device."""
        device = request.device
        if self._breakers and (breaker := self._breakers.get(device)) is not None:
            request.is_test = breaker.half_open
        if self._slow and (slow := self._slow.get(device)) is not None:
            request.is_test = request.is_test or slow.is_late_for(until_s - request.sent_s)

    def _hold(self, number: int, request: Request, window: SendWindow) -> None:
        device = request.device
        window.hold(number, request)
        self._entries[number].held[device] = request
        self.held += 1
        if window.has_room:
            self._paused[device] = None

    def _drop(self, number: int, device: str, now_s: float) -> None:
        """End the waiting of a request that will not go out."""
        entry = self._entries[number]
        self._windows[device].leave(number)
        request = entry.held.pop(device)
        self.held -= 1
        # One that refuses until the end is as bad as one that fails.
        if request.refusal is not None and now_s >= entry.until_s:
            self._tell(DeviceEvent("failed", device, now_s, reason=request.refusal))

    def _turn(self, number: int, device: str, now_s: float, reason: Reason | None) -> Turn:
        """The end of a request's waiting."""
        request, entry = self._windows[device].leave(number), self._entries[number]
        del entry.held[device]
        self.held -= 1
        request.held = False
        request.held_s += now_s - request.sent_s
        request.sent_s, request.budget_ms = now_s, (entry.until_s - now_s) * 1e3
        return Turn(number, request, reason)

    def _count_held(self, device: str) -> int:
        window = self._windows.get(device)
        return 0 if window is None else len(window.line)

    # Devices.

    def on_connect(self, device: str, now_s: float) -> None:
        """The connection to `device` is up, for the first time or again."""
        self._tell(DeviceEvent("connected", device, now_s))

    def on_loss(
        self, device: str, now_s: float, reason: Reason = DISCONNECTED
    ) -> list[tuple[int, list[Action]]]:
        """Actions of the calls, by number, now that no answer of `device` will come.

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
        if reason is DISCONNECTED and self._count_held(device):
            for number in self._windows[device].numbers:
                self._turn(number, device, now_s, reason)
                numbers.append(number)
        failed = DeviceFailed(device=device, reason=reason, now_s=now_s)
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

    def on_status_request(self, number: int, device: str, now_s: float) -> None:
        """Status request `number` has gone out to `device`."""
        if self._breakers.is_open(device):
            self._breakers[device].on_status_request(now_s)
        elif self._selector.knows(device):
            until_s = now_s + HEARTBEAT_S
            request = Request(k=self._k_of[device], device=device, sent_s=now_s)
            self._entries[number] = _Outstanding(until_s, {device: request})
            self._next_end_s = min(self._next_end_s, until_s)
            self._tell(DeviceEvent("asked", device, now_s, request, until_s))

    def on_status(self, number: int, device: str, trouble: Reason | None, now_s: float) -> None:
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
        self._make_room(request)
        self._expire(now_s)
        return DeviceEvent("dropped", device, now_s, request, entry.until_s, in_flight=True)

    def _make_room(self, request: Request) -> None:
        """Have one request less out in the window of its device."""
        if request.ahead >= 0:
            window = self._windows[request.device]
            window.out -= 1
            if window.line:
                self._open[request.device] = None

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
                self._make_room(request)
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
        held = self.held and not is_good and self._count_held(event.device)
        if held and self._breakers.is_open(event.device):
            self._stranded[event.device] = None

    def _slow_s(self, device: str) -> float:
        """Seconds that `device` may take: longer where it was late lately; infinity if unknown."""
        slow = self._slow.get(device)
        takes_s = self._hedging.slow_s(device) if slow is None else max(slow.trips)
        return takes_s + self._windows[device].wait_s() if self._count_held(device) else takes_s
