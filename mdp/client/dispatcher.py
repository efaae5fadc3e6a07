"""Requests in flight over one transport: questions in, futures out.

Single-threaded and never waiting: a client decides how to wait, in its own thread or in an event
loop, and hands in what the transport reported and what the clock says.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from mdp.client.questions import Question
from mdp.client.status import unfit
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
    code_and_text,
    contribution_of,
    decode,
    encode,
)
from mdp.requests.choice import Choice
from mdp.requests.deadline import Deadline
from mdp.requests.hedging import DEFAULT_SHARE
from mdp.requests.in_flight import InFlight
from mdp.requests.prediction import AnswerBuilder, Prediction
from mdp.requests.reason import (
    BACKLOGGED,
    LEFT_OUT,
    NOT_IN_FLEET,
    PROBATION,
    SUSPECT,
    UNREACHABLE,
    Reason,
    Suspicion,
)
from mdp.requests.replicas import Chance
from mdp.requests.request import Request
from mdp.requests.session import Action, DeviceFailed, Finish, Replied, Session, Stages, TimePassed
from mdp.requests.stuck_output import CONSTANT, StuckOutputDetector
from mdp.tracing import CallTrace, begin_call
from mdp.transport import Connected, Disconnected, Received, TransportEvent

#: Says at INFO which devices come, go and are not waited for, where the application has a handler.
LOG = logging.getLogger("mdp")
LOG.addHandler(logging.NullHandler())

Clock = Callable[[], float]
Answer = Prediction | InferenceError
#: What becomes of a picture.
Outcome = Answer | PictureError


class Transport(Protocol):
    """The methods that a dispatcher needs of `mdp.transport.Dealers`."""

    connected: set[str]
    #: Devices that are there, but not for this client, with the reason.
    refused: dict[str, str]

    def send(self, device: str, frames: list[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if that cannot be done now."""


class Call(Struct, eq=False):
    """The future of one answer."""

    question: Question
    deadline: Deadline
    session: Session
    #: Called once there is an answer.
    done: Callable[["Call"], None] | None = None
    answer: Answer | None = None
    trace: CallTrace | None = None
    #: In the book.
    number: int = 0

    def result(self) -> Prediction:
        """The prediction, once there is an answer; raises the InferenceError in its place."""
        if isinstance(self.answer, Prediction):
            return self.answer
        assert self.answer is not None, "no answer yet"
        raise self.answer


