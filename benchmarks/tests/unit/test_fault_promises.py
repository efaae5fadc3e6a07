"""The checks of the fault matrix find each broken promise."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from benchmarks.faults.calling_client import decode, encode
from benchmarks.faults.promises import (
    Checks,
    Kind,
    ObservedCall,
    Phase,
    Promise,
    find_broken,
    find_broken_together,
)
from mdp.errors import DeadlineExceeded, InferenceError, QuorumNotMet
from mdp.requests.prediction import Prediction

GONE = Promise(reasons=("unreachable",), known=("unreachable",))
SLOW = Promise(reasons=("late", "silent: .+"), known=("silent: .+",), waits=2)
UNHURT = Promise(used="always")


def checks(kind: Kind = "stacked") -> Checks:
    return Checks(kind=kind, expected_accuracy=lambda used: len(used) / 10, grace_ms=5.0)


def answer(*used: str, mode: Any = "stacked", **missing: str) -> Prediction:
    return Prediction(
        label="red", probability=0.9, top=(("red", 0.9),), mode=mode, used=used, missing=missing,
        expected_accuracy=len(used) / 10, latency_ms=3.0, deadline_ms=100.0, members=(),
    )  # fmt: skip


WHOLE = answer("alpha", "beta", "gamma")
LESS = answer("alpha", "gamma", beta="unreachable")
NO_QUORUM = QuorumNotMet("no", {"alpha": "unreachable"})


def call(
    outcome: Prediction | InferenceError, phase: Phase = "faulty", took_ms: float = 3.0
) -> ObservedCall:
    return ObservedCall(
        phase=phase, picture=2, label="red", deadline_ms=100.0, elapsed_ms=took_ms, outcome=outcome
    )


INCOMPLETE = "incomplete: {'beta': 'unreachable'}"
CASES: list[tuple[Kind, ObservedCall, Promise, str]] = [
    ("stacked", call(LESS), GONE, ""),
    ("stacked", call(WHOLE, "turning"), GONE, ""),
    ("stacked", call(WHOLE, "after", 104.0), GONE, ""),
    ("stacked", call(WHOLE), UNHURT, ""),
    ("stacked", call(answer("alpha", "gamma", beta="not_ready: X"), "healing"), GONE, ""),
    ("boosted", call(answer("alpha", "beta", mode="boosted", gamma="unreachable")), GONE, ""),
    ("single", call(answer("beta", mode="single", alpha="unreachable")), GONE, ""),
    ("replicas", call(answer("alpha/attic", "beta", "gamma")), GONE, ""),
    ("alone", call(NO_QUORUM), GONE, ""),
    ("alone", call(DeadlineExceeded("no", {"alpha": "late"})), SLOW, ""),
    ("stacked", call(LESS, took_ms=106.0), GONE, "ended 6 ms after its deadline"),
    ("stacked", call(WHOLE), GONE, "used beta while it cannot answer"),
    ("stacked", call(LESS, "before"), GONE, INCOMPLETE),
    ("stacked", call(LESS, "after"), GONE, INCOMPLETE),
    ("stacked", call(LESS), UNHURT, INCOMPLETE),
    ("stacked", call(LESS), SLOW, "beta is missing for 'unreachable', which is not promised"),
    ("stacked", call(answer("alpha", "gamma")), GONE, "missing {}, expected just beta"),
    ("stacked", call(answer("alpha", mode="single", beta="unreachable", gamma="late")), GONE,
     "another device is not in the answer: {'gamma': 'late'}"),
    ("stacked", call(changed(LESS, label="blue")), GONE, "label blue, expected red"),
    ("stacked", call(changed(LESS, mode="bagged")), GONE,
     "mode bagged from alpha, gamma, expected stacked"),
    ("stacked", call(changed(LESS, expected_accuracy=0.3)), GONE,
     "expected_accuracy 0.3, measured 0.2"),
    ("stacked", call(changed(WHOLE, missing={"beta": "late"}), "after"), GONE,
     "complete, but lists as missing: {'beta': 'late'}"),
    ("stacked", call(QuorumNotMet("none", {})), GONE, "QuorumNotMet instead of an answer: none"),
    ("replicas", call(answer("beta", "gamma", alpha="late")), SLOW,
     "incomplete: {'alpha': 'late'}"),
    ("alone", call(InferenceError("?", {"alpha": "late"})), SLOW,
     "InferenceError is none of the promised errors: ?"),
    ("alone", call(NO_QUORUM, "after"), GONE, "QuorumNotMet of a healthy fleet: no"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "made", "promise", "expected"), CASES)
def test_a_call_is_checked(kind: Kind, made: ObservedCall, promise: Promise, expected: str) -> None:
    found = find_broken(made, promise, checks(kind))
    assert expected in found if expected else found == []


LATE = call(answer("alpha", "gamma", beta="late"))
SILENT = call(answer("alpha", "gamma", beta="silent: 3 requests unanswered"))
ODD = call(changed(WHOLE, label="blue"))
ONE_WRONG = Promise(used="perhaps", wrong_labels=1)


@pytest.mark.parametrize(
    ("calls", "promise", "expected"),
    [
        ([LATE, LATE, SILENT, SILENT], SLOW, []),
        ([LATE] * 3 + [SILENT], SLOW, ["3 answers waited until their deadline, at most 2 may"]),
        ([LATE] * 9, replace(SLOW, waits=None), []),
        ([LATE, SILENT, LATE], SLOW, ["beta was waited for although it was known: late"]),
        ([call(LESS), call(changed(LESS, probability=0.8))], GONE, ["picture 2 had 0.9 and 0.8"]),
        # The faulty device's own part may be anything.
        ([call(WHOLE, "before"), call(changed(WHOLE, probability=0.1))], ONE_WRONG, []),
        ([ODD], ONE_WRONG, []),
        ([ODD, ODD], ONE_WRONG, ["2 wrong labels, at most 1 may be"]),
    ],
)
def test_calls_are_checked_together(
    calls: list[ObservedCall], promise: Promise, expected: Any
) -> None:
    assert find_broken_together(calls, promise, checks()) == expected


def test_outcomes_pass_between_two_processes() -> None:
    assert decode(encode(LESS, 3.5)) == (LESS, 3.5)
    error = DeadlineExceeded("no answer within 80 ms (a: late)", {"a": "late"})
    found, elapsed_ms = decode(encode(error, 81.0))
    assert isinstance(found, DeadlineExceeded)
    assert (str(found), found.outcomes, elapsed_ms) == (str(error), error.outcomes, 81.0)
