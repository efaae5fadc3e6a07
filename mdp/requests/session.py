"""One request's life: events in, actions out. No sockets, no clock, no threads.

    start ──> Request to the first available device of every member
    Replied, Failed, TimePassed ──> Request to a replica, or Finish

A replica is asked when the one before it has failed and, with hedging, also beside one that has
not answered for so long (Dean and Barroso, The Tail at Scale, CACM 2013): the first answer counts.
A half-open device is asked beside the others and not waited for, unless no other is left.

In a cascade the members of the first stage are asked before the others. Where their answer is sure,
it is final and the others are never asked. The others are asked as soon as it is known to be
unsure, as one of the first stage cannot answer, or as the last moment has come at which they can
still be in time.

A session decides once, by the first of: every member that is waited for has arrived or cannot
arrive any more; the first stage alone has arrived and is sure; or the moment of decision has come.
A reply that is in hand before that decision counts; later ones change nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from mdp.fusion.fuse import Contribution
from mdp.requests.choice import Choice
from mdp.requests.hedging import Hedging
from mdp.requests.reason import LATE, NO_TIME, NO_TURN, NOT_NEEDED, PROBATION, Reason
from mdp.requests.request import Request

#: How an answer came about: all members were asked at once; the first stage of a cascade was sure;
#: or it was not, or failed, and the others were asked after it.
Stage = Literal["all", "first", "escalated"]


class Replied(Struct, frozen=True, kw_only=True):
    """A device's contribution has arrived."""

    device: str
    contribution: Contribution
    queue_ms: float
    compute_ms: float
    now_s: float
    #: Of its sub-model, counted from the top.
    rung: int = 0


class DeviceFailed(Struct, frozen=True, kw_only=True):
    """A device will not answer this request."""

    device: str
    reason: Reason
    now_s: float


class TimePassed(Struct, frozen=True, kw_only=True):
    """The clock went on."""

    now_s: float


Event = Replied | DeviceFailed | TimePassed


class Arrival(Struct, frozen=True, kw_only=True):
    """One member's part of an answer, and where its milliseconds went."""

    device: str
    contribution: Contribution
    queue_ms: float
    compute_ms: float
    #: The round trip less the agent's own milliseconds.
    network_ms: float
    #: What the request waited for its turn in the client, before it was sent.
    held_ms: float = 0.0
    rung: int = 0


class Finish(Struct, frozen=True, kw_only=True):
    """The decision: what arrived by member, and every device that was asked in vain."""

    arrived: Mapping[int, Arrival]
    missing: Mapping[str, Reason]
    #: True if the moment of decision came before every member was settled.
    timed_out: bool
    stage: Stage = "all"


Action = Request | Finish


class Stages(Struct, frozen=True):
    """Asking in two stages: the members `first`, and the others where these are not sure."""

    first: frozenset[int]
    #: When the others have to be asked at the latest; all are asked at once where that is past.
    others_by_s: float
    #: Whether the answer of the members `first` (k -> contribution) is final.
    sure: Callable[[Mapping[int, Contribution]], bool]


class _Member(Struct, eq=False):
    """A member that has not arrived."""

    k: int
    #: The devices that serve it and have been neither asked nor passed over, best first.
    rest: Iterator[str]
    #: The next of them that may be asked.
    spare: str | None = None
    #: Device -> the request that has not been answered: one, or two where one was hedged.
    asked: dict[str, Request] = {}
    hedge_s: float = math.inf
    reasons: dict[str, Reason] = {}


