"""Fusion of labels that do not exclude each other, for every arrival subset."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from mdp.errors import InputError
from mdp.fusion.fuse import EVEN, Contribution, FusionWeights, fuse, labels_held, sigmoid
from partitioner.fusion.several_fit import fit_several_fusion, fit_several_subset, threshold_of

COUNT = 600
#: Shares of items that have each label.
SHARES = (0.5, 0.2, 0.1)


def items(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((COUNT, 3)) < SHARES


def member(held: np.ndarray, noise: float, seed: int, blind: Sequence[int] = ()) -> Contribution:
    """Calibrated log-odds of a member that sees every label but those it is blind to."""
    random = np.random.default_rng([seed, 9])
    base = np.log(np.array(SHARES) / (1 - np.array(SHARES)))
    seen = np.where(held, 1.0, -1.0) + noise * random.normal(size=held.shape)
    logits = base + 2 / noise**2 * seen
    logits[:, list(blind)] = base[list(blind)]
    return Contribution(None, logits.astype(np.float32))


def right(weights: FusionWeights, parts: dict[int, Contribution], held: np.ndarray) -> list[float]:
    found = []
    for subset in weights.subsets:
        told = labels_held(sigmoid(fuse(parts, subset)), subset)
        found.append(float((told == held).all(axis=1).mean()))
    return found


def parts_of(held: np.ndarray, seed: int) -> dict[int, Contribution]:
    return {k: member(held, 1.2 + 0.2 * k, seed + k) for k in range(3)}


def test_every_subset_is_fitted_and_more_members_are_better_on_other_items() -> None:
    held, later = items(), items(seed=1)
    weights = fit_several_fusion(parts_of(held, 10), held)
    assert weights.several
    assert [subset.members for subset in weights.subsets] == [
        (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)
    ]  # fmt: skip
    shares = right(weights, parts_of(later, 20), later)
    assert shares[-1] > max(shares[:3]) + 0.05
    assert shares[-1] > max(shares[3:6])


def test_independent_members_add_their_evidence_and_equal_ones_share_it() -> None:
    held = items()
    apart = {0: member(held, 1.5, 1), 1: member(held, 1.5, 2)}
    same = {0: apart[0], 1: apart[0]}
    independent = fit_several_subset(apart, (0, 1), held)
    alike = fit_several_subset(same, (0, 1), held)
    assert sum(independent.b) == pytest.approx(2.0, abs=0.4)
    assert sum(alike.b) == pytest.approx(1.0, abs=0.25)


def test_a_label_that_a_subset_cannot_see_is_told_of_no_item() -> None:
    held = items()
    parts = {0: member(held, 1.0, 1, blind=(2,)), 1: member(held, 1.0, 2)}
    weights = fit_several_fusion(parts, held)
    blind, both = weights.subsets[0], weights.subsets[2]
    told = labels_held(sigmoid(fuse(parts, blind)), blind)
    assert not told[:, 2].any()
    assert told[:, 0].any()
    assert labels_held(sigmoid(fuse(parts, both)), both)[held[:, 2], 2].mean() > 0.3


def test_probabilities_are_calibrated() -> None:
    held, later = items(), items(seed=1)
    # Members that are twice as sure as they should be.
    sure = {k: Contribution(None, 2 * one.bag) for k, one in parts_of(held, 10).items()}
    subset = fit_several_fusion(sure, held).subsets[-1]
    asked = {k: Contribution(None, 2 * one.bag) for k, one in parts_of(later, 20).items()}
    shares = sigmoid(fuse(asked, subset))
    assert shares.mean(axis=0) == pytest.approx(later.mean(axis=0), abs=0.04)


def test_a_threshold_moves_only_where_that_surely_makes_fewer_errors() -> None:
    random = np.random.default_rng(0)
    shares = random.random(2000)
    assert threshold_of(shares, random.random(2000) < shares) == EVEN
    # Told with half of their probability.
    assert threshold_of(shares / 2, random.random(2000) < shares) == pytest.approx(0.25, abs=0.06)
    # By chance of many labels none is moved.
    for seed in range(40):
        random = np.random.default_rng(seed)
        shares = random.random(150)
        assert threshold_of(shares, random.random(150) < shares) == EVEN
    few = np.array([0.45, 0.1, 0.2])
    assert threshold_of(few, np.array([True, False, False])) == EVEN


def test_few_items_are_enough_to_stay_near_the_mean() -> None:
    held = items()[:6]
    parts = {k: Contribution(None, one.bag[:6]) for k, one in parts_of(items(), 10).items()}
    subset = fit_several_subset(parts, (0, 1, 2), held)
    assert np.isfinite([*subset.b, *subset.bias]).all()
    assert len(set(subset.b)) == 1


def test_logits_that_are_not_finite_are_refused() -> None:
    held = items()
    parts = {0: Contribution(None, np.full((COUNT, 3), np.nan, np.float32))}
    with pytest.raises(InputError, match="sub-model 0: expected finite calibration logits"):
        fit_several_fusion(parts, held)


def test_more_devices_than_have_every_subset_listed() -> None:
    held = items()
    parts = dict.fromkeys(range(9), member(held, 1.0, 1))
    told = "run.labels: several labels an item: expected at most 8 devices, got 9"
    with pytest.raises(InputError, match=re.escape(told)):
        fit_several_fusion(parts, held)