class Dispatcher:
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
        opinions: bool = False,
        chance: Chance = random.random,
    ) -> None:
        """Calls to `fleet`, which serves `bundle`; `InFlight` says what the hedges mean.

        With `cascade`, which `bundle` has to have, members are asked in two stages.
        """
        members = fleet.members()
        plan, stages = bundle.manifest.plan, bundle.manifest.cascade
        self.assignments = {a.k: a for a in plan.assignments if a.k in members}
        #: Replies that came after their answer, twice, or not as a message of this protocol.
        self.counters: Counter[str] = Counter(late=0, duplicate=0, malformed=0)
        self.statuses: dict[str, Status] = {}
        self._not_in_fleet = {
            a.device: NOT_IN_FLEET for a in plan.assignments if a.k not in members
        }
        self._bundle, self._digest = bundle, bundle.digest
        self._num_classes = len(bundle.manifest.labels)
        self._builder = AnswerBuilder(
            bundle,
            fusion,
            opinions=opinions,
            max_spread_ms=fleet.max_spread_ms,
            reject=fleet.reject,
        )
        #: Device -> why the latest look suspects its camera.
        self.suspects: Mapping[str, Suspicion] = {}
        #: Members that are asked before the others; empty: all at once.
        first = frozenset(stages.first if cascade and stages is not None else ())
        self._first = first if first <= members.keys() else frozenset()
        self._transport = transport
        self._clock = clock
        self._k_of = {entry.device: entry.k for entry in fleet.devices}
        self._book: InFlight[Call] = InFlight(
            members,
            self._k_of,
            chance=chance,
            hedge_after_s=hedge_after_s,
            hedge_share=hedge_share,
            first=self._first,
            batches={k: assignment.batch for k, assignment in self.assignments.items()},
            rungs={
                k: (one.predicted_ms.compute, *(rung.compute_ms for rung in one.lower))
                for k, one in self.assignments.items()
                if one.lower
            },
        )
        #: No call has to be told the time before.
        self._wake_s = math.inf
        self._stuck = {entry.device: StuckOutputDetector() for entry in fleet.devices}
        #: Devices that the last call did not wait for.
        self._excluded: frozenset[str] = frozenset()
        #: Devices that calls do not ask, as the client wants it.
        self.left_out: frozenset[str] = frozenset()

    @property
    def disagreeing(self) -> frozenset[str]:
        """Devices whose cameras this client's own looks suspect, whatever agents say of them."""
        return self._builder.disagreeing

    @property
    def busy(self) -> bool:
        """Tell whether any call is in flight."""
        return bool(self._book.calls)

    def submit(
        self, question: Question, deadline: Deadline, done: Callable[[Call], None] | None = None
    ) -> Call:
        """Begin a call; `done` is called when there is its answer, perhaps before this returns."""
        now_s, decide_s = self._clock(), deadline.decide_s
        choice = self._book.choose(now_s, self._absences(), decide_s)
        if choice.unavailable or choice.probing or self._excluded:
            self._log_excluded(choice)
        stages = None
        if self._first:
            by_s = self._book.others_by_s(choice, now_s, decide_s)
            stages = Stages(self._first, by_s, self._builder.is_sure)
        session = Session(choice, decide_s=decide_s, hedge=self._book.hedge, stages=stages)
        call = Call(question, deadline, session, done, trace=begin_call(deadline.ms))
        call.number = self._book.begin(call)
        self._act(call.number, session.start(now_s))
        if self._book.held:
            self._give_turns()
        for device in self._book.due(now_s):
            if (number := self.ask(device)) is not None:
                self._book.on_status_request(number, device, now_s)
        return call

    def abandon(self, call: Call) -> None:
        """Ask nobody any more for a call whose caller has gone; its `done` is not called."""
        if call.answer is not None or call.number not in self._book.calls:
            return
        self._book.on_decision(call.number, self._clock())
        if not self._book.calls:
            self._wake_s = math.inf
        if call.trace is not None:
            call.trace.end({}, "cancelled")
        self._give_turns()

    def _log_excluded(self, choice: Choice) -> None:
        """Log which devices are not waited for any more, and which are again."""
        out = choice.unavailable.keys() | choice.probing.keys()
        for device in out - self._excluded:
            LOG.info("%s: not waited for: %s", device, choice.unavailable.get(device, PROBATION))
        for device in self._excluded - out:
            LOG.info("%s: waited for again", device)
        self._excluded = frozenset(out)

    def ask(self, device: str) -> int | None:
        """Ask for a status, which will appear in `statuses`; None if `device` is not connected."""
        if device not in self._transport.connected:
            return None
        number = self._book.number()
        return (
            number
            if self._transport.send(device, encode(StatusRequest(request_id=number)))
            else None
        )

    def handle(self, events: list[TransportEvent]) -> None:
        """Take in what the transport reported."""
        for event in events:
            match event:
                case Received():
                    self._receive(event.device, event.frames)
                case Connected(device):
                    LOG.info("%s: connected", device)
                    self._book.on_connect(device, self._clock())
                case Disconnected(device):
                    LOG.info("%s: disconnected", device)
                    self._act_on(self._book.on_loss(device, self._clock()))
        if self._book.held:
            self._give_turns()

    def tick(self) -> None:
        """Let every call know the time."""
        now_s, calls = self._clock(), self._book.calls
        if now_s >= self._wake_s:
            for number, call in list(calls.items()):
                if call.session.wake_s <= now_s and call.answer is None:
                    self._act(number, call.session.handle(TimePassed(now_s=now_s)))
            self._wake_s = min([call.session.wake_s for call in calls.values()], default=math.inf)
        if self._book.held:
            self._give_turns()

    def next_wake_s(self) -> float:
        """Latest moment at which to call `tick`, or a sooner one; infinity with nothing in flight.

        It may be that of a call that has ended since.
        """
        return min(self._wake_s, self._book.wake_s()) if self._book.held else self._wake_s

    def _give_turns(self) -> None:
        """Send what has waited for its turn, or fail it."""
        while turn := self._book.next_turn(self._clock()):
            call = self._book.calls[turn.number]
            device = turn.request.device
            if not call.session.waits_for(device):
                continue
            if turn.reason is None:
                self._send(turn.number, call, turn.request)
            else:
                failed = DeviceFailed(device=device, reason=turn.reason, now_s=self._clock())
                self._act(turn.number, call.session.handle(failed))

    def _absences(self) -> dict[str, Reason]:
        """Device -> reason, for those left out or without a connection."""
        connected = self._transport.connected
        if len(connected) == len(self._k_of) and not self.left_out:
            return {}
        gone = {device: self._absence(device) for device in self._k_of if device not in connected}
        return gone | dict.fromkeys(self.left_out & self._k_of.keys(), LEFT_OUT)

    def _absence(self, device: str) -> Reason:
        refused = self._transport.refused.get(device)
        return UNREACHABLE if refused is None else Reason("refused", refused)

    def _receive(self, device: str, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self.counters["malformed"] += 1
            self._give_up_on(device, Reason("bad_message", str(error)))
            return
        match message := envelope.message:
            case Result() | FrameReply():
                self._settle(message.request_id, self._reply(device, message, envelope.buffers[0]))
            case Failure():
                reason = Reason(*code_and_text(message))
                if message.request_id == 0:
                    self._give_up_on(device, reason)
                else:
                    failed = DeviceFailed(device=device, reason=reason, now_s=self._clock())
                    self._settle(message.request_id, failed)
            case Status():
                self.statuses[device] = message
                self._book.on_status(
                    message.request_id,
                    device,
                    unfit(message, self._bundle, self._k_of[device]),
                    self._clock(),
                )
            case Infer() | StatusRequest() | FrameRequest():
                self.counters["malformed"] += 1

    def _reply(
        self, device: str, message: Result | FrameReply, logits: Buffer
    ) -> Replied | DeviceFailed:
        """The event that a reply means; one that can be no answer to its call is a failure."""
        now_s = self._clock()
        try:
            contribution = self._contribution(device, message, logits, now_s)
        except WireError as error:
            return DeviceFailed(device=device, reason=Reason("bad_output", str(error)), now_s=now_s)
        return Replied(
            device=device,
            contribution=contribution,
            queue_ms=message.queue_ms,
            compute_ms=message.compute_ms,
            now_s=now_s,
            rung=message.rung,
        )

    def _contribution(
        self, device: str, message: Result | FrameReply, logits: Buffer, now_s: float
    ) -> Contribution:
        if message.num_classes != self._num_classes:
            raise WireError(f"expected {self._num_classes} classes, got {message.num_classes}")
        cells = message.anomaly_map if isinstance(message, FrameReply) else b""
        contribution = contribution_of(logits, self._num_classes, message.anomaly, cells)
        if self._builder.inspects and message.anomaly is None:
            raise WireError("expected an anomaly score beside the logits, got none")
        if len(contribution.heads) < self._builder.heads:
            raise WireError(f"expected logits of {self._builder.heads} heads, got those of 1")
        call = self._book.calls.get(message.request_id)
        if call is not None:
            crop = call.question.accept(device, self._k_of[device], message, now_s)
            if crop is not None and self._stuck[device].is_constant(logits, crop):
                raise WireError(CONSTANT)
        return self._builder.scale_rung(self._k_of[device], message.rung, contribution)

    def _settle(self, number: int, event: Replied | DeviceFailed) -> None:
        """Take in the end of a request; a reply that no call waits for is counted."""
        call = self._book.calls.get(number)
        if call is not None and call.trace is not None:
            call.trace.end_request(
                event.device, str(event.reason) if isinstance(event, DeviceFailed) else ""
            )
        actions = self._book.handle(number, event)
        if actions is None:
            self.counters["late" if call is None else "duplicate"] += 1
        else:
            self._act(number, actions)

    def _give_up_on(self, device: str, reason: Reason) -> None:
        """Whatever `device` was asked, its answer would not be recognised."""
        self._act_on(self._book.on_loss(device, self._clock(), reason))

    def _act_on(self, todo: Sequence[tuple[int, list[Action]]]) -> None:
        for number, actions in todo:
            self._act(number, actions)

    def _act(self, number: int, actions: list[Action]) -> None:
        known = self._book.calls.get(number)
        if known is not None and known.session.wake_s < self._wake_s:
            self._wake_s = known.session.wake_s
        for action in actions:
            call = self._book.calls.get(number)
            if call is None:
                # A send that failed on the way here has settled the last open member.
                return
            if isinstance(action, Finish):
                self._finish(number, call, action)
                return
            if not self._book.holds(number, action):
                self._send(number, call, action)

    def _send(self, number: int, call: Call, request: Request) -> None:
        device, now_s = request.device, self._clock()
        traceparent = "" if call.trace is None else call.trace.begin_request(device, request.k)
        message = call.question.message(number, self._digest, request, now_s, traceparent)
        if self._transport.send(device, message):
            self._book.on_send(number, request)
            return
        there = device in self._transport.connected
        reason = BACKLOGGED if there else self._absence(device)
        failed = DeviceFailed(device=device, reason=reason, now_s=now_s)
        if call.trace is not None:
            call.trace.end_request(device, str(reason))
        self._act(number, call.session.handle(failed))

    def _finish(self, number: int, call: Call, finish: Finish) -> None:
        self._book.on_decision(number, self._clock())
        if not self._book.calls:
            self._wake_s = math.inf
        if self._not_in_fleet:
            finish = replace(finish, missing={**finish.missing, **self._not_in_fleet})
        frames = call.question.frames(finish.arrived, self._clock())
        answer = self._builder.build(finish, call.deadline.ms, frames)
        if isinstance(answer, Prediction):
            if frames is not None:
                self._suspect(answer.suspects)
            # Fusing counts.
            latency_ms = (self._clock() - call.deadline.started_s) * 1e3
            answer = replace(answer, latency_ms=latency_ms)
        call.answer = answer
        if call.trace is not None:
            _end_trace(call.trace, answer)
        if call.done is not None:
            call.done(call)

    def _suspect(self, suspects: Mapping[str, Suspicion]) -> None:
        """Keep the latest look's suspects, and log a change."""
        for device, why in suspects.items():
            if self.suspects.get(device) != why:
                LOG.info("%s: %s", device, SUSPECT[why])
        for device in self.suspects.keys() - suspects.keys():
            LOG.info("%s: its camera is no longer suspected", device)
        self.suspects = suspects


def _end_trace(trace: CallTrace, answer: Answer) -> None:
    if isinstance(answer, Prediction):
        told = {"mdp.mode": answer.mode, "mdp.used": answer.used, "mdp.missing": [*answer.missing]}
        trace.end(told)
    else:
        trace.end({"mdp.missing": [*answer.outcomes]}, str(answer))
