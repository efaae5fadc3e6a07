"""The checks behind the fault matrix see what is not kept."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from benchmarks.faults.calling_client import said, understood
from benchmarks.faults.promises import (
    Call,
    Fleetwise,
    Kind,
    Phase,
    Promise,
    broken,
    broken_together,
    summary,
)
from mdp.errors import DeadlineExceeded, InferenceError, QuorumNotMet
from mdp.requests.prediction import Prediction

GONE = Promise(reasons=("unreachable",), known=("unreachable",))
SLOW = Promise(reasons=("late", "silent: .+"), known=("silent: .+",), waits=2)
UNHURT = Promise(used="always")


def fleet(kind: Kind = "stacked") -> Fleetwise:
    return Fleetwise(kind=kind, expected_accuracy=lambda used: len(used) / 10, grace_ms=5.0)


def answer(*used: str, mode: Any = "stacked", **missing: str) -> Prediction:
    return Prediction(
        label="red", probability=0.9, top=(("red", 0.9),), mode=mode, used=used, missing=missing,
        expected_accuracy=len(used) / 10, latency_ms=3.0, deadline_ms=100.0, members=(),
    )  # fmt: skip


WHOLE = answer("alpha", "beta", "gamma")
LESS = answer("alpha", "gamma", beta="unreachable")


def call(
    outcome: Prediction | InferenceError, phase: Phase = "faulty", took_ms: float = 3.0
) -> Call:
    return Call(
        phase=phase, picture=2, label="red", deadline_ms=100.0, elapsed_ms=took_ms, outcome=outcome
    )


@pytest.mark.parametrize(
    ("kind", "made", "promise"),
    [
        ("stacked", call(LESS), GONE),
        ("stacked", call(WHOLE, "turning"), GONE),
        ("stacked", call(WHOLE, "after", 104.0), GONE),
        ("stacked", call(WHOLE), UNHURT),
        ("stacked", call(answer("alpha", "gamma", beta="not_ready: X"), "healing"), GONE),
        ("boosted", call(answer("alpha", "beta", mode="boosted", gamma="unreachable")), GONE),
        ("single", call(answer("beta", mode="single", alpha="unreachable")), GONE),
        ("replicas", call(answer("alpha/attic", "beta", "gamma")), GONE),
        ("alone", call(QuorumNotMet("no", {"alpha": "unreachable"})), GONE),
        ("alone", call(DeadlineExceeded("no", {"alpha": "late"})), SLOW),
    ],
)
def test_what_is_kept(kind: Kind, made: Call, promise: Promise) -> None:
    assert broken(made, promise, fleet(kind)) == []


INCOMPLETE = "incomplete: {'beta': 'unreachable'}"


@pytest.mark.parametrize(
    ("kind", "made", "promise", "said"),
    [
        ("stacked", call(LESS, took_ms=106.0), GONE, "ended 6 ms after its deadline"),
        ("stacked", call(WHOLE), GONE, "used beta while it cannot answer"),
        ("stacked", call(LESS, "before"), GONE, INCOMPLETE),
        ("stacked", call(LESS, "after"), GONE, INCOMPLETE),
        ("stacked", call(LESS), UNHURT, INCOMPLETE),
        ("stacked", call(LESS), SLOW,
         "beta is missing for 'unreachable', which is not promised"),
        ("stacked", call(answer("alpha", "gamma")), GONE, "missing {}, expected just beta"),
        ("stacked", call(answer("alpha", mode="single", beta="unreachable", gamma="late")), GONE,
         "another device is not in the answer: {'gamma': 'late'}"),
        ("stacked", call(changed(LESS, label="blue")), GONE, "says blue of a red picture"),
        ("stacked", call(changed(LESS, mode="bagged")), GONE,
         "mode bagged from alpha, gamma, expected stacked"),
        ("stacked", call(changed(LESS, expected_accuracy=0.3)), GONE,
         "expected_accuracy 0.3, measured 0.2"),
        ("stacked", call(changed(WHOLE, missing={"beta": "late"}), "after"), GONE,
         "complete, but lists as missing: {'beta': 'late'}"),
        ("stacked", call(QuorumNotMet("none", {})), GONE,
         "QuorumNotMet instead of an answer: none"),
        ("replicas", call(answer("beta", "gamma", alpha="late")), SLOW,
         "incomplete: {'alpha': 'late'}"),
        ("alone", call(InferenceError("?", {"alpha": "late"})), SLOW,
         "InferenceError is none of the errors promised: ?"),
        ("alone", call(QuorumNotMet("no", {"alpha": "unreachable"}), "after"), GONE,
         "QuorumNotMet of a fleet that is well: no"),
    ],
)  # fmt: skip
def test_what_is_not_kept(kind: Kind, made: Call, promise: Promise, said: str) -> None:
    assert said in broken(made, promise, fleet(kind))


LATE = call(answer("alpha", "gamma", beta="late"))
SILENT = call(answer("alpha", "gamma", beta="silent: 3 requests unanswered"))
ODD = call(changed(WHOLE, label="blue"))


@pytest.mark.parametrize(
    ("calls", "promise", "expected"),
    [
        ([LATE, LATE, SILENT, SILENT], SLOW, []),
        ([LATE] * 3 + [SILENT], SLOW, ["3 answers waited until their deadline, at most 2 may"]),
        ([LATE] * 9, replace(SLOW, waits=None), []),
        ([LATE, SILENT, LATE], SLOW, ["beta was waited for although it was known: late"]),
        ([call(LESS), call(changed(LESS, probability=0.8))], GONE, ["picture 2 had 0.9 and 0.8"]),
        # What the faulty device itself says may be anything.
        ([call(WHOLE, "before"), call(changed(WHOLE, probability=0.1))],
         Promise(used="perhaps"), []),
        ([ODD], Promise(used="perhaps", wrong_labels=1), []),
        ([ODD, ODD], Promise(used="perhaps", wrong_labels=1),
         ["2 wrong labels, at most 1 may be"]),
    ],
)  # fmt: skip
def test_what_calls_keep_together(calls: list[Call], promise: Promise, expected: list[str]) -> None:
    assert broken_together(calls, promise, fleet()) == expected


def test_an_answer_and_an_error_survive_the_way_between_two_processes() -> None:
    assert summary([SILENT, SILENT, LATE]) == (
        "3 stacked from alpha, gamma (2 beta silent, 1 beta late)"
    )
    assert understood(said(LESS, 3.5)) == (LESS, 3.5)
    error = DeadlineExceeded("no answer within 80 ms (a: late)", {"a": "late"})
    told, elapsed_ms = understood(said(error, 81.0))
    assert isinstance(told, DeadlineExceeded)
    assert (str(told), told.outcomes, elapsed_ms) == (str(error), error.outcomes, 81.0)
