"""The checks behind the fault matrix see what is not kept."""

from dataclasses import replace

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
    in_words,
    summary,
)
from mdp.errors import DeadlineExceeded, InferenceError, QuorumNotMet
from mdp.requests.prediction import Prediction

GONE = Promise(reasons=("unreachable",), known=("unreachable",))
SLOW = Promise(reasons=("late", "silent: .+"), known=("silent: .+",), waits=2)
UNHURT = Promise(used="always")


def fleet(kind: Kind = "stacked") -> Fleetwise:
    return Fleetwise(kind=kind, expected_accuracy=lambda used: len(used) / 10, grace_ms=5.0)


def answer(*used: str, label: str = "red", mode: str = "stacked", **missing: str) -> Prediction:
    return Prediction(
        label=label,
        probability=0.9,
        top=((label, 0.9),),
        mode=mode,  # type: ignore[arg-type]
        used=used,
        missing=missing,
        expected_accuracy=len(used) / 10,
        latency_ms=3.0,
        deadline_ms=100.0,
        members=(),
    )


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
        ("stacked", call(LESS, "turning"), GONE),
        ("stacked", call(WHOLE, "turning"), GONE),
        ("stacked", call(WHOLE, "after", 104.0), GONE),
        ("stacked", call(WHOLE), UNHURT),
        ("stacked", call(answer("alpha", "gamma", beta="not_ready: X"), "healing"), GONE),
        ("boosted", call(answer("alpha", "beta", mode="boosted", gamma="unreachable")), GONE),
        ("single", call(answer("beta", mode="single", alpha="unreachable")), GONE),
        ("replicas", call(answer("alpha/attic", "beta", "gamma")), GONE),
        ("alone", call(QuorumNotMet("no", {"alpha": "unreachable"})), GONE),
        ("alone", call(DeadlineExceeded("no", {"alpha": "late"})), SLOW),
        ("alone", call(answer("alpha", mode="single"), "after"), SLOW),
    ],
)
def test_what_is_kept(kind: Kind, made: Call, promise: Promise) -> None:
    assert broken(made, promise, fleet(kind)) == []


@pytest.mark.parametrize(
    ("made", "promise", "said"),
    [
        (call(LESS, took_ms=106.0), GONE, "ended 6 ms after its deadline"),
        (call(WHOLE), GONE, "used beta while it cannot answer"),
        (call(LESS, "before"), GONE, "incomplete: {'beta': 'unreachable'}"),
        (call(LESS, "after"), GONE, "incomplete: {'beta': 'unreachable'}"),
        (call(LESS), UNHURT, "incomplete: {'beta': 'unreachable'}"),
        (call(LESS), SLOW, "beta is missing for 'unreachable', which is not promised"),
        (
            call(answer("alpha", "gamma")),
            GONE,
            "missing {}, expected just beta",
        ),
        (
            call(answer("alpha", mode="single", beta="unreachable", gamma="late")),
            GONE,
            "another device is not in the answer: {'gamma': 'late'}",
        ),
        (call(changed(LESS, label="blue")), GONE, "says blue of a red picture"),
        (
            call(changed(LESS, mode="bagged")),
            GONE,
            "mode bagged from alpha, gamma, expected stacked",
        ),
        (call(changed(LESS, expected_accuracy=0.3)), GONE, "expected_accuracy 0.3, measured 0.2"),
        (
            call(changed(WHOLE, missing={"beta": "late"}), "after"),
            GONE,
            "complete, but lists as missing: {'beta': 'late'}",
        ),
        (
            call(QuorumNotMet("none", {})),
            GONE,
            "QuorumNotMet instead of an answer: none",
        ),
    ],
)
def test_what_is_not_kept(made: Call, promise: Promise, said: str) -> None:
    assert said in broken(made, promise, fleet())


def test_what_else_is_not_kept() -> None:
    incomplete = answer("beta", "gamma", alpha="late")
    assert broken(call(incomplete), SLOW, fleet("replicas")) == ["incomplete: {'alpha': 'late'}"]
    alone = fleet("alone")
    assert broken(call(InferenceError("?", {"alpha": "late"})), SLOW, alone) == [
        "InferenceError is none of the errors promised: ?"
    ]
    well = call(QuorumNotMet("no", {"alpha": "unreachable"}), "after")
    assert broken(well, GONE, alone) == ["QuorumNotMet of a fleet that is well: no"]
    unsaid = call(DeadlineExceeded("no", {"alpha": "tired"}))
    assert broken(unsaid, SLOW, alone) == ["alpha is missing for 'tired', which is not promised"]


LATE = call(answer("alpha", "gamma", beta="late"))
SILENT = call(answer("alpha", "gamma", beta="silent: 3 requests unanswered"))


def test_waiting_is_bounded() -> None:
    assert broken_together([LATE, LATE, SILENT, SILENT], SLOW, fleet()) == []
    assert broken_together([LATE, LATE, LATE, SILENT], SLOW, fleet()) == [
        "3 answers waited until their deadline, at most 2 may"
    ]
    assert broken_together([LATE] * 9, replace(SLOW, waits=None), fleet()) == []


def test_what_is_known_is_not_waited_for() -> None:
    assert broken_together([LATE, SILENT, LATE], SLOW, fleet()) == [
        "beta was waited for although it was known: late"
    ]


def test_the_same_devices_give_the_same_answer() -> None:
    other = call(changed(LESS, probability=0.8))
    assert broken_together([call(LESS), other], GONE, fleet()) == ["picture 2 had 0.9 and 0.8"]
    # What the faulty device itself says may be anything.
    odd = call(changed(WHOLE, probability=0.1))
    assert broken_together([call(WHOLE, "before"), odd], Promise(used="perhaps"), fleet()) == []


def test_wrong_labels_are_counted_where_nobody_can_know() -> None:
    constant = Promise(used="perhaps", wrong_labels=1)
    odd = call(changed(WHOLE, label="blue"))
    assert broken(odd, constant, fleet()) == []
    assert broken_together([odd], constant, fleet()) == []
    assert broken_together([odd, odd], constant, fleet()) == ["2 wrong labels, at most 1 may be"]
    without = call(changed(LESS, label="blue"))
    assert "says blue of a red picture" in broken(without, constant, fleet())


def test_in_words() -> None:
    assert in_words(GONE, "boosted") == "boosted without gamma"
    assert in_words(GONE, "single") == "single without alpha"
    assert in_words(GONE, "alone") == "error"
    assert in_words(GONE, "replicas") == "stacked, complete"
    assert in_words(replace(GONE, used="perhaps"), "stacked") == (
        "stacked, complete, or stacked without beta"
    )
    assert in_words(UNHURT, "alone") == "an answer"
    gone = call(QuorumNotMet("no", {"alpha": "unreachable"}))
    assert summary([SILENT, SILENT, LATE]) == (
        "3 stacked from alpha, gamma (2 beta silent, 1 beta late)"
    )
    assert summary([gone]) == "1 QuorumNotMet (1 alpha unreachable)"


def test_an_answer_and_an_error_survive_the_way_between_two_processes() -> None:
    assert understood(said(LESS, 3.5)) == (LESS, 3.5)
    error = DeadlineExceeded("no answer within 80 ms (a: late)", {"a": "late"})
    told, elapsed_ms = understood(said(error, 81.0))
    assert isinstance(told, DeadlineExceeded)
    assert (str(told), told.outcomes, elapsed_ms) == (str(error), error.outcomes, 81.0)
