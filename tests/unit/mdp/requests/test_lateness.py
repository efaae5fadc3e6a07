"""Devices that are late too often: for which calls, when tried again, and what calls make of it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.requests.health import (
    FORGIVEN_BY_ANSWER,
    LONGEST_PAUSE_S,
    LONGEST_PROBATION,
    SETTLED_AFTER,
    TOLERATED_FAILURES,
)
from mdp.requests.latency import FIRST_PAUSE_S, SlowDevice, SlowDevices
from mdp.requests.request import DeviceEvent, Request, What
from mdp.testing.bundles import write_bundle
from tests.support.faults.late_calls import USUAL_S, late_in, play

#: What a call gives a device, and how long that takes when it is late for it.
BUDGET_S, LATE_S = 0.1, 0.15
#: Calls one after the other that may wait for one that is always late: of the third late answer
#: they know when it has come.
MOST_WAITS = 5


def end(
    slow: SlowDevices, what: What, trip_s: float = 0.0, budget_s: float = BUDGET_S, *, test: bool
) -> None:
    request = Request(k=0, device="gamma", sent_s=0.0, is_test=test)
    slow.handle(DeviceEvent(what, "gamma", trip_s, request, budget_s, in_flight=True))


def tell(slow: SlowDevices, trips_s: list[float], budget_s: float = BUDGET_S) -> None:
    for trip_s in trips_s:
        end(slow, "late" if trip_s > budget_s else "answered", trip_s, budget_s, test=False)


def is_late(slow: SlowDevices, budget_s: float = BUDGET_S) -> bool:
    return "gamma" in slow and slow["gamma"].is_late_for(budget_s)


def test_three_late_answers_tell_for_whom_it_is_late() -> None:
    slow = SlowDevices()
    tell(slow, [LATE_S] * (TOLERATED_FAILURES - 1))
    assert not is_late(slow)
    tell(slow, [LATE_S])
    assert is_late(slow)
    assert is_late(slow, BUDGET_S / 5)
    assert not is_late(slow, LATE_S)
    reason = "slow: 3 of its last 3 answers took longer than this call can wait"
    assert str(slow["gamma"].reason(BUDGET_S)) == reason


def test_an_answer_that_takes_the_whole_budget_is_in_time() -> None:
    slow = SlowDevices()
    tell(slow, [LATE_S] * TOLERATED_FAILURES)
    tell(slow, [LATE_S + 0.01])
    assert not is_late(slow, LATE_S)
    assert "1 of its last 4 answers" in str(slow["gamma"].reason(LATE_S))


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [("x", True), ("xo", True), ("xoo", False), ("xxo", True), ("xooo", False), ("o", False)],
)
def test_frequent_lateness_excludes_and_rare_does_not(pattern: str, left_out: bool) -> None:
    slow, out = SlowDevices(), False
    for step in pattern * 30:
        tell(slow, [LATE_S if step == "x" else USUAL_S])
        out |= is_late(slow)
    assert out == left_out


@pytest.mark.parametrize("lates", [3, 4, 10, 100])
def test_it_owes_answers_in_time_for_its_strikes_and_never_many(lates: int) -> None:
    slow, owed = SlowDevices(), 0
    tell(slow, [LATE_S] * lates)
    while is_late(slow):
        tell(slow, [USUAL_S])
        owed += 1
    expected = 1 + int((lates - TOLERATED_FAILURES) / FORGIVEN_BY_ANSWER)
    assert owed == min(expected, LONGEST_PROBATION)


def test_it_is_forgotten_after_a_long_time_in_which_nobody_would_have_missed_it() -> None:
    slow = SlowDevices()
    tell(slow, [LATE_S] * 3)
    # In time for those who asked, but not for those before: that tells nothing.
    tell(slow, [BUDGET_S * 1.2] * 2 * SETTLED_AFTER, budget_s=LATE_S)
    assert is_late(slow)
    tell(slow, [USUAL_S] * (SETTLED_AFTER - 1))
    assert slow
    tell(slow, [USUAL_S])
    assert not slow


def test_one_that_was_never_late_is_not_remembered() -> None:
    slow = SlowDevices()
    tell(slow, [USUAL_S] * 5)
    end(slow, "refused", test=True)
    slow.handle(DeviceEvent("connected", "gamma", 0.0))
    assert not slow


def tries(
    late: SlowDevice, until_s: float, refused: Callable[[float], None] | None = None
) -> list[float]:
    """Moments at which it is tried, by calls that are made every 10 ms."""
    tried = []
    for step in range(round(until_s * 100)):
        now_s = step / 100
        if now_s >= late.paused_until_s:
            late.on_test(now_s)
            tried.append(now_s)
            if refused is not None:
                refused(now_s)
    return tried


def test_it_is_tried_ever_more_seldom() -> None:
    late = SlowDevice()
    tried = tries(late, 200.0)
    pauses = [after - before for before, after in pairwise(tried)]
    expected = [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(len(pauses))]
    assert pauses == pytest.approx(expected, abs=0.011)
    assert len(tried) == 14
    late.test_at_once()
    assert late.paused_until_s < 0.0
    late.on_test(300.0)
    assert late.paused_until_s == 300.0 + FIRST_PAUSE_S


def test_where_it_says_at_once_that_it_has_no_time_the_next_call_tries_it() -> None:
    slow = SlowDevices()
    tell(slow, [LATE_S] * 3)
    late = slow["gamma"]
    assert len(tries(late, 1.0, refused=lambda now_s: end(slow, "refused", test=True))) == 100
    late.on_test(2.0)
    assert late.paused_until_s == 2.0 + FIRST_PAUSE_S


def test_a_try_in_time_or_a_new_connection_is_a_reason_to_try_it_at_once() -> None:
    slow = SlowDevices()
    tell(slow, [LATE_S] * 8)
    late = slow["gamma"]
    refreshes: list[Callable[[], object]] = [
        lambda: end(slow, "answered", USUAL_S, test=True),
        lambda: slow.handle(DeviceEvent("connected", "gamma", 0.0)),
    ]
    for refresh in refreshes:
        late.on_test(1.0)
        assert late.paused_until_s > 1.0
        # An answer to somebody who has more time is none.
        end(slow, "answered", USUAL_S, test=False)
        assert late.paused_until_s > 1.0
        refresh()
        assert late.paused_until_s < 1.0


@given(st.lists(st.sampled_from([0.01, 0.06, 0.15, 0.3]), max_size=60), st.floats(0.005, 0.5))
def test_any_history_is_decided_by_three_and_eight(trips_s: list[float], budget_s: float) -> None:
    slow = SlowDevices()
    tell(slow, trips_s)
    tell(slow, [1.0] * TOLERATED_FAILURES)
    assert is_late(slow, budget_s)
    tell(slow, [0.001] * LONGEST_PROBATION)
    assert not is_late(slow, budget_s)


# Calls in virtual time, through exchange, roster and session.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("lateness") / "bundle")


@settings(max_examples=40, deadline=None)
@given(
    late_ms=st.integers(1, 2000), every_s=st.sampled_from([0.0, 0.033, 0.5]), seed=st.integers(0)
)
def test_always_late_costs_few_calls(folder: Path, late_ms: int, every_s: float, seed: int) -> None:
    seen = play(folder, late_in(1.0, 0.098 + late_ms / 1e3, seed), calls=60, every_s=every_s)
    waited = [number for number, call in enumerate(seen) if call.waited]
    assert len(waited) <= MOST_WAITS
    assert max(waited) < 2 * MOST_WAITS


@pytest.mark.parametrize(("share", "waits"), [(0.5, 0.01), (1.0, 0.01)])
def test_often_late_is_seldom_waited_for(folder: Path, share: float, waits: float) -> None:
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
def test_only_calls_with_time_wait(folder: Path, deadlines_ms: tuple[float, ...]) -> None:
    seen = play(folder, lambda now_s: 0.06, calls=400, deadlines_ms=deadlines_ms, every_s=0.033)
    patient = [call for call in seen if call.deadline_ms == 200.0]
    assert all(call.whole for call in patient)
    others = [call for call in seen if call.deadline_ms == 20.0]
    assert sum(call.waited for call in others) <= MOST_WAITS
    assert {call.reason.partition(":")[0] for call in others[20:]} <= {"slow", "on probation"}
