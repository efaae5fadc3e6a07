"""Promises that hold whatever happens: any history of calls, replies, faults and time.

A real exchange with its roster, sessions and fusion, over a transport and a clock that are plain
values. The client is driven as `Client` drives it: told of whatever comes, and of the time whenever
it wants to know it. What is checked is what a caller and the devices can see.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mdp.client.crops import Cutter, SentCrop
from mdp.client.dispatcher import Answer, Dispatcher
from mdp.client.dispatcher import Call as Future
from mdp.client.questions import PictureQuestion
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, probabilities
from mdp.protocol.messages import (
    Buffer,
    Failure,
    FailureCode,
    Infer,
    Result,
    State,
    Status,
    StatusRequest,
    decode,
    encode,
    logits_buffer,
)
from mdp.requests.deadline import Deadline, reserve_s
from mdp.requests.health import SETTLED_AFTER, TOLERATED_FAILURES
from mdp.requests.hedging import BURST
from mdp.requests.prediction import Prediction
from mdp.requests.reason import NOT_NEEDED
from mdp.testing.bundles import LABELS, colour_picture, subset_accuracy, write_bundle
from mdp.transport import Connected, Disconnected, Received
from tests.support.bundles import CASCADE_ACCURACY, with_cascade

#: `make invariants` plays the nightly number.
HISTORIES = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 2_000

FLEETS = (
    (("alpha", 0), ("beta", 1), ("gamma", 2)),
    (("alpha", 0), ("alpha/b", 0), ("beta", 1), ("gamma", 2), ("gamma/b", 2), ("gamma/c", 2)),
)
DEADLINES_MS = (20.0, 100.0, 100.0, 400.0)
STEPS_S = (0.0, 0.0005, 0.003, 0.003, 0.02, 0.11, 0.6, 4.0)
CODES: tuple[FailureCode, ...] = (
    "failed", "failed", "overloaded", "too_late", "not_ready", "draining", "wrong_bundle",
    "bad_message",
)  # fmt: skip
STATES: tuple[State, ...] = ("READY", "READY", "READY", "WARMING", "FAILED")
#: Answers in time that make up for one strike, and more.
TROUBLE = 4
#: Half of the first stage's answers are above it, more or less.
THRESHOLD = 0.9
TABLE = np.random.default_rng(5).normal(0, 3, (64, 2, len(LABELS))).astype(np.float32)
#: One history after another; what each byte means depends on those before it.
SCRIPTS = st.binary(min_size=20, max_size=140)


class KeptBundle(Bundle):
    """A bundle that reads its weights once."""

    @cache  # noqa: B019 - there is one of it
    def fusion_weights(self) -> FusionWeights:
        return super().fusion_weights()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = write_bundle(tmp_path_factory.mktemp("invariants") / "bundle")
    opened = Bundle.open(with_cascade(folder, THRESHOLD))
    return KeptBundle(opened.path, opened.manifest)


@cache
def views(path: Path) -> dict[int, SentCrop]:
    plan = Bundle.open(path).manifest.plan
    return Cutter({a.k: a for a in plan.assignments}).views(colour_picture("red"))


def logits_of(request_id: int, k: int) -> Contribution:
    """Answer of member `k` to a call, whichever replica runs it."""
    return Contribution(*TABLE[(7 * request_id + 11 * k) % len(TABLE)])


@dataclass
class Request:
    """One Infer as its device sees it."""

    device: str
    k: int
    request_id: int
    sent_s: float
    until_s: float
    #: Whether it was asked as its stage began, and there as a test beside another one.
    begun: bool
    on_probation: bool = False
    #: Whether a reply was sent, and whether that was in time.
    settled: bool = False
    counted: bool = False


@dataclass
class Call:
    """One call as its caller sees it."""

    request_id: int
    deadline_s: float
    decide_s: float
    #: Devices that were known to be silent as it began, and those that were not to be trusted.
    dead: frozenset[str]
    suspects: frozenset[str]
    troubled: frozenset[str]
    #: Those whose last answers all came too late, and took longer than this call can wait.
    late: frozenset[str]
    answers: list[Answer] = field(default_factory=list)
    ended_s: float = 0.0


class World:
    """Devices, links and the clock around one exchange; keeps the books and checks them."""

    def __init__(self, bundle: Bundle, entries: tuple[tuple[str, int], ...], options: int) -> None:
        self.bundle, self.ks = bundle, dict(entries)
        self.cascade, self.share = bool(options & 1), (0.05, 0.0, 0.3, 1.0)[options >> 1 & 3]
        self.now_s = 50.0
        self.connected, self.refused = set(self.ks), dict[str, str]()
        self.frozen, self.full = set[str](), set[str]()
        self.requests: list[Request] = []
        self.asked: list[tuple[str, int]] = []
        self.calls: dict[int, Call] = {}
        self.beginning = False
        #: Requests in a row that went by without a sign of life; who was taken out for that, or has
        #: come back, and has not answered in time since.
        self.silences = dict.fromkeys(self.ks, 0)
        self.suspects = set[str]()
        #: Answers in time until nothing is held against a device: each failure, silence, loss and
        #: question how it is adds more than it takes to forgive them.
        self.troubles = dict.fromkeys(self.ks, 0)
        #: Round trips of its answers, and whether each came too late for its call.
        self.trips: dict[str, list[tuple[float, bool]]] = {device: [] for device in self.ks}
        #: Those whose connection was lost while they owed an answer, until it is back.
        self.lost = set[str]()
        self.ordinary = self.hedges = 0
        self.dispatcher = Dispatcher(
            Fleet(
                bundle=str(bundle.path),
                devices=[
                    FleetEntry(device=device, address=f"tcp://127.0.0.1:{7000 + n}", k=k)
                    for n, (device, k) in enumerate(entries)
                ],
            ),
            bundle,
            self,
            clock=lambda: self.now_s,
            fusion="stacked",
            hedge_after_s=0.004 if options & 8 else None,
            hedge_share=self.share,
            cascade=self.cascade,
            chance=random.Random(options).random,
        )

    # What the exchange sees.

    def send(self, device: str, frames: list[Buffer]) -> bool:
        if device not in self.connected or device in self.full:
            return False
        message = decode(frames).message
        if isinstance(message, StatusRequest):
            self.asked.append((device, message.request_id))
            # Its silence, if that is what it meets, counts too.
            self.troubles[device] += TROUBLE
            return True
        assert isinstance(message, Infer)
        call = self.calls[message.request_id]
        beside = [
            r for r in self.requests
            if (r.request_id, r.k) == (message.request_id, message.k) and not r.settled
        ]  # fmt: skip
        assert not [r for r in beside if r.device == device], "asked twice for the same"
        assert 0 < message.budget_ms <= (call.decide_s - self.now_s) * 1e3 + 1e-6
        begun = [r for r in beside if r.begun]
        # A second stage begins in the middle of its call.
        later = self.cascade and message.k and all(r.sent_s == self.now_s for r in beside)
        beginning = self.beginning or bool(later)
        # Of two that were asked as the call began, the first is on probation and not waited for.
        tests = [r for r in begun if r.on_probation]
        hedged = len(beside) > len(tests) and not beginning
        self.hedges += hedged
        self.ordinary += not hedged
        for request in begun if beginning else ():
            request.on_probation = True
        self.requests.append(
            Request(device, message.k, message.request_id, self.now_s, call.decide_s, beginning)
        )
        assert self.hedges <= BURST + self.share * self.ordinary + 1e-6, "hedges over the budget"
        assert self.share or not self.hedges
        return True

    # What may happen.

    def submit(self, deadline_ms: float) -> None:
        self.expire()
        request_id = self.dispatcher._book._last_number + 1
        deadline_s = self.now_s + deadline_ms / 1e3
        decide_s = deadline_s - reserve_s(deadline_ms)
        dead = frozenset(d for d in self.ks if self.silences[d] >= TOLERATED_FAILURES)
        budget_s = decide_s - self.now_s
        doubtful = {d for d in self.ks if self.is_doubtful(d, budget_s)}
        call = Call(
            request_id,
            deadline_s,
            decide_s,
            dead,
            frozenset(self.suspects),
            frozenset(self.suspects | {d for d, owed in self.troubles.items() if owed} | doubtful),
            frozenset(d for d in self.ks if self.is_late(d, budget_s)),
        )
        self.calls[request_id] = call
        if call.late:
            event("somebody is late all the time")

        def done(ended: Future) -> None:
            assert ended.answer is not None
            call.answers.append(ended.answer)
            call.ended_s = self.now_s
            self.check(call)

        self.beginning = True
        question = PictureQuestion(views(self.bundle.path))
        self.dispatcher.submit(question, Deadline(self.now_s, deadline_ms), done)
        self.beginning = False
        self.check_whom_it_asked(request_id)

    def check_whom_it_asked(self, request_id: int) -> None:
        """A device that is known to be silent is asked only where nobody else is."""
        asked = {r.device for r in self.requests if r.request_id == request_id}
        call = self.calls[request_id]
        dead, others = asked & call.dead, asked - call.troubled
        assert not dead or not others, f"asked {dead}, known to be silent, beside {others}"

    def is_late(self, device: str, budget_s: float) -> bool:
        """Tell whether its last answers were late, and would be for a call with so much time."""
        last = self.trips[device][-TOLERATED_FAILURES:]
        return len(last) == TOLERATED_FAILURES and all(
            late and trip_s > budget_s for trip_s, late in last
        )

    def is_doubtful(self, device: str, budget_s: float) -> bool:
        """Tell whether any of its last answers would be too late for a call with so much time."""
        return any(trip_s > budget_s for trip_s, _ in self.trips[device][-SETTLED_AFTER:])

    def open_requests(self) -> list[Request]:
        return [
            r for r in self.requests
            if not r.settled and r.device in self.connected and r.device not in self.frozen
        ]  # fmt: skip

    def reply(self, request: Request, kind: int) -> None:
        # What is late with its answer is not silent.
        request.settled = True
        self.expire()
        ended = bool(self.calls[request.request_id].answers)
        self.alive(request.device)
        if kind < 2:
            self.troubles[request.device] += TROUBLE
        elif self.now_s <= request.until_s:
            self.suspects.discard(request.device)
            self.troubles[request.device] = max(0, self.troubles[request.device] - 1)
        code = CODES[(request.request_id + request.k) % len(CODES)]
        late = self.now_s > request.until_s
        # To have no time and say so after the deadline is no better than to answer then.
        if kind == 2 or (kind == 0 and late and code in ("overloaded", "too_late")):
            self.trips[request.device].append((self.now_s - request.sent_s, late))
        if kind == 0:
            self.deliver(
                request, encode(Failure(request_id=request.request_id, code=code, text="x"))
            )
        else:
            self.deliver(request, self.result(request, bad=kind == 1))
        if ended:
            event("a reply after the answer")

    def deliver(self, request: Request, frames: list[Buffer]) -> None:
        """Deliver a reply; to a call that has ended it has to change nothing."""
        call = self.calls[request.request_id]
        before = (len(self.requests), list(call.answers))
        late = bool(call.answers)
        counted = sum(self.dispatcher.counters.values())
        self.dispatcher.handle([Received(request.device, frames)])
        if late:
            assert (len(self.requests), call.answers) == before, "a late reply changed something"
            assert sum(self.dispatcher.counters.values()) == counted + 1

    def again(self, request: Request) -> None:
        """A reply comes a second time."""
        self.expire()
        self.alive(request.device)
        waiting = len(self.requests), [len(call.answers) for call in self.calls.values()]
        counted = sum(self.dispatcher.counters.values())
        self.dispatcher.handle([Received(request.device, self.result(request))])
        assert waiting == (
            len(self.requests),
            [len(call.answers) for call in self.calls.values()],
        ), "a duplicate changed something"
        assert sum(self.dispatcher.counters.values()) == counted + 1

    def result(self, request: Request, bad: bool = False) -> list[Buffer]:
        said = logits_of(request.request_id, request.k)
        if bad:
            said = Contribution(said.bag * np.float32(np.nan), said.bag)
        message = Result(
            request_id=request.request_id, num_classes=len(LABELS), queue_ms=0.1, compute_ms=0.2
        )
        return encode(message, logits_buffer(said))

    def tell(self, device: str, request_id: int, state: State) -> None:
        self.expire()
        self.alive(device)
        if state != "READY":
            self.troubles[device] += TROUBLE
        status = Status(
            request_id=request_id, device=device, state=state, bundle="colours",
            digest=self.bundle.digest, k=self.ks[device], provider="", fallback=False, reason="",
            queued=0, counts={},
        )  # fmt: skip
        self.dispatcher.handle([Received(device, encode(status))])

    def toggle(self, device: str) -> None:
        self.expire()
        if device in self.connected:
            self.connected.remove(device)
            for request in self.requests:
                if request.device == device and not request.settled:
                    request.settled = True
                    if request.until_s > self.now_s:
                        self.lost.add(device)
            self.asked = [asked for asked in self.asked if asked[0] != device]
            self.dispatcher.handle([Disconnected(device)])
        else:
            self.connected.add(device)
            self.alive(device)
            self.troubles[device] += TROUBLE
            self.suspects |= self.lost & {device}
            self.lost.discard(device)
            self.dispatcher.handle([Connected(device)])

    def pass_s(self, seconds: float) -> None:
        """The clock goes on; the exchange is told whenever it wants to know."""
        until_s = self.now_s + seconds
        while (wake_s := self.dispatcher.next_wake_s()) <= until_s:
            self.now_s = max(self.now_s, wake_s)
            self.dispatcher.tick()
            assert self.dispatcher.next_wake_s() > self.now_s, "woken in vain"
        self.now_s = until_s

    # The books.

    def alive(self, device: str) -> None:
        self.silences[device] = 0

    def expire(self) -> None:
        """Requests that have gone unanswered until the end of their calls."""
        for request in self.requests:
            if not request.settled and not request.counted and request.until_s <= self.now_s:
                request.counted = True
                self.silences[request.device] += 1
                self.troubles[request.device] += TROUBLE
                if self.silences[request.device] >= TOLERATED_FAILURES:
                    self.suspects.add(request.device)

    def check(self, call: Call) -> None:
        """One answer, in time, that says what it is made of."""
        assert len(call.answers) == 1, "more than one outcome"
        assert call.ended_s <= call.deadline_s, "after the deadline"
        (answer,) = call.answers
        if not isinstance(answer, Prediction):
            assert answer.outcomes.keys() <= self.ks.keys()
            assert {self.ks[d] for d in answer.outcomes} == {0, 1, 2}
            return
        used = tuple(self.ks[device] for device in answer.used)
        assert list(used) == sorted(set(used)), "one device a member, in order"
        lacking = {0, 1, 2} - set(used)
        assert {self.ks[device] for device in answer.missing} == lacking, "who is missing"
        assert all(answer.missing.values())
        assert answer.partial == bool(lacking)
        assert answer.mode == ("single" if len(used) == 1 else "stacked")
        for device, k in zip(answer.used, used, strict=True):
            assert any(
                (r.device, r.k, r.request_id, r.settled) == (device, k, call.request_id, True)
                for r in self.requests
            ), "nobody has said that"
        self.check_worth(call, answer, used)
        self.check_waiting(call, answer)

    def check_worth(self, call: Call, answer: Prediction, used: tuple[int, ...]) -> None:
        """The label is that of the members used; others are left out only by a sure first stage."""
        parts = {k: logits_of(call.request_id, k) for k in (0, 1, 2)}
        weights = self.bundle.fusion_weights()
        own = weights.weights_of(used)
        assert own is not None
        assert answer.label == LABELS[int(fuse(parts, own).argmax())]
        unneeded = {self.ks[d] for d, reason in answer.missing.items() if reason == str(NOT_NEEDED)}
        assert answer.stage == "all" or self.cascade
        event(f"stage {answer.stage}")
        if answer.stage == "first":
            assert used == (0,)
            assert probabilities(fuse(parts, own)).max() > THRESHOLD
            assert answer.expected_accuracy == CASCADE_ACCURACY.stacked
        else:
            assert not unneeded
            assert answer.expected_accuracy == subset_accuracy(used).stacked

    def check_waiting(self, call: Call, answer: Prediction) -> None:
        """Check that a call which waited until the end did so for a device that was worth it."""
        if call.ended_s < call.decide_s:
            return
        mine = [r for r in self.requests if r.request_id == call.request_id]
        awaited = {r.device for r in mine if not r.settled}
        event("waited until the end")
        assert not awaited or awaited - call.dead, f"waited for {awaited}, known to be silent"
        if {r.device for r in mine} - call.troubled:
            assert not awaited or awaited - call.suspects, f"waited for {awaited}, on probation"
            assert not awaited or awaited - call.late, f"waited for {awaited}, late all the time"


def play(world: World, script: bytes) -> None:
    """Play what happens, by the bytes of a script."""
    bytes_: Iterator[int] = iter(script)
    devices = list(world.ks)
    for byte in bytes_:
        what, number = byte % 16, next(bytes_, 0)
        device = devices[number % len(devices)]
        if what < 3:
            world.submit(DEADLINES_MS[number % 4])
        elif what < 8:
            waiting = world.open_requests()
            if waiting:
                # Mostly the newest call's, and mostly what they should be.
                request = waiting[-1 - number % min(len(waiting), 6)]
                world.reply(request, number >> 4 if number >> 4 < 2 else 2)
        elif what < 11:
            world.pass_s(STEPS_S[number % len(STEPS_S)])
        elif what == 11:
            world.toggle(device)
        elif what == 12:
            world.frozen ^= {device}
        elif what == 13:
            # One that was refused for want of room is asked again.
            again = {(r.request_id, r.device) for r in world.requests if not r.settled}
            there = [r for r in world.requests if r.device in world.connected]
            settled = [r for r in there if r.settled and (r.request_id, r.device) not in again]
            if settled:
                world.again(settled[number % len(settled)])
        elif what == 14:
            awake = [a for a in world.asked if a[0] not in world.frozen]
            if awake:
                world.asked.remove(awake[0])
                world.tell(*awake[0], STATES[number % len(STATES)])
        else:
            world.full ^= {device}


@settings(max_examples=HISTORIES, deadline=None)
@given(fleet=st.sampled_from(FLEETS), options=st.integers(0, 15), script=SCRIPTS)
def test_any_history(
    bundle: Bundle, fleet: tuple[tuple[str, int], ...], options: int, script: bytes
) -> None:
    finish(World(bundle, fleet, options), script)


@settings(max_examples=HISTORIES // 4, deadline=None)
@given(
    fleet=st.sampled_from(FLEETS),
    options=st.integers(0, 15),
    script=SCRIPTS,
    rounds=st.integers(TOLERATED_FAILURES, 2 * TOLERATED_FAILURES),
    which=st.integers(0, 5),
)
def test_any_history_of_one_that_is_always_late_at_first(
    bundle: Bundle,
    fleet: tuple[tuple[str, int], ...],
    options: int,
    script: bytes,
    rounds: int,
    which: int,
) -> None:
    world = World(bundle, fleet, options)
    late = fleet[which % len(fleet)][0]
    for _ in range(rounds):
        world.submit(100.0)
        for request in world.open_requests():
            if request.device != late:
                world.reply(request, 2)
        world.pass_s(0.11)
        for request in world.open_requests():
            world.reply(request, 2)
    finish(world, script)


def finish(world: World, script: bytes) -> None:
    """Play `script` and let all time pass: every call has ended, once."""
    play(world, script)
    world.pass_s(1.0)
    assert world.dispatcher.next_wake_s() == float("inf")
    for call in world.calls.values():
        assert len(call.answers) == 1, "exactly one outcome"
    if any(isinstance(call.answers[0], Prediction) for call in world.calls.values()):
        event("answered")
    if world.hedges:
        event("hedged")
