"""Moments on the client's clock, as ages on the wire and back."""

import math

import numpy as np
import pytest

from mdp.errors import InputError
from mdp.fusion.fuse import Contribution
from mdp.requests.capture import FrameQuery, FrameSeen, checked_every_ms, frame_query
from mdp.requests.session import Arrival


def test_the_newest_frame_is_zero_ms_ago_whenever_the_request_leaves() -> None:
    glance = frame_query("latest", within_ms=50.0, now_s=100.0)
    assert glance == FrameQuery(within_ms=50.0)
    assert glance.ago_ms(100.0) == glance.ago_ms(200.0) == 0.0


def test_a_moment_stays_the_same_however_late_a_request_leaves() -> None:
    glance = frame_query(99.5, within_ms=50.0, now_s=100.0)
    assert glance.ago_ms(100.0) == pytest.approx(500.0)
    assert glance.ago_ms(100.25) == pytest.approx(750.0)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (100.1, r"^at: expected a moment up to 1e\+09 ms ago, got one -100 ms ago$"),
        (-1e7, r"^at: expected a moment up to 1e\+09 ms ago, got one 1\.00001e\+10 ms ago$"),
        (math.nan, r"^at: expected 'latest' or a reading of time\.monotonic\(\), got nan$"),
        ("now", r"^at: expected 'latest' or a reading of time\.monotonic\(\), got 'now'$"),
    ],
)
def test_moments_that_are_refused(at: float, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        frame_query(at, within_ms=50.0, now_s=100.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 2e9])
def test_durations_that_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match=r"^within_ms: expected 0 to 1e\+09, got "):
        frame_query("latest", within_ms=bad, now_s=100.0)
    with pytest.raises(InputError, match=r"^every_ms: expected 0 to 1e\+09, got "):
        checked_every_ms(bad)


def test_when_a_frame_was_taken_is_known_to_half_the_network_time() -> None:
    logits = np.zeros(2, np.float32)
    part = Arrival(
        device="alpha",
        contribution=Contribution(logits, logits),
        queue_ms=5.0,
        compute_ms=20.0,
        network_ms=8.0,
    )
    sight = FrameSeen(number=1, age_ms=30.0, heard_s=100.0)
    # Sent at 99.967, so arrived from then to 99.975, and taken 30 ms before that.
    assert sight.taken_s(part) == pytest.approx(99.941)
    assert 99.937 <= sight.taken_s(part) <= 99.945
