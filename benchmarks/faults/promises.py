"""Promises about every answer while one device has a fault, and their checks. Pure.

Five kinds of fleet answer the same pictures. The fault hits one device of it:

    boosted    three devices, boosted; the last one
    stacked    three devices, stacked; the middle one
    single     two devices; the first one, so that a single one is left
    replicas   three sub-models, the first one on two devices; one of these
    alone      one device; the only outcome is an error with the reason
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mdp.errors import DeadlineExceeded, InferenceError, QuorumNotMet
from mdp.fusion.fuse import Fusion
from mdp.requests.prediction import Prediction

Kind = Literal["boosted", "stacked", "single", "replicas", "alone"]
#: When a call is made: while the client connects, before the fault, while it is made, while it
#: lasts, while it is healed, and after the device has been taken back.
Phase = Literal["finding", "before", "turning", "faulty", "healing", "after"]
#: Whether an answer under the fault holds the faulty device's part.
Used = Literal["never", "perhaps", "always"]

#: The reason of a device with a half-open circuit breaker.
PROBATION = "on probation: asked, not waited for"
#: Reasons of a device whose agent is just being started again, or whose connection is.
STARTING = (
    "disconnected", "unreachable", PROBATION, r"unsteady: .+", r"draining: .+", r"not_ready: .+",
)  # fmt: skip
TRIO = ("alpha", "beta", "gamma")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One kind of fleet, and which of its devices has the fault."""

    members: tuple[str, ...]
    faulty: str
    fusion: Fusion = "stacked"
    #: A second device of the faulty one's sub-model.
    replica: str | None = None


