"""Who is late too often, for which calls, when it is tried again, and what calls make of that."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.requests.health import (
    FORGIVEN_BY_ANSWER,
    LONGEST_PROBATION,
    LONGEST_REST_S,
    SETTLED_AFTER,
    TOLERATED_STRIKES,
)
from mdp.requests.latency import FIRST_PAUSE_S, OVERDUE, Late, Lateness
from mdp.testing.bundles import write_bundle
from tests.support.faults.late_calls import USUAL_S, late_in, play

#: What a call gives a device, and how long that takes when it is late for it.
BUDGET_S, LATE_S = 0.1, 0.15
#: Calls one after the other that may wait for one that is always late: of the third late answer
#: they know when it has come.
MOST_WAITS = 5


def told(lateness: Lateness, trips_s: list[float], budget_s: float = BUDGET_S) -> None:
    for trip_s in trips_s:
        if trip_s > budget_s:
            lateness.late("gamma", trip_s, budget_s)
        else:
            lateness.in_time("gamma", trip_s, tried=False)


def is_late(lateness: Lateness, budget_s: float = BUDGET_S) -> bool:
    return [device for device, _ in lateness.late_for(budget_s)] == ["gamma"]


def test_three_late_answers_tell_for_whom_it_is_late() -> None:
    lateness = Lateness()
    told(lateness, [LATE_S] * (TOLERATED_STRIKES - 1))
    assert not is_late(lateness)
    told(lateness, [LATE_S])
    assert is_late(lateness)
    assert is_late(lateness, BUDGET_S / 5)
    assert not is_late(lateness, LATE_S)
    reason = "slow: 3 of its last 3 answers took longer than this call can wait"
    assert lateness.suspects["gamma"].reason(BUDGET_S) == reason


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [("x", True), ("xo", True), ("xoo", False), ("xxo", True), ("xooo", False), ("o", False)],
)
def test_who_is_late_every_other_time_is_left_out_and_who_seldom_is_is_not(
    pattern: str, left_out: bool
) -> None:
    lateness, out = Lateness(), False
    for step in pattern * 30:
        told(lateness, [LATE_S if step == "x" else USUAL_S])
        out |= is_late(lateness)
    assert out == left_out


@pytest.mark.parametrize("lates", [3, 4, 10, 100])
def test_it_owes_answers_in_time_for_its_strikes_and_never_many(lates: int) -> None:
    lateness, owed = Lateness(), 0
    told(lateness, [LATE_S] * lates)
    while is_late(lateness):
        told(lateness, [USUAL_S])
        owed += 1
    expected = 1 + int((lates - TOLERATED_STRIKES) / FORGIVEN_BY_ANSWER)
    assert owed == min(expected, LONGEST_PROBATION)


def test_it_is_forgotten_after_a_long_time_in_which_nobody_would_have_missed_it() -> None:
    lateness = Lateness()
    told(lateness, [LATE_S] * 3)
    # In time for those who asked, but not for those before: that tells nothing.
    told(lateness, [BUDGET_S * 1.2] * 2 * SETTLED_AFTER, budget_s=LATE_S)
    assert is_late(lateness)
    told(lateness, [USUAL_S] * (SETTLED_AFTER - 1))
    assert lateness.suspects
    told(lateness, [USUAL_S])
    assert not lateness.suspects


def test_one_that_was_never_late_is_not_remembered() -> None:
    lateness = Lateness()
    told(lateness, [USUAL_S] * 5)
    lateness.refused("gamma")
    lateness.connected("gamma")
    assert not lateness.suspects


def tries(
    late: Late, until_s: float, refused: Callable[[float], None] | None = None
) -> list[float]:
    """When it is tried, by calls that are made every 10 ms."""
    tried = []
    for step in range(round(until_s * 100)):
        now_s = step / 100
        if now_s >= late.paused_until_s:
            late.tried(now_s)
            tried.append(now_s)
            if refused is not None:
                refused(now_s)
    return tried


def test_it_is_tried_ever_more_seldom() -> None:
    late = Late()
    tried = tries(late, 200.0)
    pauses = [after - before for before, after in pairwise(tried)]
    expected = [min(FIRST_PAUSE_S * 2**n, LONGEST_REST_S) for n in range(len(pauses))]
    assert pauses == pytest.approx(expected, abs=0.011)
    assert len(tried) == 14
    late.refreshed()
    assert late.paused_until_s < 0.0
    late.tried(300.0)
    assert late.paused_until_s == 300.0 + FIRST_PAUSE_S


def test_where_it_says_at_once_that_it_has_no_time_the_next_call_tries_it() -> None:
    lateness = Lateness()
    told(lateness, [LATE_S] * 3)
    late = lateness.suspects["gamma"]
    assert len(tries(late, 1.0, refused=lambda now_s: lateness.refused("gamma"))) == 100
    late.tried(2.0)
    assert late.paused_until_s == 2.0 + FIRST_PAUSE_S


def test_a_try_in_time_or_a_new_connection_is_a_reason_to_try_it_at_once() -> None:
    lateness = Lateness()
    told(lateness, [LATE_S] * 8)
    late = lateness.suspects["gamma"]
    refreshes: list[Callable[[], object]] = [
        lambda: lateness.in_time("gamma", USUAL_S, tried=True),
        lambda: lateness.connected("gamma"),
    ]
    for refresh in refreshes:
        late.tried(1.0)
        assert late.paused_until_s > 1.0
        # An answer to somebody who has more time is none.
        lateness.in_time("gamma", USUAL_S, tried=False)
        assert late.paused_until_s > 1.0
        refresh()
        assert late.paused_until_s < 1.0


def test_what_is_overdue_is_known_once_and_not_without_end() -> None:
    lateness = Lateness()
    for call in range(OVERDUE + 1):
        lateness.overdue(call, "gamma", 1.0, 1.1)
    assert lateness.settle(0, "gamma") is None
    assert lateness.settle(1, "gamma") == (1.0, 1.1)
    assert lateness.settle(1, "gamma") is None
    lateness.dropped("gamma")
    assert lateness.settle(2, "gamma") is None
    assert not lateness._overdue


@given(st.lists(st.sampled_from([0.01, 0.06, 0.15, 0.3]), max_size=60), st.floats(0.005, 0.5))
def test_from_any_history_it_is_left_out_after_three_too_long_and_back_after_eight_in_time(
    trips_s: list[float], budget_s: float
) -> None:
    lateness = Lateness()
    told(lateness, trips_s)
    told(lateness, [1.0] * TOLERATED_STRIKES)
    assert is_late(lateness, budget_s)
    told(lateness, [0.001] * LONGEST_PROBATION)
    assert not is_late(lateness, budget_s)


# Calls in virtual time, through exchange, roster and session.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("lateness") / "bundle")


@settings(max_examples=40, deadline=None)
@given(
    late_ms=st.integers(1, 2000), every_s=st.sampled_from([0.0, 0.033, 0.5]), seed=st.integers(0)
)
def test_one_that_is_always_late_is_waited_for_by_few_calls_and_then_by_none(
    folder: Path, late_ms: int, every_s: float, seed: int
) -> None:
    seen = play(folder, late_in(1.0, 0.098 + late_ms / 1e3, seed), calls=60, every_s=every_s)
    waited = [number for number, call in enumerate(seen) if call.waited]
    assert len(waited) <= MOST_WAITS
    assert max(waited) < 2 * MOST_WAITS


@pytest.mark.parametrize(("share", "waits"), [(0.5, 0.01), (1.0, 0.01)])
def test_one_that_is_late_often_is_seldom_waited_for(
    folder: Path, share: float, waits: float
) -> None:
    seen = play(folder, late_in(share, LATE_S), calls=1000)
    assert sum(call.waited for call in seen) <= waits * len(seen)


def test_one_that_is_late_now_and_then_is_in_every_other_answer(folder: Path) -> None:
    seen = play(folder, late_in(0.02, LATE_S), calls=1000)
    assert all(call.waited or call.whole for call in seen)
    assert 10 <= sum(call.waited for call in seen) <= 40


def test_one_that_is_in_time_again_is_waited_for_again(folder: Path) -> None:
    began = []

    def takes_s(now_s: float) -> float:
        began.append(now_s)
        return LATE_S if now_s < began[0] + 5.0 else USUAL_S

    seen = play(folder, takes_s, calls=700, every_s=0.033)
    late = [call for call in seen if not call.whole]
    assert sum(call.waited for call in late) <= MOST_WAITS
    # The longest pause is as long as it has been late for.
    assert max(call.began_s for call in late) <= seen[0].began_s + 5.0 + 5.0 + 1.0
    tried = [now_s for now_s in began if now_s < began[0] + 5.0]
    assert len(tried) <= MOST_WAITS + 6


@pytest.mark.parametrize("deadlines_ms", [(20.0, 200.0), (20.0, 20.0, 20.0, 200.0)])
def test_those_who_have_time_wait_for_it_and_those_who_have_none_do_not(
    folder: Path, deadlines_ms: tuple[float, ...]
) -> None:
    seen = play(folder, lambda now_s: 0.06, calls=400, deadlines_ms=deadlines_ms, every_s=0.033)
    patient = [call for call in seen if call.deadline_ms == 200.0]
    assert all(call.whole for call in patient)
    others = [call for call in seen if call.deadline_ms == 20.0]
    assert sum(call.waited for call in others) <= MOST_WAITS
    assert {call.reason.partition(":")[0] for call in others[20:]} <= {"slow", "on probation"}
