"""What a stream is held against: a loop alone, and one beside the other members' computing."""

from typing import Any, cast

import numpy as np
import pytest

from benchmarks.harness.tables import table
from benchmarks.serving.stream_rate import COLUMNS, SLOW, Case, Rates, loop_rate, row_of
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels

ALONE, BESIDE, STREAMED = (
    [[50.0], [52.0], [48.0]],
    [[45.0], [44.0], [46.0]],
    [[42.0], [43.0], [41.0]],
)


def test_a_stream_is_held_against_both_loops() -> None:
    rates = Rates(alone=ALONE, beside=BESIDE, streams={2: STREAMED})
    row = row_of(Case(members=(SLOW, SLOW), in_flight=(2,)), 2, rates)
    assert row["stream_per_s"] == 42.0
    assert (row["loop_alone_per_s"], row["loop_beside_per_s"]) == (50.0, 45.0)
    assert row["ratio_alone"] == pytest.approx(42 / 50)
    assert row["ratio_beside"] == pytest.approx(42 / 45)
    low, high = row["ratio_beside_95"]
    assert low <= 42 / 45 <= high
    assert "| 2 | 2 | 1 | 42.0 | 50.0 | 0.840 (" in table([row], *COLUMNS)
    assert "| 45.0 | 0.933 (" in table([row], *COLUMNS)


def test_one_member_has_nobody_beside_it() -> None:
    rates = Rates(alone=ALONE, streams={2: STREAMED})
    row = row_of(Case(members=(SLOW,), in_flight=(2,)), 2, rates)
    assert row["ratio_alone"] == pytest.approx(42 / 50)
    assert row["loop_beside_per_s"] is row["ratio_beside"] is row["ratio_beside_95"] is None
    assert table([row], *COLUMNS).endswith("| - | - |")


class Paced:
    """The other end of a pipe: counts what it is sent, and what it is asked to have done."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def send(self, _: object) -> None:
        self.sent += 1

    def recv(self) -> bool:
        self.received += 1
        return True


class Instant:
    """A runtime that counts."""

    provider, fallback = "none", False

    def __init__(self) -> None:
        self.runs = 0

    def warm_up(self) -> None:
        """Nothing."""

    def run(self, pixels: Pixels) -> Contribution:
        self.runs += 1
        logits = np.zeros((len(pixels), 3), dtype=np.float32)
        return Contribution(logits, logits)


def test_the_others_compute_once_for_each_time_and_are_done_before_it_goes_on() -> None:
    runtime, other = Instant(), Paced()
    loop_rate(runtime, np.zeros((1, 8, 8, 3), dtype=np.uint8), 0.001, [cast(Any, other)])
    assert runtime.runs == other.sent == other.received > 0
