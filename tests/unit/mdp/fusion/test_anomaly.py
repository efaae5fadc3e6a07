"""Rates of scores, fused surprises of cameras, and what a table may say."""

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from mdp.fusion.anomaly import fuse_surprises, share_range, surprise, surprises_of
from mdp.fusion.anomaly_table import MAXIMUM, MEAN, Anomaly, ScoreTail, SubsetAnomaly

TAIL = ScoreTail(scores=(1.0, 2.0, 3.0, 4.0), decade=0.5)


def test_a_surprise_is_the_logarithm_of_a_rate() -> None:
    scores = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0])
    expected = [0.0, 0.0, np.log10(2), np.log10(5), 1.0, 2.0, 3.0]
    assert surprise(scores, TAIL) == pytest.approx(expected, abs=1e-6)


def test_no_surprise_is_beyond_all_numbers() -> None:
    assert surprise(1e30, TAIL) == 1000.0
    same = ScoreTail(scores=(1.0, 1.0, 1.0, 1.0), decade=1e-6)
    assert surprise(1.0, same) <= 1.0
    assert np.isfinite(fuse_surprises([surprise(1e30, TAIL)] * 3, 8))


@pytest.mark.parametrize(("power", "expected"), [(MEAN, 2.0), (2, np.sqrt(5.0)), (MAXIMUM, 3.0)])
def test_surprises_are_fused_by_a_power_mean(power: int, expected: float) -> None:
    assert fuse_surprises([np.array(1.0), np.array(3.0)], power) == pytest.approx(expected)
    assert fuse_surprises([np.array([0.0, 2.0])], power).tolist() == [0.0, 2.0]
    assert fuse_surprises([np.zeros(2), np.zeros(2)], power).tolist() == [0.0, 0.0]


def test_a_share_has_the_range_that_its_count_supports() -> None:
    assert share_range(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert share_range(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert share_range(0.4, 20) == pytest.approx((0.2188, 0.6134), abs=1e-4)
    assert share_range(0.4, 2000) == pytest.approx((0.3787, 0.4216), abs=1e-4)


@pytest.mark.parametrize("count", [10, 34, 300])
def test_a_range_holds_the_true_share_in_nineteen_of_twenty_cases(count: int) -> None:
    held = []
    for true in np.linspace(0.05, 0.95, 91).tolist():
        chances = [
            math.comb(count, hits) * true**hits * (1 - true) ** (count - hits)
            for hits in range(count + 1)
        ]
        ranges = [share_range(hits / count, count) for hits in range(count + 1)]
        held.append(
            sum(c for c, (low, high) in zip(chances, ranges, strict=True) if low <= true <= high)
        )
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)


def test_members_have_tails_of_their_own() -> None:
    wide = ScoreTail(scores=(0.0, 10.0, 20.0, 30.0), decade=10.0)
    found = surprises_of({0: 5.0, 1: 5.0}, [TAIL, wide])
    assert found[0] == pytest.approx(3.0)
    assert found[1] < np.log10(2)


@dataclass(frozen=True)
class Wrong:
    """A change of a table, and what is said of it."""

    changes: dict[str, Any]
    text: str


def table(**changes: Any) -> Anomaly:
    plain: dict[str, Any] = {
        "tails": (TAIL, TAIL),
        "power": MAXIMUM,
        "rates": (0.01, 0.1),
        "default": 0.01,
        "good": 99,
        "subsets": [
            SubsetAnomaly(size=1, thresholds=(2.0, 1.0), members=(0,), found=(0.5, 0.75)),
            SubsetAnomaly(size=1, thresholds=(2.5, 1.5)),
        ],
    }
    return Anomaly(**{**plain, **changes})


def test_unlisted_subsets_have_the_thresholds_of_their_size() -> None:
    found = table()
    assert [found.of(one) for one in ((0,), (1,), (0, 1))] == [*found.subsets, None]
    assert found.place == 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Anomaly) == found


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong({"rates": (0.1, 0.01)}, "`rates` have to be distinct and ascending"),
        Wrong({"default": 0.5}, "`default` has to be one of `rates`"),
        Wrong(
            {"subsets": [SubsetAnomaly(size=1, thresholds=(1.0,))]}, "a number for each of `rates`"
        ),
        Wrong(
            {"subsets": [SubsetAnomaly(size=1, thresholds=(2.0, 1.0), found=(0.5,))]},
            "`found` needs a number for each",
        ),
        Wrong(
            {"subsets": [SubsetAnomaly(size=1, thresholds=(2.0, 1.0), members=(7,))]},
            "name a member without a tail",
        ),
        Wrong({"subsets": [SubsetAnomaly(size=1, thresholds=(2.0, 1.0))] * 2}, "the same members"),
    ],
    ids=lambda wrong: wrong.text,
)
def test_a_wrong_table_is_refused(wrong: Wrong) -> None:
    with pytest.raises(ValueError, match=wrong.text):
        table(**wrong.changes)


def test_wrong_parts_of_a_table_are_refused() -> None:
    with pytest.raises(ValueError, match="must not rise"):
        SubsetAnomaly(size=1, thresholds=(1.0, 2.0))
    with pytest.raises(ValueError, match="finite"):
        SubsetAnomaly(size=1, thresholds=(float("nan"),))
    with pytest.raises(ValueError, match="distinct"):
        SubsetAnomaly(size=2, thresholds=(1.0,), members=(1, 0))
    with pytest.raises(ValueError, match="`size`"):
        SubsetAnomaly(size=2, thresholds=(1.0,), members=(0,))
    with pytest.raises(ValueError, match="must not fall"):
        ScoreTail(scores=(1.0, 0.0, 2.0, 3.0), decade=1.0)
    with pytest.raises(ValueError, match="finite"):
        ScoreTail(scores=(0.0, 1.0, 2.0, float("inf")), decade=1.0)
