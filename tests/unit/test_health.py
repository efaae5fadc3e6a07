"""When a silent device is rested, and when it is asked again."""

from hypothesis import given
from hypothesis import strategies as st

from mdp.health import (
    FIRST_REST_S,
    LONGEST_REST_S,
    TOLERATED_SILENCES,
    Health,
    unavailable,
)


def test_a_device_is_rested_after_three_silences_in_a_row() -> None:
    health = Health()
    for _ in range(TOLERATED_SILENCES - 1):
        health.silent(10.0)
        assert health.available(10.0)
    health.silent(10.0)
    assert not health.available(10.0)
    assert not health.available(10.0 + FIRST_REST_S - 1e-6)
    assert health.available(10.0 + FIRST_REST_S)


def test_a_sign_of_life_in_between_starts_again() -> None:
    health = Health()
    for _ in range(10):
        health.silent(1.0)
        health.silent(1.0)
        health.heard()
    assert health.available(1.0)
    assert health == Health()


def test_a_rest_doubles_up_to_a_bound_and_a_sign_of_life_ends_it() -> None:
    health, now_s, rests = Health(), 0.0, []
    for _ in range(TOLERATED_SILENCES - 1):
        health.silent(now_s)
    for _ in range(10):
        health.silent(now_s)
        rests.append(health.rested_until_s - now_s)
        now_s = health.rested_until_s
    assert rests[:4] == [0.5, 1.0, 2.0, 4.0]
    assert rests[-1] == LONGEST_REST_S
    health.silent(now_s)
    assert not health.available(now_s)
    health.heard()
    assert health.available(now_s)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60))
def test_no_history_rests_a_device_for_longer_than_the_bound(
    history: list[tuple[bool, float]],
) -> None:
    health, now_s = Health(), 0.0
    for alive, step_s in history:
        now_s += step_s
        if alive:
            health.heard()
            assert health.available(now_s)
        else:
            health.silent(now_s)
        assert health.available(now_s + LONGEST_REST_S)


def test_whoever_was_heard_is_as_new() -> None:
    health = Health()
    for _ in range(TOLERATED_SILENCES + 2):
        health.silent(1.0)
    assert health != Health()
    health.heard()
    assert health == Health()


def test_who_is_not_to_be_asked() -> None:
    silent = Health()
    for _ in range(TOLERATED_SILENCES):
        silent.silent(0.0)
    health = {"a": silent, "b": Health()}
    resting = f"silent: {TOLERATED_SILENCES} requests unanswered"
    assert unavailable({}, [], devices=3, now_s=0.0) == {}
    assert unavailable(health, [], devices=3, now_s=0.0) == {"a": resting}
    assert unavailable(health, ["b"], devices=3, now_s=0.0) == {"a": resting, "b": "unreachable"}
    # Whoever is gone is unreachable, whatever else it was.
    assert unavailable(health, ["a"], devices=3, now_s=0.0) == {"a": "unreachable"}
    assert unavailable(health, [], devices=3, now_s=FIRST_REST_S) == {}


def test_with_nobody_else_left_a_silent_device_is_still_a_chance() -> None:
    silent = Health()
    for _ in range(TOLERATED_SILENCES):
        silent.silent(0.0)
    assert unavailable({"a": silent}, ["b"], devices=2, now_s=0.0) == {"b": "unreachable"}
    assert unavailable({"a": silent}, [], devices=1, now_s=0.0) == {}
