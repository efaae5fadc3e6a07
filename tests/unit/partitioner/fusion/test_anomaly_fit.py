"""Tails, thresholds and fusion of anomaly scores, by good items alone."""

import numpy as np
import pytest

from mdp.errors import InputError
from mdp.fusion.anomaly import fuse_surprises, surprise, surprises_of
from mdp.fusion.anomaly_table import MEAN, Anomaly, ScoreTail
from partitioner.fusion.anomaly_fit import (
    Values,
    fit_anomaly,
    fit_tails,
    lone_sides,
    suspicious,
    tail_thresholds,
)


def good(count: int = 400, members: int = 3, seed: int = 0) -> dict[int, Values]:
    """Scores whose units differ from member to member."""
    random = np.random.default_rng(seed)
    return {k: (k + 1) * (2 + random.exponential(0.3, count)) for k in range(members)}


CAMERAS = {0: "left", 1: "right", 2: "top"}


def fit_tail(scores: Values) -> ScoreTail:
    """The tail of a member that is alone."""
    (tail,) = fit_tails({0: scores})
    return tail


def decades(units: tuple[float, ...], seed: int, count: int = 100) -> list[float]:
    """Decades of members' tails, each over the unit of its scores."""
    random = np.random.default_rng(seed)
    scores = {k: unit * (2 + random.exponential(0.3, count)) for k, unit in enumerate(units)}
    return [one.decade / unit for one, unit in zip(fit_tails(scores), units, strict=True)]


def test_members_that_are_alike_share_a_tail() -> None:
    # A tail of its own differs by a sixth from seed to seed.
    shared = [decades((1, 1, 1, 1), seed) for seed in range(40)]
    own = [decades((1,), seed)[0] for seed in range(40)]
    assert np.std([one[0] for one in shared]) < 0.75 * np.std(own)
    # Of most seeds the members' spreads differ as chance has them.
    assert np.median([max(one) / min(one) for one in shared]) < 1.05


def test_members_of_other_units_keep_a_scale_of_their_own() -> None:
    found = np.mean([decades((1, 2, 3, 0.5), seed) for seed in range(20)], axis=0)
    assert found == pytest.approx(0.3 * np.log(10), rel=0.12)


@pytest.mark.parametrize("count", [20, 40, 120])
def test_a_threshold_rejects_the_share_that_it_is_made_for(count: int) -> None:
    random = np.random.default_rng(0)
    rejected, spread = [], []
    for _ in range(2000):
        scores = random.exponential(1.0, count)
        (limit,) = tail_thresholds(scores, [1])
        # The share of further items above it, which are exponential.
        rejected.append(np.exp(-limit))
        spread.append([limit, scores.max()])
    assert np.mean(rejected) == pytest.approx(1 / (count + 1), rel=0.06)
    by_tail, by_largest = np.std(spread, axis=0)
    assert by_tail < 0.9 * by_largest


def test_thresholds_fall_with_the_rate_to_those_of_what_was_seen() -> None:
    scores = np.random.default_rng(0).exponential(1.0, 100)
    limits = tail_thresholds(scores, range(1, 60))
    assert limits == sorted(limits, reverse=True)
    assert limits[20:] == np.sort(scores)[::-1][20:59].tolist()


def test_a_tail_tells_how_rare_a_score_is() -> None:
    random = np.random.default_rng(1)
    tail = fit_tail(random.exponential(1.0, 2000))
    # One in a thousand exponential numbers is above 6.9.
    assert surprise(6.9, tail) == pytest.approx(3.0, abs=0.35)


def test_a_few_defects_among_good_items_hardly_change_a_tail() -> None:
    scores = np.random.default_rng(1).exponential(1.0, 400)
    with_defects = np.concatenate([scores, np.full(8, 50.0)])
    assert fit_tail(with_defects).decade == pytest.approx(fit_tail(scores).decade, rel=0.35)


def test_equal_scores_have_a_tail() -> None:
    tail = fit_tail(np.ones(50))
    assert surprise(1.0, tail) <= 1.0
    assert surprise(1.1, tail) > 3.0


