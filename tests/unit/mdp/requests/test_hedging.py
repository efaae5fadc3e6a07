"""Number of extra requests, and the moments at which they go out."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mdp.requests.hedging import BURST, ENOUGH, RECENT, Hedging, RoundTrips, TokenBucket
from mdp.requests.request import DeviceEvent, Request


def test_a_share_of_nothing_hedges_nothing() -> None:
    bucket = TokenBucket(0.0)
    bucket.earn(1000)
    assert not bucket.spend()


@given(st.floats(0, 1), st.lists(st.one_of(st.integers(1, 9), st.just("spend")), max_size=200))
def test_no_history_exceeds_share_and_burst(share: float, history: list[int | str]) -> None:
    bucket, earned, spent = TokenBucket(share), 0, 0
    for step in history:
        if isinstance(step, int):
            bucket.earn(step)
            earned += step
        else:
            spent += bucket.spend()
        assert spent <= BURST + share * earned + 1e-6


def test_ninety_five_of_a_hundred_round_trips() -> None:
    trips = RoundTrips()
    for _ in range(ENOUGH - 1):
        trips.add(0.010)
        assert trips.slow_s == math.inf
    trips.add(0.010)
    assert trips.slow_s == 0.010
    for number in range(RECENT):
        trips.add(number / 1000)
    # 61 of the last 64 took less than this or as much.
    assert trips.slow_s == 0.060


@given(st.lists(st.floats(0, 10), min_size=ENOUGH, max_size=3 * RECENT))
def test_the_quantile_is_that_of_the_recent_ones(values: list[float]) -> None:
    trips = RoundTrips()
    for value in values:
        trips.add(value)
    recent = sorted(values[-RECENT:])
    assert trips.slow_s == recent[math.ceil(0.95 * len(recent)) - 1]


def test_only_requests_that_are_no_hedges_earn_hedges() -> None:
    hedging = Hedging({0: ("a", "b")}, {"a": 0, "b": 0}, None, 1.0)
    while hedging.try_spend():
        pass
    hedging.handle(DeviceEvent("sent", "a", 0.0))
    hedging.handle(DeviceEvent("sent", "b", 0.0, Request(k=0, device="b", sent_s=0.0, hedged=True)))
    assert not hedging.try_spend()
    hedging.handle(DeviceEvent("sent", "a", 0.0, Request(k=0, device="a", sent_s=0.0)))
    assert hedging.try_spend()
    assert not hedging.try_spend()
