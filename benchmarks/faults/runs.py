"""One fault against one kind of fleet: calls during which a device fails and heals."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

from benchmarks.faults.calling_client import ProcessCaller, time_call
from benchmarks.faults.promises import (
    Checks,
    Kind,
    ObservedCall,
    Phase,
    find_broken,
    find_broken_together,
    matches,
)
from benchmarks.faults.scene import PICTURES, Scene, picture
from benchmarks.faults.table import Fault
from mdp.client.sync import Client
from mdp.errors import InferenceError, InsecureWarning
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import rule_for
from mdp.requests.prediction import Prediction
from mdp.testing.processes import PATIENCE_S

#: Picture number, deadline in ms -> the answer or error, and the milliseconds it took.
Caller = Callable[[int, float], tuple[Prediction | InferenceError, float]]
#: Complete answers in a row after which a device counts as back: more than probation takes.
SETTLED = 9
#: Deadline of the observer's requests.
LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times and limits of one run."""

    deadline_ms: float = 400.0
    #: Seconds between two calls.
    between_s: float = 0.02
    #: Whether faults last their time, or only their calls.
    whole: bool = True
    #: The longest that a call may outlast its deadline.
    grace_ms: float = 20.0


@dataclass(slots=True)
class Run:
    """One cell of the matrix."""

    calls: list[ObservedCall] = field(default_factory=list)
    #: Every broken promise, in words.
    broken: list[str] = field(default_factory=list)
    #: From the fault to the first answer with a known reason; None where none is promised.
    known_s: float | None = None
    #: From the healing until the device answers again.
    back_s: float | None = None

    def of(self, *phases: Phase) -> list[ObservedCall]:
        """The calls of these phases."""
        return [call for call in self.calls if call.phase in phases]


