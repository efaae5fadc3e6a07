"""One request's life: events in, actions out. No sockets, no clock, no threads.

    start ──> Send to the first available device of every member
    Replied, Failed, TimePassed ──> Send to a replica, or Finish

A session decides once, by the first of: every member has arrived or cannot arrive any more, or
the moment to decide (the deadline less the reserve for fusing) has come. A reply that is in hand
before that decision counts; whatever comes after it changes nothing.
"""

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
    #: Replicas not asked so far, in order of preference.
    candidates: list[str]
    asked: str | None = None
    asked_s: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)


class Session:
    """One request to `members` (index k -> devices that serve it, best first).

    `deadline_s` and every `now_s` are readings of one monotonic clock, in seconds; `reserve_s` is
    kept back for fusing.
    """

    def __init__(
        self, members: Mapping[int, Sequence[str]], *, deadline_s: float, reserve_s: float = 0.0
    ) -> None:
        self.deadline_s = deadline_s
        self.decide_s = deadline_s - reserve_s
        self.finished = False
        self._open = {k: _Member(k, list(devices)) for k, devices in members.items()}
        #: Device -> the member for which it is being asked.
        self._waiting: dict[str, _Member] = {}
        self._arrived: dict[int, Arrival] = {}
        self._missing: dict[str, str] = {}

    def start(self, *, now_s: float, unavailable: Mapping[str, str]) -> list[Action]:
        """Ask one device per member; `unavailable` ones (device -> reason) are never waited for."""
        actions: list[Action] = []
        for member in list(self._open.values()):
            for device in [d for d in member.candidates if d in unavailable]:
                member.candidates.remove(device)
                member.reasons[device] = unavailable[device]
            actions += self._ask_next(member, now_s)
        return actions + self._decide(now_s)

    def handle(self, event: Event) -> list[Action]:
        """What to do about `event`; nothing once the session has finished."""
        if self.finished:
            return []
        actions: list[Action] = []
        if not isinstance(event, TimePassed):
            member = self._asked(event.device)
            if member is None:
                return []
            if isinstance(event, Replied):
                self._arrive(member, event)
            else:
                member.reasons[event.device] = event.reason
                actions += self._ask_next(member, event.now_s)
        return actions + self._decide(event.now_s)

    def waits_for(self, device: str) -> bool:
        """Whether this session would still use a reply of `device`."""
        return not self.finished and self._asked(device) is not None

    def _asked(self, device: str) -> _Member | None:
        return self._waiting.get(device)

    def _arrive(self, member: _Member, event: Replied) -> None:
        round_trip_ms = (event.now_s - member.asked_s) * 1e3
        timing = Timing(
            queue_ms=event.queue_ms,
            compute_ms=event.compute_ms,
            network_ms=max(0.0, round_trip_ms - event.queue_ms - event.compute_ms),
        )
        self._arrived[member.k] = Arrival(
            device=event.device, contribution=event.contribution, timing=timing
        )
        del self._open[member.k], self._waiting[event.device]

    def _ask_next(self, member: _Member, now_s: float) -> list[Action]:
        if member.asked is not None:
            del self._waiting[member.asked]
        member.asked = None
        if not member.candidates:
            self._missing |= member.reasons
            del self._open[member.k]
            return []
        if now_s >= self.decide_s:
            member.reasons[member.candidates[0]] = NO_TIME
            return []
        member.asked, member.asked_s = member.candidates.pop(0), now_s
        self._waiting[member.asked] = member
        budget_ms = (self.decide_s - now_s) * 1e3
        return [Send(k=member.k, device=member.asked, budget_ms=budget_ms)]

    def _decide(self, now_s: float) -> list[Action]:
        timed_out = bool(self._open) and now_s >= self.decide_s
        if self._open and not timed_out:
            return []
        self.finished = True
        for member in self._open.values():
            self._missing |= member.reasons
            if member.asked is not None:
                self._missing[member.asked] = LATE
        return [
            Finish(
                arrived=dict(sorted(self._arrived.items())),
                missing=dict(self._missing),
                timed_out=timed_out,
            )
        ]
