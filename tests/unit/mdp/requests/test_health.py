"""Circuit breaker: a device is taken out, is asked how it is, and comes back."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.requests.health import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LONGEST_PROBATION,
    SETTLED_AFTER,
    TOLERATED_FAILURES,
    UNREADY_PAUSE_S,
    CircuitBreaker,
)
from mdp.requests.reason import UNSTEADY, Reason

BROKEN, WARMING = Reason("failed", "no memory"), Reason("not_ready", "WARMING")


def make_silent(now_s: float = 10.0) -> CircuitBreaker:
    health = CircuitBreaker()
    for _ in range(TOLERATED_FAILURES):
        assert health.cause is None
        health.silent(now_s)
    return health


def test_three_silences_take_a_device_out_and_any_sign_of_life_brings_it_back_half_open() -> None:
    health = make_silent()
    assert (health.cause, str(health.reason)) == ("silent", "silent: 3 requests unanswered")
    health.alive()
    assert health.cause is None
    assert health.half_open
    health.on_answer()
    assert not health.half_open


def test_one_strike_half_open_is_enough_and_the_rest_is_longer() -> None:
    health = make_silent()
    assert health.paused_until_s == 10.0 + FIRST_PAUSE_S
    health.alive()
    health.silent(20.0)
    assert (health.cause, health.paused_until_s) == ("silent", 20.0 + 2 * FIRST_PAUSE_S)


def test_every_relapse_makes_the_probation_longer_up_to_a_bound() -> None:
    health, owed = make_silent(), []
    for _ in range(6):
        health.alive()
        owed.append(health.owed)
        health.silent(20.0)
    assert owed == [1, 2, 4, LONGEST_PROBATION, LONGEST_PROBATION, LONGEST_PROBATION]


def test_after_a_long_time_without_a_strike_the_past_is_forgotten() -> None:
    health = make_silent()
    health.alive()
    for _ in range(SETTLED_AFTER):
        assert not health.well
        health.on_answer()
    assert health.well
    assert health.pause_s == FIRST_PAUSE_S


def test_requests_that_were_under_way_when_it_was_taken_out_do_not_lengthen_its_rest() -> None:
    health = make_silent()
    for _ in range(10):
        health.silent(10.0)
    assert health.paused_until_s == 10.0 + FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("pattern", "taken_out"),
    [("xo", True), ("xoo", False), ("xxo", True), ("o", False), ("xoxoo", True)],
)
def test_frequent_failures_exclude_and_rare_ones_do_not(pattern: str, taken_out: bool) -> None:
    health, out = CircuitBreaker(), False
    for step in pattern * 20:
        if step == "x":
            health.on_failure(0.0, BROKEN)
        else:
            health.on_answer()
        out |= health.cause is not None
    assert out == taken_out


def test_a_failing_device_comes_back_only_after_its_rest() -> None:
    health = CircuitBreaker()
    for _ in range(TOLERATED_FAILURES):
        health.on_failure(0.0, BROKEN)
    assert (health.cause, str(health.reason)) == ("failing", "failing: failed: no memory")
    health.alive()
    health.on_status(0.1, None)
    assert health.cause == "failing"
    health.on_status(FIRST_PAUSE_S, None)
    assert health.half_open


def test_one_that_is_not_ready_is_out_at_once_and_back_as_soon_as_it_says_so() -> None:
    health = CircuitBreaker()
    health.unready(5.0, WARMING)
    assert (health.cause, health.reason) == ("unready", WARMING)
    assert not health.due(5.0)
    assert health.due(5.0 + UNREADY_PAUSE_S)
    health.alive()
    assert health.cause == "unready"
    health.on_status(5.1, None)
    assert health.half_open


def test_how_often_one_that_is_out_is_asked_how_it_is() -> None:
    health, now_s = make_silent(0.0), 0.0
    asked: list[float] = []
    while len(asked) < 9:
        now_s += 0.25
        if health.due(now_s):
            health.on_status_request(now_s)
            asked.append(now_s)
    gaps = [after - before for before, after in pairwise(asked)]
    assert asked[0] == 0.5
    assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_one_lost_connection_costs_a_probation_and_many_a_rest() -> None:
    health = CircuitBreaker()
    health.on_disconnect()
    health.on_connect(1.0)
    assert health.half_open
    health.on_answer()
    assert not health.half_open
    for _ in range(2):
        health.on_disconnect()
        health.on_connect(2.0)
    assert (health.cause, health.reason) == ("failing", UNSTEADY)


def test_a_connection_that_was_never_lost_is_no_come_back() -> None:
    health = CircuitBreaker()
    health.on_connect(1.0)
    assert health.well


def test_a_reconnection_brings_back_who_was_silent_but_not_who_fails() -> None:
    health = make_silent()
    health.on_disconnect()
    health.on_connect(10.1)
    assert health.half_open
    failing = CircuitBreaker()
    for _ in range(TOLERATED_FAILURES):
        failing.on_failure(10.0, BROKEN)
    failing.on_disconnect()
    failing.on_connect(10.1)
    assert failing.cause == "failing"


EVENTS = ("answered", "heard", "silent", "failed", "unready", "ready", "lost", "found", "asked")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 10)), max_size=60))
def test_any_history_ends_in_readmission(history: list[tuple[str, float]]) -> None:
    health, now_s = CircuitBreaker(), 0.0
    for what, step_s in history:
        now_s += step_s
        match what:
            case "answered":
                health.on_answer()
            case "heard":
                health.alive()
            case "silent":
                health.silent(now_s)
            case "failed":
                health.on_failure(now_s, BROKEN)
            case "unready":
                health.unready(now_s, WARMING)
            case "ready":
                health.on_status(now_s, None)
            case "lost":
                health.on_disconnect()
            case "found":
                health.on_connect(now_s)
            case _:
                health.on_status_request(now_s)
        assert health.ask_s <= now_s + LONGEST_PAUSE_S
        assert bool(health.cause) == bool(health.reason)
        assert not (health.cause and health.half_open)
    now_s += LONGEST_PAUSE_S
    health.on_connect(now_s)
    health.on_status(now_s + LONGEST_PAUSE_S, None)
    assert health.cause is None
    for _ in range(LONGEST_PROBATION):
        health.on_answer()
    assert not health.half_open


def test_an_unready_device_is_asked_again_after_a_pause() -> None:
    health = CircuitBreaker()
    health.unready(10.0, WARMING)
    assert not health.due(10.0)
    health.on_status_request(10.0 + UNREADY_PAUSE_S)
    assert not health.due(10.0 + UNREADY_PAUSE_S)
    assert health.due(10.0 + 2 * UNREADY_PAUSE_S)


@pytest.mark.parametrize(
    "sign",
    [
        CircuitBreaker.on_answer,
        CircuitBreaker.alive,
        lambda health: health.on_failure(10.0, BROKEN),
        lambda health: health.on_status(10.0, None),
    ],
)
def test_any_message_ends_a_row_of_silences(sign: Callable[[CircuitBreaker], None]) -> None:
    health = CircuitBreaker()
    health.silent(10.0)
    sign(health)
    assert health.silences == 0
