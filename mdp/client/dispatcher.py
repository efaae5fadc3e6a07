"""Requests in flight: pictures in, sessions over a transport, answers out.

Single-threaded and never waiting: a client decides how to wait, in its own thread or in an event
loop, and hands in what the transport reported and what the clock says.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from mdp.client.crops import View
from mdp.errors import InferenceError, PictureError, WireError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.fusion.fuse import Contribution, Fusion
from mdp.protocol.messages import (
    Buffer,
    Failure,
    FrameReply,
    FrameRequest,
    Infer,
    Result,
    Status,
    StatusRequest,
    answered_by,
    contribution_of,
    decode,
    encode,
)
from mdp.requests.capture import Glance, Sight, frames_of
from mdp.requests.choice import Choice, others_by_s
from mdp.requests.deadline import reserve_s
from mdp.requests.health import UNREACHABLE
from mdp.requests.hedging import DEFAULT_SHARE
from mdp.requests.prediction import Judge, Prediction
from mdp.requests.replicas import Chance, Roster
from mdp.requests.session import (
    PROBATION,
    Action,
    Event,
    Failed,
    Finish,
    Replied,
    Send,
    Session,
    Stages,
    TimePassed,
)
from mdp.requests.stuck_output import CONSTANT, Monotony
from mdp.transport import Connected, Disconnected, Received, TransportEvent

#: Says at INFO which devices come, go and are not waited for, where the application has a handler.
LOG = logging.getLogger("mdp")
LOG.addHandler(logging.NullHandler())

#: The reason of a device that is connected, but does not take what it is sent.
BACKLOGGED = "backlogged: takes no more requests"

Clock = Callable[[], float]
Answer = Prediction | InferenceError
#: What becomes of a picture.
Outcome = Answer | PictureError


class Transport(Protocol):
    """What an exchange needs of `mdp.transport.Dealers`."""

    connected: set[str]
    #: Devices that are there, but not for this client, with the reason.
    refused: dict[str, str]

    def send(self, device: str, frames: list[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if that cannot be done now."""


class _Call(Struct):
    session: Session
    #: Every member's crop, or what its own camera is asked for.
    asked: Mapping[int, View] | Glance
    started_s: float
    deadline_ms: float
    done: Callable[[Answer], None]
    #: Device -> the frame that it looked at.
    sights: dict[str, Sight] = field(default_factory=dict)