class _Observer:
    """A client of the faulty device alone, which finds whether that answers others too.

    The client under test would learn from a status request that the device is healthy.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene, self._stack = scene, ExitStack()
        self._client: Client | None = None
        self._asked = 0
        #: The least count of answers to others; a restart resets it.
        self._least = math.inf

    def saw_an_answer(self) -> bool:
        """Tell whether the device is usable and has answered others since the first request."""
        if self._client is None:
            fleet = self._scene.fleet_file(alone=True)
            self._client = self._stack.enter_context(Client.connect(fleet, timeout_s=LOOK_S))
        self._asked += 1
        answer, _ = time_call(self._client, 0, LOOK_S * 1e3)
        if isinstance(answer, InferenceError):
            # Whether the device counted this request is unknown.
            self._least = math.inf
            return False
        for status in self._client.status(timeout_s=LOOK_S):
            if status.device == self._scene.faulty and status.usable:
                before, others = self._least, status.counts["answered"] - self._asked
                self._least = min(before, others)
                return others > before
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Runner:
    def __init__(self, scene: Scene, fault: Fault, kind: Kind, call: Caller, pace: Pace) -> None:
        self.run = Run()
        self._scene, self._fault, self._call, self._pace = scene, fault, call, pace
        self._promise = fault.instead.get(kind, fault.promise)
        self._checks = Checks(
            kind=kind, expected_accuracy=_expectation(scene), grace_ms=pace.grace_ms
        )

    def all(self) -> Run:
        """Call before, during and after the fault; broken promises are in the run's `broken`."""
        self._until_whole("finding")
        for _ in range(6):
            self._one("before")
        made_s = self._meanwhile("turning", self._fault.make)
        try:
            self._under_the_fault(made_s)
            self._note(self._fault.proof(self._scene))
        finally:
            healed_s = self._meanwhile("healing", self._fault.heal)
        self.run.back_s = self._until_whole("healing") - healed_s
        for _ in range(6):
            self._one("after")
        self._note(*find_broken_together(self.run.calls, self._promise, self._checks))
        return self.run

    def _note(self, *wrong: str) -> None:
        for text in wrong:
            if text and text not in self.run.broken:
                self.run.broken.append(text)

    def _one(self, phase: Phase) -> ObservedCall:
        number = len(self.run.calls) % PICTURES
        outcome, elapsed_ms = self._call(number, self._pace.deadline_ms)
        call = ObservedCall(
            phase=phase, picture=number, label=picture(number)[1], elapsed_ms=elapsed_ms,
            deadline_ms=self._pace.deadline_ms, outcome=outcome,
        )  # fmt: skip
        self.run.calls.append(call)
        self._note(*(f"{phase}: {text}" for text in find_broken(call, self._promise, self._checks)))
        time.sleep(self._pace.between_s)
        return call

    def _meanwhile(self, phase: Phase, change: Callable[[Scene], None]) -> float:
        """Call while the fault is made or healed; returns the start or the end of that."""
        started_s = time.monotonic()
        with ThreadPoolExecutor(1) as worker:
            changing = worker.submit(change, self._scene)
            while not changing.done():
                self._one(phase)
            changing.result()
        return time.monotonic() if phase == "healing" else started_s

    def _under_the_fault(self, made_s: float) -> None:
        faulty, known, promise = self._scene.faulty, False, self._promise
        until_s = time.monotonic() + (self._fault.lasts_s if self._pace.whole else 0.0)
        give_up_s = time.monotonic() + PATIENCE_S
        made = 0
        while made < self._fault.calls or time.monotonic() < until_s:
            call = self._one("faulty")
            reason = call.missing.get(faulty)
            if not known and reason is not None and matches(promise.known, reason):
                known, self.run.known_s = True, time.monotonic() - made_s
            # Calls count from the known reason on; with a replica there is none.
            hidden = not promise.known or self._scene.setting.replica is not None
            made += known or hidden
            if time.monotonic() > give_up_s:
                self._note(f"{faulty} was never known to have failed")
                return

    def _until_whole(self, phase: Phase) -> float:
        """Call until answers stay complete with the faulty device at work; returns since when.

        A replica completes answers too, and may win every hedge; then the observer decides.
        """
        setting, give_up_s = self._scene.setting, time.monotonic() + PATIENCE_S
        whole, back_s = 0, math.inf
        with _Observer(self._scene) as observer:
            while whole < SETTLED or back_s == math.inf:
                used = self._one(phase).used
                complete = len(used) == len(setting.members)
                whole, back_s = (whole + 1, back_s) if complete else (0, math.inf)
                at_work = setting.faulty in used
                if complete and not at_work and back_s == math.inf:
                    at_work = observer.saw_an_answer()
                if complete and at_work:
                    back_s = min(back_s, time.monotonic())
                if time.monotonic() > give_up_s:
                    self._note(f"{setting.faulty} was not taken back in {PATIENCE_S:.0f} s")
                    break
        return back_s


def _expectation(scene: Scene) -> Callable[[tuple[str, ...]], float | None]:
    bundle = Bundle.open(scene.bundle)
    weights = bundle.fusion_weights()
    order = scene.setting.members

    def expected(used: tuple[str, ...]) -> float | None:
        members = tuple(order.index(device.partition("/")[0]) for device in used)
        return bundle.expected_accuracy(members, rule_for(members, scene.setting.fusion, weights))

    return expected


@contextmanager
def caller(scene: Scene) -> Iterator[Caller]:
    """A client of the scene's fleet, in a process of its own where its clock jumps."""
    fleet, fusion, named = scene.fleet_file(), scene.setting.fusion, scene.where == "name"
    if scene.where == "clock":
        with ProcessCaller(fleet, fusion, scene.environment) as process:
            yield process.call
            process.finish()
        return
    with warnings.catch_warnings():
        # A host name may be this machine's or not.
        warnings.simplefilter("ignore", InsecureWarning)
        client = Client.connect(fleet, fusion=fusion, timeout_s=PATIENCE_S, insecure=named)

    def call(number: int, deadline_ms: float) -> tuple[Prediction | InferenceError, float]:
        with scene.idle:
            return time_call(client, number, deadline_ms)

    try:
        yield call
    finally:
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive(), "close() does not return"


def run_cell(scene: Scene, fault: Fault, kind: Kind, pace: Pace) -> Run:
    """Make `fault` in `scene` and heal it during calls."""
    scene.where = fault.where
    fault.before(scene)
    with caller(scene) as call:
        run = _Runner(scene, fault, kind, call, pace).all()
    fault.after(scene)
    return run