def test_members_of_one_camera_see_a_defect_together() -> None:
    usual, strange = good(), good(seed=5)
    alone = lone_sides(usual, strange, CAMERAS)
    for place, k in enumerate(sorted(usual)):
        seen = np.arange(len(usual[k])) % len(usual) == place
        assert np.array_equal(alone[k], np.where(seen, strange[k], usual[k]))
    # Of single pictures all see it.
    together = lone_sides(usual, strange, dict.fromkeys(usual))
    assert all(np.array_equal(together[k], strange[k]) for k in usual)


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_further_good_items_are_rejected_at_the_rate(rate: float) -> None:
    first = good()
    table = fit_anomaly(first, lone_sides(first, good(seed=5), CAMERAS), rate=rate)
    assert table.default <= rate
    more = surprises_of(good(20_000, seed=9), table.tails)
    for one in table.subsets:
        fused = fuse_surprises([more[k] for k in one.members], table.power)
        assert (fused > one.thresholds[table.place]).mean() == pytest.approx(rate, abs=0.02)


def chosen(strange: dict[int, Values]) -> Anomaly:
    return fit_anomaly(good(), strange, rate=0.01, measured=strange)


def test_what_one_camera_sees_is_fused_by_the_maximum_and_what_all_see_by_the_mean() -> None:
    usual = good(seed=3)
    lone = {
        k: np.where(np.arange(400) % 3 == k, one + 3 * (k + 1), one) for k, one in usual.items()
    }
    every = {k: one + 0.35 * (k + 1) for k, one in usual.items()}
    assert chosen(lone).power >= 4
    assert chosen(every).power in (MEAN, 2)


def test_each_camera_adds_and_a_missing_one_is_a_blind_side() -> None:
    usual = good(seed=3)
    lone = {
        k: np.where(np.arange(400) % 3 == k, one + 9 * (k + 1), one) for k, one in usual.items()
    }
    table = chosen(lone)
    found = {one.members: one.found[table.place] for one in table.subsets}
    assert found[0,] == pytest.approx(1 / 3, abs=0.05)
    assert found[0, 1] == pytest.approx(2 / 3, abs=0.05)
    assert found[0, 1, 2] == pytest.approx(1.0, abs=0.02)
    assert table.defective == 400


def test_too_few_good_items_for_a_rate_are_said() -> None:
    notes: list[str] = []
    few = good(30)
    table = fit_anomaly(few, few, rate=0.01, note=notes.append)
    assert table.default == pytest.approx(1 / 31, abs=1e-6)
    assert notes == [
        "good scenes: 30 support no rate of rejected good items below 3.23%, which is taken: "
        "1.00% takes 99"
    ]


@pytest.mark.parametrize("rate", [0.009, 0.007, 0.02, 0.1])
def test_as_many_good_items_as_are_said_support_a_rate(rate: float) -> None:
    notes: list[str] = []
    few = good(20, members=1)
    fit_anomaly(few, few, rate=rate / 3, note=notes.append)
    count = int(notes[0].rpartition(" takes ")[2].replace(",", ""))
    again: list[str] = []
    enough = good(count, members=1)
    table = fit_anomaly(enough, enough, rate=rate / 3, note=again.append)
    assert (again, table.default <= rate / 3) == ([], True)
    fewer = good(count - 1, members=1)
    assert fit_anomaly(fewer, fewer, rate=rate / 3).default > rate / 3


def test_too_few_good_items_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected at least 20 good scenes .* got 19"):
        fit_anomaly(good(19), good(19), rate=0.01)


def test_good_items_with_defects_are_found_the_strangest_first() -> None:
    scores = good(200)
    assert suspicious(scores) == []
    scores[1][17] += 40
    scores[2][60] += 90
    assert suspicious(scores) == [60, 17]


def test_many_members_have_thresholds_by_size() -> None:
    many = good(60, members=10)
    table = fit_anomaly(many, many, rate=0.05)
    pooled = table.of((1, 3, 5, 7, 9))
    assert pooled is not None
    assert pooled.members == ()
    assert table.of(tuple(range(10))) in table.subsets