class Exchange:
    """Every call in flight over one transport."""

    def __init__(
        self,
        fleet: Fleet,
        bundle: Bundle,
        transport: Transport,
        *,
        clock: Clock,
        fusion: Fusion,
        hedge_after_s: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
        chance: Chance = random.random,
    ) -> None:
        """Calls to `fleet`, which serves `bundle`; a `Roster` says what the hedges mean.

        With `cascade`, which `bundle` has to have, members are asked in two stages.
        """
        members = fleet.members()
        self.assignments = {a.k: a for a in bundle.manifest.plan.assignments if a.k in members}
        #: Replies that came after their answer, twice, or not as a message of this protocol.
        self.counters: Counter[str] = Counter(late=0, duplicate=0, malformed=0)
        self.statuses: dict[str, Status] = {}
        self._not_in_fleet = {
            a.device: "not in the fleet"
            for a in bundle.manifest.plan.assignments
            if a.k not in members
        }
        self._digest = bundle.digest
        self._num_classes = len(bundle.manifest.labels)
        self._judge = Judge(bundle, fusion)
        #: Members that are asked before the others; empty: all at once.
        self._first: frozenset[int] = frozenset()
        if cascade and bundle.manifest.cascade is not None:
            self._first = frozenset(bundle.manifest.cascade.first)
        self._transport = transport
        self._clock = clock
        self._k_of = {entry.device: entry.k for entry in fleet.devices}
        self._roster = Roster(
            members,
            self._k_of,
            chance=chance,
            hedge_after_s=hedge_after_s,
            hedge_share=hedge_share,
            cascade=cascade,
        )
        self._monotony = {entry.device: Monotony() for entry in fleet.devices}
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        #: Whom the last call did not wait for.
        self._left_out: frozenset[str] = frozenset()

    @property
    def busy(self) -> bool:
        """Whether any call is under way."""
        return bool(self._calls)

    def submit(
        self,
        asked: Mapping[int, View] | Glance,
        *,
        started_s: float,
        deadline_ms: float,
        done: Callable[[Answer], None],
    ) -> None:
        """Begin a call; `done` gets its answer, perhaps before this returns."""
        now_s = self._clock()
        roster = self._roster
        deadline_s, kept_s = started_s + deadline_ms / 1e3, reserve_s(deadline_ms)
        choice = roster.begin(now_s, self._gone(), deadline_s - kept_s)
        if choice.unavailable or choice.probing or self._left_out:
            self._log_left_out(choice)
        session = Session(
            choice.members,
            deadline_s=deadline_s,
            reserve_s=kept_s,
            hedge=roster if roster.hedges else None,
            stages=self._stages(choice, now_s, deadline_s - kept_s) if self._first else None,
        )
        self._last_id += 1
        self._calls[self._last_id] = _Call(session, asked, started_s, deadline_ms, done)
        actions = session.start(now_s=now_s, unavailable=choice.unavailable, probing=choice.probing)
        self._act(self._last_id, actions)
        for device in roster.due(now_s):
            if device in self._transport.connected and self.ask(device):
                roster.asked(self._last_id, device, now_s)

    def _log_left_out(self, choice: Choice) -> None:
        """Log who is not waited for any more, and who is again."""
        out = choice.unavailable.keys() | choice.probing.keys()
        for device in out - self._left_out:
            LOG.info("%s: not waited for: %s", device, choice.unavailable.get(device, PROBATION))
        for device in self._left_out - out:
            LOG.info("%s: waited for again", device)
        self._left_out = frozenset(out)

    def _stages(self, choice: Choice, now_s: float, decide_s: float) -> Stages | None:
        if not self._first <= choice.members.keys():
            return None
        by_s = others_by_s(choice, self._first, self._roster.slow_s, now_s, decide_s)
        return Stages(self._first, by_s, self._judge.sure)

    def ask(self, device: str) -> bool:
        """Ask for a status, which will appear in `statuses`; False if `device` is not connected."""
        self._last_id += 1
        return self._transport.send(device, encode(StatusRequest(request_id=self._last_id)))

    def handle(self, events: list[TransportEvent]) -> None:
        """Take in what the transport reported."""
        for event in events:
            match event:
                case Received():
                    self._receive(event.device, event.frames)
                case Connected(device):
                    LOG.info("%s: connected", device)
                    self._roster.connected(device, self._clock())
                case Disconnected(device):
                    LOG.info("%s: disconnected", device)
                    self._roster.disconnected(device, self._clock())
                    self._fail_all(device, "disconnected")

    def tick(self) -> None:
        """Let every call know the time."""
        now_s = self._clock()
        due = [number for number, call in self._calls.items() if call.session.wake_s <= now_s]
        for request_id in due:
            self._feed(request_id, TimePassed(now_s=now_s))

    def next_wake_s(self) -> float:
        """When `tick` has to be called at the latest; infinity with nothing in flight."""
        return min([call.session.wake_s for call in self._calls.values()], default=math.inf)

    def _gone(self) -> dict[str, str]:
        """Device -> reason, for those to which there is no connection."""
        connected = self._transport.connected
        if len(connected) == len(self._k_of):
            return {}
        return {device: self._absence(device) for device in self._k_of if device not in connected}

    def _absence(self, device: str) -> str:
        refused = self._transport.refused.get(device)
        return UNREACHABLE if refused is None else f"refused: {refused}"

    def _receive(self, device: str, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self.counters["malformed"] += 1
            self._broken(device, f"bad_message: {error}")
            return
        message = envelope.message
        match message:
            case Result() | FrameReply():
                self._result(device, message, envelope.buffers[0])
            case Failure(request_id=0):
                self._broken(device, f"{message.code}: {message.text}")
            case Failure():
                self._failure(
                    device, message.request_id, message.code, f"{message.code}: {message.text}"
                )
            case Status():
                self.statuses[device] = message
                trouble = self._trouble(device, message)
                self._roster.told(message.request_id, device, trouble, self._clock())
            case Infer() | StatusRequest() | FrameRequest():
                self.counters["malformed"] += 1

    def _trouble(self, device: str, status: Status) -> str:
        """What keeps `device` from serving this client, in the words of a Failure, or nothing."""
        if status.state != "READY":
            return f"not_ready: {status.state}" + (f": {status.reason}" if status.reason else "")
        if status.digest != self._digest:
            # Where it changes over, what else it says is about the other one.
            too = answered_by(self._digest) in status.counts
            return "" if too else f"wrong_bundle: serves {status.bundle} {status.digest[:12]}"
        if status.k != self._k_of[device]:
            return f"wrong_submodel: {status.device} serves sub-model {status.k}"
        return ""

    def _result(self, device: str, message: Result | FrameReply, buffer: Buffer) -> None:
        request_id, now_s = message.request_id, self._clock()
        try:
            contribution = self._contribution(device, message, buffer)
        except WireError as error:
            self._failure(device, request_id, "bad_output", f"bad_output: {error}")
            return
        self._roster.answered(request_id, device, now_s)
        call = self._awaiting(device, request_id)
        if call is None:
            return
        if isinstance(message, FrameReply):
            call.sights[device] = Sight(number=message.frame, age_ms=message.age_ms, heard_s=now_s)
        replied = Replied(
            device=device,
            contribution=contribution,
            queue_ms=message.queue_ms,
            compute_ms=message.compute_ms,
            now_s=now_s,
        )
        self._act(request_id, call.session.handle(replied))

    def _failure(self, device: str, request_id: int, code: str, reason: str) -> None:
        now_s = self._clock()
        self._roster.failed(request_id, device, code, reason, now_s)
        if self._awaiting(device, request_id) is not None:
            self._feed(request_id, Failed(device=device, reason=reason, now_s=now_s))

    def _contribution(
        self, device: str, message: Result | FrameReply, buffer: Buffer
    ) -> Contribution:
        """What `device` adds to a call; raises WireError for what can be no answer to it.

        That is also an answer to another question, and logits that never change.
        """
        if message.num_classes != self._num_classes:
            raise WireError(f"expected {self._num_classes} classes, got {message.num_classes}")
        contribution = contribution_of(buffer, self._num_classes)
        if len(contribution.heads) < self._judge.heads:
            raise WireError(f"expected logits of {self._judge.heads} heads, got those of 1")
        call = self._calls.get(message.request_id)
        if call is not None:
            wanted = FrameReply if isinstance(call.asked, Glance) else Result
            if not isinstance(message, wanted):
                raise WireError(f"expected a {wanted.__name__}, got a {type(message).__name__}")
            # A camera may well see the same for hours.
            if not isinstance(call.asked, Glance):
                crop_bytes = call.asked[self._k_of[device]].pixels
                if self._monotony[device].is_constant(buffer, crop_bytes):
                    raise WireError(CONSTANT)
        return contribution

    def _awaiting(self, device: str, request_id: int) -> _Call | None:
        """The call that still waits for this reply of `device`; one for which none does counts."""
        call = self._calls.get(request_id)
        if call is None:
            self.counters["late"] += 1
        elif call.session.waits_for(device):
            return call
        else:
            self.counters["duplicate"] += 1
        return None

    def _broken(self, device: str, reason: str) -> None:
        """Whatever was asked of `device`, its answer would not be recognised."""
        self._roster.broken(device, reason, self._clock())
        self._fail_all(device, reason)

    def _fail_all(self, device: str, reason: str) -> None:
        now_s = self._clock()
        for request_id, call in list(self._calls.items()):
            if call.session.waits_for(device):
                self._feed(request_id, Failed(device=device, reason=reason, now_s=now_s))

    def _feed(self, request_id: int, event: Event) -> None:
        self._act(request_id, self._calls[request_id].session.handle(event))

    def _act(self, request_id: int, actions: list[Action]) -> None:
        for action in actions:
            call = self._calls.get(request_id)
            if call is None:
                # A send that failed on the way here has settled the last open member.
                return
            if isinstance(action, Finish):
                self._finish(request_id, action)
            elif self._transport.send(action.device, self._request(request_id, call, action)):
                self._roster.sent(request_id, action, self._clock(), call.session.decide_s)
            else:
                there = action.device in self._transport.connected
                reason = BACKLOGGED if there else self._absence(action.device)
                failed = Failed(device=action.device, reason=reason, now_s=self._clock())
                self._feed(request_id, failed)

    def _request(self, request_id: int, call: _Call, send: Send) -> list[Buffer]:
        asked = call.asked
        if isinstance(asked, Glance):
            look = FrameRequest(
                request_id=request_id,
                digest=self._digest,
                k=send.k,
                budget_ms=send.budget_ms,
                ago_ms=asked.ago_ms(self._clock()),
                within_ms=asked.within_ms,
            )
            return encode(look)
        view = asked[send.k]
        infer = Infer(
            request_id=request_id,
            digest=self._digest,
            k=send.k,
            budget_ms=send.budget_ms,
            image_size=view.image_size,
            encoding=view.encoding,
        )
        return encode(infer, view.pixels)

    def _finish(self, request_id: int, finish: Finish) -> None:
        call = self._calls.pop(request_id)
        if self._not_in_fleet:
            finish = replace(finish, missing={**finish.missing, **self._not_in_fleet})
        frames = None
        if isinstance(call.asked, Glance):
            frames = frames_of(call.sights, finish.arrived, self._clock())
        answer = self._judge.conclude(
            finish,
            latency_ms=lambda: (self._clock() - call.started_s) * 1e3,
            deadline_ms=call.deadline_ms,
            frames=frames,
        )
        call.done(answer)
