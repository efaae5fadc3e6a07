"""Moments on the client's clock, as ages on the wire and back."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.errors import InputError
from mdp.fusion.fuse import Contribution
from mdp.requests.capture import (
    FrameInAnswer,
    FrameQuery,
    FrameSeen,
    check_every_ms,
    frame_query,
    together,
)
from mdp.requests.reason import UNREACHABLE
from mdp.requests.session import Arrival, Finish


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
        check_every_ms(bad)


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
    assert sight.capture_s(part) == pytest.approx(99.941)
    assert 99.937 <= sight.capture_s(part) <= 99.945


def decide(ages_ms: list[float]) -> tuple[Finish, dict[str, FrameInAnswer]]:
    """A look whose members have frames of these ages, and one that is missing."""
    logits = np.zeros(2, np.float32)
    parts = {
        k: Arrival(
            device=f"camera-{k}", contribution=Contribution(None, logits),
            queue_ms=0.0, compute_ms=1.0, network_ms=1.0,
        )
        for k in range(len(ages_ms))
    }  # fmt: skip
    frames = {f"camera-{k}": FrameInAnswer(1, age_ms) for k, age_ms in enumerate(ages_ms)}
    return Finish(arrived=parts, missing={"gone": UNREACHABLE}, timed_out=False), frames


@pytest.mark.parametrize(
    ("ages_ms", "kept"),
    [
        ([], []),
        ([3000.0], [0]),
        ([0.0, 500.0, 250.0], [0, 1, 2]),
        ([10.0, 20.0, 1800.0], [0, 1]),
        ([1000.0, 20.0, 1010.0], [0, 2]),
        # Of two largest sets, the newer one.
        ([700.0, 0.0], [1]),
        ([1000.0, 1100.0, 30.0, 0.0], [2, 3]),
        ([0.0, 400.0, 800.0], [0, 1]),
    ],
)
def test_frames_too_far_apart_are_left_out(ages_ms: list[float], kept: list[int]) -> None:
    finish, frames = decide(ages_ms)
    found = together(finish, frames, 500.0)
    assert list(found.arrived) == kept
    out = {f"camera-{k}" for k in range(len(ages_ms)) if k not in kept}
    assert found.missing.keys() == {"gone"} | out
    assert {found.missing[device].code for device in out} <= {"apart"}


def test_the_reason_says_how_far_apart() -> None:
    finish, frames = decide([1810.0, 10.0, 0.0])
    assert str(together(finish, frames, 500.0).missing["camera-0"]) == (
        "apart: its frame is 1810 ms older than the newest in the answer: expected at most 500 ms"
    )
    finish, frames = decide([0.0, 900.0, 950.0])
    assert str(together(finish, frames, 500.0).missing["camera-0"]) == (
        "apart: its frame is 950 ms newer than the oldest in the answer: expected at most 500 ms"
    )


@given(st.lists(st.floats(-10, 3000), min_size=1, max_size=6), st.floats(1, 2000))
def test_no_larger_set_of_frames_fits(ages_ms: list[float], most_ms: float) -> None:
    kept = together(*decide(ages_ms), most_ms).arrived
    used = [ages_ms[k] for k in kept]
    assert max(used) - min(used) <= most_ms + 1e-6
    for size in range(len(kept) + 1, len(ages_ms) + 1):
        for larger in combinations(ages_ms, size):
            assert max(larger) - min(larger) > most_ms - 1e-6