SETTINGS: dict[Kind, Setting] = {
    "boosted": Setting(members=TRIO, faulty="gamma", fusion="boosted"),
    "stacked": Setting(members=TRIO, faulty="beta"),
    "single": Setting(members=TRIO[:2], faulty="alpha"),
    "replicas": Setting(members=TRIO, faulty="alpha", replica="alpha/attic"),
    "alone": Setting(members=TRIO[:1], faulty="alpha"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Promises about every call while the fault lasts."""

    #: Whether the faulty device's part may be in an answer.
    used: Used = "never"
    #: Patterns of the reasons that the device may be missing for.
    reasons: tuple[str, ...] = ()
    #: Patterns of those that mean that it is known: from the first of them on, every answer has one
    #: of them and none waits. Empty if the client cannot know.
    known: tuple[str, ...] = ()
    #: At most so many answers wait for the device until their deadline; None: every one may.
    waits: int | None = 0
    #: At most so many answers with the faulty device's part may have the wrong label.
    wrong_labels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """One call and its outcome."""

    phase: Phase
    picture: int
    #: The picture's true label.
    label: str
    deadline_ms: float
    elapsed_ms: float
    outcome: Prediction | InferenceError

    @property
    def overshoot_ms(self) -> float:
        """Milliseconds after its deadline; negative before it."""
        return self.elapsed_ms - self.deadline_ms

    @property
    def missing(self) -> Mapping[str, str]:
        """Device -> reason."""
        if isinstance(self.outcome, InferenceError):
            return self.outcome.outcomes
        return self.outcome.missing

    @property
    def used(self) -> tuple[str, ...]:
        """Devices in the answer."""
        return () if isinstance(self.outcome, InferenceError) else self.outcome.used

    @property
    def mislabelled(self) -> bool:
        """Tell whether an answer has the wrong label."""
        return isinstance(self.outcome, Prediction) and self.outcome.label != self.label

    @property
    def waited(self) -> bool:
        """Tell whether a device was waited for until the time to decide."""
        return isinstance(self.outcome, DeadlineExceeded) or "late" in self.missing.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Facts about a fleet that its answers are checked against."""

    kind: Kind
    #: Used devices -> the accuracy that the bundle states for them.
    expected_accuracy: Callable[[tuple[str, ...]], float | None]
    #: The longest that a call may outlast its deadline.
    grace_ms: float

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.kind]


def matches(patterns: Iterable[str], reason: str) -> bool:
    """Tell whether one of `patterns` matches all of `reason`."""
    return any(re.fullmatch(pattern, reason) for pattern in patterns)


def find_broken(call: ObservedCall, promise: Promise, checks: Checks) -> list[str]:
    """Each promise that one call breaks, in words."""
    wrong = []
    if call.overshoot_ms > checks.grace_ms:
        wrong.append(f"ended {call.overshoot_ms:.0f} ms after its deadline")
    if call.phase == "finding":
        return wrong
    if isinstance(call.outcome, InferenceError):
        return wrong + _check_error(call, promise, checks)
    return wrong + _check_answer(call, call.outcome, promise, checks)


def _check_error(call: ObservedCall, promise: Promise, checks: Checks) -> list[str]:
    error = call.outcome
    if checks.kind != "alone":
        return [f"{type(error).__name__} instead of an answer: {error}"]
    if call.phase in ("before", "after"):
        return [f"{type(error).__name__} of a healthy fleet: {error}"]
    if not isinstance(error, DeadlineExceeded | QuorumNotMet):
        return [f"{type(error).__name__} is none of the promised errors: {error}"]
    return _check_reasons(call, promise, checks)


def _check_answer(
    call: ObservedCall, answer: Prediction, promise: Promise, checks: Checks
) -> list[str]:
    setting, wrong = checks.setting, []
    there = [member for member in setting.members if _serves(member, answer.used)]
    lost = [member for member in setting.members if member not in {*there, setting.faulty}]
    if lost:
        reasons = {device: answer.missing.get(device) for device in lost}
        wrong.append(f"another device is not in the answer: {reasons}")
    if call.label != answer.label and not (promise.wrong_labels and setting.faulty in answer.used):
        wrong.append(f"label {answer.label}, expected {call.label}")
    mode = setting.fusion if len(answer.used) > 1 else "single"
    if answer.mode != mode:
        wrong.append(f"mode {answer.mode} from {', '.join(answer.used)}, expected {mode}")
    expected = checks.expected_accuracy(answer.used)
    if answer.expected_accuracy != expected:
        wrong.append(f"expected_accuracy {answer.expected_accuracy}, measured {expected}")
    whole = len(there) == len(setting.members)
    if whole and answer.missing:
        wrong.append(f"complete, but lists as missing: {answer.missing}")
    well = call.phase in ("before", "after")
    well = well or (promise.used == "always" and call.phase == "faulty")
    if not whole and (well or setting.replica is not None):
        wrong.append(f"incomplete: {answer.missing}")
    elif not whole:
        wrong += _check_reasons(call, promise, checks)
    if promise.used == "never" and call.phase == "faulty" and setting.faulty in answer.used:
        wrong.append(f"used {setting.faulty} while it cannot answer")
    return wrong


def _check_reasons(call: ObservedCall, promise: Promise, checks: Checks) -> list[str]:
    faulty, missing = checks.setting.faulty, call.missing
    if set(missing) != {faulty}:
        return [f"missing {dict(missing)}, expected just {faulty}"]
    starting = STARTING if call.phase == "healing" else ()
    if not matches((*promise.reasons, *starting), missing[faulty]):
        return [f"{faulty} is missing for {missing[faulty]!r}, which is not promised"]
    return []


def find_broken_together(
    calls: Sequence[ObservedCall], promise: Promise, checks: Checks
) -> list[str]:
    """Each promise that all calls of one fault break together, in words."""
    faulty = checks.setting.faulty
    under = [call for call in calls if call.phase in ("turning", "faulty")]
    wrong = []
    waits = sum(call.waited for call in under)
    if promise.waits is not None and waits > promise.waits:
        wrong.append(f"{waits} answers waited until their deadline, at most {promise.waits} may")
    mislabelled = sum(call.mislabelled for call in under)
    if mislabelled > promise.wrong_labels > 0:
        wrong.append(f"{mislabelled} wrong labels, at most {promise.wrong_labels} may be")
    known = False
    for call in under:
        reason = call.missing.get(faulty)
        known = known or (reason is not None and matches(promise.known, reason))
        if known and call.phase == "faulty" and call.waited:
            wrong.append(f"{faulty} was waited for although it was known: {reason}")
            break
    return wrong + _unsteady(calls, faulty)


def _unsteady(calls: Sequence[ObservedCall], faulty: str) -> list[str]:
    """Differing answers of one picture and the same healthy devices."""
    seen: dict[tuple[int, tuple[str, ...]], float] = {}
    for call in calls:
        hurt = call.phase not in ("before", "after") and faulty in call.used
        if isinstance(call.outcome, Prediction) and not hurt:
            # Which of two replicas has computed a part makes no difference.
            used = tuple(device.partition("/")[0] for device in call.used)
            first = seen.setdefault((call.picture, used), call.outcome.probability)
            if abs(first - call.outcome.probability) > 1e-5:
                return [f"picture {call.picture} had {first} and {call.outcome.probability}"]
    return []


def _serves(member: str, used: tuple[str, ...]) -> bool:
    return any(device.partition("/")[0] == member for device in used)


def summary(calls: Sequence[ObservedCall]) -> str:
    """Counts of outcomes and of reasons, in a line."""
    answers: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for call in calls:
        if isinstance(call.outcome, InferenceError):
            answers[type(call.outcome).__name__] += 1
        else:
            answers[f"{call.outcome.mode} from {', '.join(call.used)}"] += 1
        reasons.update(
            f"{device} {reason.partition(':')[0]}" for device, reason in call.missing.items()
        )
    came = "; ".join(f"{count} {what}" for what, count in answers.most_common())
    why = ", ".join(f"{count} {what}" for what, count in reasons.most_common())
    return f"{came} ({why})" if why else came
