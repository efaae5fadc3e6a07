"""One request's life: events in, actions out. No sockets, no clock, no threads.

    start ──> Send to the first available device of every member
    Replied, Failed, TimePassed ──> Send to a replica, or Finish

A replica is asked when the one before it has failed and, where hedging is asked for, also beside
one that has not answered for so long (Dean and Barroso, The Tail at Scale, CACM 2013): whichever
answers first counts.

A session decides once, by the first of: every member has arrived or cannot arrive any more, or
the moment to decide (the deadline less the reserve for fusing) has come. A reply that is in hand
before that decision counts; whatever comes after it changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mdp.fusion import Contribution

#: The reason of a device whose reply was not in hand when the time to decide came.
LATE = "late"
#: The reason of a device that was not asked, as the time to decide had come before.
NO_TIME = "not asked: no time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where one member's milliseconds went, by its own and the client's clock."""

    queue_ms: float
    compute_ms: float
    #: The round trip less the agent's own milliseconds.
    network_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """A device's contribution has arrived."""

    device: str
    contribution: Contribution
    queue_ms: float
    compute_ms: float
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A device will not answer this request; `reason` says why."""

    device: str
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The clock went on."""

    now_s: float


Event = Replied | Failed | TimePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send this member's crop to `device`."""

    k: int
    device: str
    budget_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One member's part of an answer."""

    device: str
    contribution: Contribution
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The decision: what arrived by member, and every device that was asked in vain."""

    arrived: Mapping[int, Arrival]
    missing: Mapping[str, str]
    #: True if the time to decide came before every member was settled.
    timed_out: bool


Action = Send | Finish


@dataclass(slots=True)
class _Member:
    """A member that has not arrived: who is being asked, who may be asked next, who failed."""

    k: int
    #: Everyone who serves it, in order of preference.
    candidates: Sequence[str]
    #: How many of the candidates have been asked or passed over.
    passed: int = 0
    #: Device -> when it was asked: one, or two where one was hedged.
    asked: dict[str, float] = field(default_factory=dict)
    hedge_s: float = math.inf
    reasons: dict[str, str] = field(default_factory=dict)


class Session:
    """One request to `members` (index k -> devices that serve it, best first).

    `deadline_s` and every `now_s` are readings of one monotonic clock, in seconds; `reserve_s` is
    kept back for fusing. With `hedge_after_s`, a device that has not answered for so long has the
    next replica asked beside it; never more than two of a member at a time.
    """

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        *,
        deadline_s: float,
        reserve_s: float = 0.0,
        hedge_after_s: float | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self.decide_s = deadline_s - reserve_s
        self.finished = False
        self._hedge_after_s = hedge_after_s
        #: When the next hedge is due; it may be due to a member that has arrived meanwhile.
        self._hedge_s = math.inf
        self._open = {k: _Member(k, devices) for k, devices in members.items()}
        #: Device -> the member for which it is being asked.
        self._waiting: dict[str, _Member] = {}
        self._unavailable: Mapping[str, str] = {}
        self._arrived: dict[int, Arrival] = {}
        self._missing: dict[str, str] = {}

    @property
    def wake_s(self) -> float:
        """When the session wants to be told the time at the latest."""
        return min(self.decide_s, self._hedge_s)

    def start(self, *, now_s: float, unavailable: Mapping[str, str]) -> list[Action]:
        """Ask one device per member; `unavailable` ones (device -> reason) are never waited for."""
        self._unavailable = unavailable
        actions: list[Action] = []
        for member in list(self._open.values()):
            actions += self._ask_next(member, now_s)
        return actions + self._decide(now_s)

    def handle(self, event: Event) -> list[Action]:
        """What to do about `event`; nothing once the session has finished."""
        if self.finished:
            return []
        actions: list[Action] = []
        if not isinstance(event, TimePassed):
            member = self._waiting.get(event.device)
            if member is None:
                return []
            if isinstance(event, Replied):
                self._arrive(member, event)
            else:
                actions += self._fail(member, event)
        if event.now_s >= self._hedge_s:
            actions += self._hedge(event.now_s)
        return actions + self._decide(event.now_s)

    def waits_for(self, device: str) -> bool:
        """Whether this session would still use a reply of `device`."""
        return not self.finished and device in self._waiting

    def _arrive(self, member: _Member, event: Replied) -> None:
        round_trip_ms = (event.now_s - member.asked[event.device]) * 1e3
        timing = Timing(
            queue_ms=event.queue_ms,
            compute_ms=event.compute_ms,
            network_ms=max(0.0, round_trip_ms - event.queue_ms - event.compute_ms),
        )
        self._arrived[member.k] = Arrival(
            device=event.device, contribution=event.contribution, timing=timing
        )
        for device in member.asked:
            del self._waiting[device]
        del self._open[member.k]

    def _fail(self, member: _Member, event: Failed) -> list[Action]:
        member.reasons[event.device] = event.reason
        del member.asked[event.device], self._waiting[event.device]
        return [] if member.asked else self._ask_next(member, event.now_s)

    def _ask_next(self, member: _Member, now_s: float) -> list[Action]:
        """Ask the next replica of a member of which nobody is being asked."""
        device = self._next(member)
        if device is None:
            self._missing |= member.reasons
            del self._open[member.k]
            return []
        if now_s >= self.decide_s:
            member.reasons[device] = NO_TIME
            return []
        if self._hedge_after_s is not None:
            member.hedge_s = now_s + self._hedge_after_s
            self._hedge_s = min(self._hedge_s, member.hedge_s)
        return [self._send(member, device, now_s)]

    def _hedge(self, now_s: float) -> list[Action]:
        """Ask one more of every member whose device has been given time enough."""
        actions: list[Action] = []
        for member in self._open.values():
            if member.hedge_s <= now_s < self.decide_s:
                member.hedge_s = math.inf
                device = self._next(member)
                if device is not None:
                    actions.append(self._send(member, device, now_s))
        self._hedge_s = min((member.hedge_s for member in self._open.values()), default=math.inf)
        return actions

    def _next(self, member: _Member) -> str | None:
        """The next candidate that is there, or None."""
        while member.passed < len(member.candidates):
            device = member.candidates[member.passed]
            member.passed += 1
            reason = self._unavailable.get(device)
            if reason is None:
                return device
            member.reasons[device] = reason
        return None

    def _send(self, member: _Member, device: str, now_s: float) -> Send:
        member.asked[device] = now_s
        self._waiting[device] = member
        return Send(k=member.k, device=device, budget_ms=(self.decide_s - now_s) * 1e3)

    def _decide(self, now_s: float) -> list[Action]:
        timed_out = bool(self._open) and now_s >= self.decide_s
        if self._open and not timed_out:
            return []
        self.finished = True
        for member in self._open.values():
            self._missing |= member.reasons
            self._missing |= dict.fromkeys(member.asked, LATE)
            for device in member.candidates[member.passed :]:
                if device in self._unavailable:
                    self._missing[device] = self._unavailable[device]
        return [
            Finish(
                arrived=dict(sorted(self._arrived.items())),
                missing=dict(self._missing),
                timed_out=timed_out,
            )
        ]