class Session:
    """One call to the members of `choice`, decided by `decide_s`.

    `decide_s` and every `now_s` are readings of one monotonic clock, in seconds. With `hedge`, a
    device that has not answered for so long has the next replica asked beside it; never more than
    two of a member at a time, tests aside. With `stages`, it is a cascade.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        decide_s: float,
        hedge: Hedging | None = None,
        stages: Stages | None = None,
    ) -> None:
        #: The moment of decision, and when the session wants to be told the time at the latest.
        self.decide_s = self.wake_s = decide_s
        self.finished = False
        self._hedge, self._stages = hedge, stages
        #: When the next hedge is due; it may be due to a member that has arrived meanwhile.
        self._hedge_s = math.inf
        self._open = {k: _Member(k, iter(devices)) for k, devices in choice.members.items()}
        #: Members of a cascade's second stage, until they are asked; whether that has happened.
        self._later: dict[int, _Member] = {}
        self._escalated = False
        #: Whether the first stage is sure, once that was asked.
        self._sure: bool | None = None
        #: Device -> the member for which it is being asked.
        self._waiting: dict[str, _Member] = {}
        self._unavailable, self._probing = choice.unavailable, choice.probing
        self._too_late = choice.too_late
        self._arrived: dict[int, Arrival] = {}
        self._missing: dict[str, Reason] = {}

    def start(self, now_s: float) -> list[Action]:
        """Ask one device per member, and those that are tested beside them; or nobody at all."""
        if self._too_late:
            self.finished = True
            return [Finish(arrived={}, missing=self._too_late, timed_out=False)]
        stages = self._stages
        if stages is not None and now_s < stages.others_by_s:
            self._later = {k: m for k, m in self._open.items() if k not in stages.first}
            self._open = {k: m for k, m in self._open.items() if k in stages.first}
            self._set_wake()
        return self._ask_all(self._open, now_s) + self._go_on(now_s)

    def handle(self, event: Event) -> list[Action]:
        """Actions on `event`; none once the session has finished."""
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
            actions += self._ask_beside(event.now_s)
        return actions + self._go_on(event.now_s)

    def waits_for(self, device: str) -> bool:
        """Tell whether this session would still use a reply of `device`."""
        return not self.finished and device in self._waiting

    def is_alone(self, device: str) -> bool:
        """Tell whether no replica could replace `device`, which this session waits for."""
        member = self._waiting[device]
        return member.spare is None and len(member.asked) == 1

    def _arrive(self, member: _Member, event: Replied) -> None:
        request = member.asked[event.device]
        round_trip_ms = (event.now_s - request.sent_s) * 1e3
        self._arrived[member.k] = Arrival(
            device=event.device,
            contribution=event.contribution,
            queue_ms=event.queue_ms,
            compute_ms=event.compute_ms,
            network_ms=max(0.0, round_trip_ms - event.queue_ms - event.compute_ms),
            held_ms=request.held_s * 1e3,
            rung=event.rung,
        )
        for device in member.asked:
            del self._waiting[device]
        del self._open[member.k]

    def _fail(self, member: _Member, event: DeviceFailed) -> list[Action]:
        member.reasons[event.device] = event.reason
        del member.asked[event.device], self._waiting[event.device]
        return [] if self._waits_for(member) else self._ask_next(member, event.now_s)

    def _waits_for(self, member: _Member) -> bool:
        return any(device not in self._probing for device in member.asked)

    def _ask_all(self, members: Mapping[int, _Member], now_s: float) -> list[Action]:
        """Ask one device of each of `members`, and those of theirs that are tested."""
        actions: list[Action] = []
        if now_s < self.decide_s:
            for device, k in self._probing.items():
                if k in members:
                    actions.append(self._ask(members[k], device, now_s))
        for member in list(members.values()):
            member.spare = self._next(member)
            actions += self._ask_next(member, now_s)
        return actions

    def _ask_next(self, member: _Member, now_s: float) -> list[Action]:
        """Ask the spare device of a member of which none is waited for."""
        device = member.spare
        if device is None:
            if not member.asked:
                self._missing |= member.reasons
                del self._open[member.k]
            return []
        if now_s >= self.decide_s:
            member.reasons[device] = NO_TIME
            return []
        member.spare = self._next(member)
        if self._hedge is not None and member.spare is not None:
            after_s = self._hedge.after_s(device)
            # Where too little is known, half of the time that is left is taken to be long.
            known = after_s < math.inf
            member.hedge_s = now_s + (after_s if known else (self.decide_s - now_s) / 2)
            self._hedge_by(min(self._hedge_s, member.hedge_s))
        return [self._ask(member, device, now_s)]

    def _ask_beside(self, now_s: float) -> list[Action]:
        """Ask one more of every member whose device has been given time enough."""
        actions: list[Action] = []
        for member in self._open.values():
            if member.hedge_s <= now_s < self.decide_s:
                member.hedge_s = math.inf
                # Without a token, the spare one may still step in for one that fails.
                if member.spare is not None and self._hedge is not None and self._hedge.try_spend():
                    actions.append(self._ask(member, member.spare, now_s, hedged=True))
                    member.spare = self._next(member)
        self._hedge_by(min((member.hedge_s for member in self._open.values()), default=math.inf))
        return actions

    def _hedge_by(self, hedge_s: float) -> None:
        self._hedge_s = hedge_s
        self._set_wake()

    def _set_wake(self) -> None:
        self.wake_s = min(self.decide_s, self._hedge_s)
        if self._later and self._stages is not None:
            self.wake_s = min(self.wake_s, self._stages.others_by_s)

    def _next(self, member: _Member) -> str | None:
        """The next device that is there and not half-open, or None."""
        for device in member.rest:
            if device in self._probing:
                member.reasons.setdefault(device, PROBATION)
            elif (reason := self._unavailable.get(device)) is None:
                return device
            else:
                member.reasons[device] = reason
        return None

    def _ask(self, member: _Member, device: str, now_s: float, *, hedged: bool = False) -> Request:
        budget_ms = (self.decide_s - now_s) * 1e3
        request = Request(
            k=member.k, device=device, sent_s=now_s, budget_ms=budget_ms, hedged=hedged
        )
        member.asked[device] = request
        self._waiting[device] = member
        return request

    def _go_on(self, now_s: float) -> list[Action]:
        """Ask the second stage where its time has come, and finish where all is settled."""
        if not self._later or not self._is_unsure(now_s):
            return self._decide(now_s)
        later, self._later = self._later, {}
        self._open |= later
        self._escalated = True
        self._set_wake()
        return self._ask_all(later, now_s) + self._decide(now_s)

    def _decide(self, now_s: float) -> list[Action]:
        timed_out = bool(self._open) and now_s >= self.decide_s
        sure = self._stages is not None and not timed_out and self._is_sure()
        # Without half-open devices, one of every open member is waited for.
        waits = self._open and (not self._probing or self._is_waiting())
        if waits and not timed_out and not sure:
            return []
        self.finished = True
        for member in self._open.values():
            self._give_up(member, LATE if timed_out else NOT_NEEDED if sure else PROBATION)
        for member in self._later.values():
            self._pass_over(member)
        return [
            Finish(
                arrived=dict(sorted(self._arrived.items())),
                missing=dict(self._missing),
                timed_out=timed_out,
                stage="first" if sure else "escalated" if self._escalated else "all",
            )
        ]

    def _is_waiting(self) -> bool:
        return not self._arrived or any(self._waits_for(member) for member in self._open.values())

    def _is_sure(self) -> bool:
        """Tell whether only the first stage has arrived, others could follow, and none has to."""
        stages = self._stages
        if stages is None or self._arrived.keys() != stages.first:
            return False
        if not self._open and not self._later:
            return False
        if self._sure is None:
            self._sure = stages.sure({k: one.contribution for k, one in self._arrived.items()})
        return self._sure

    def _is_unsure(self, now_s: float) -> bool:
        """Tell whether the second stage has to be asked now."""
        if self._stages is None or now_s >= self._stages.others_by_s:
            return True
        for k in self._stages.first:
            member = self._open.get(k)
            if k not in self._arrived and (member is None or not self._waits_for(member)):
                return True
        return not self._open and not self._is_sure()

    def _give_up(self, member: _Member, reason: Reason) -> None:
        """Note why an open member's devices are missing, those that were never asked too."""
        self._missing |= member.reasons
        for device, request in member.asked.items():
            waited = reason is LATE and request.held
            self._missing[device] = (request.refusal or NO_TURN) if waited else reason
        if self._unavailable:
            for device in member.rest:
                if device in self._unavailable:
                    self._missing[device] = self._unavailable[device]

    def _pass_over(self, member: _Member) -> None:
        """Note why a member that was never asked is missing."""
        device = self._next(member)
        if device is not None:
            member.reasons[device] = NOT_NEEDED
        for device, why in member.reasons.items():
            self._missing[device] = NOT_NEEDED if why is PROBATION else why
