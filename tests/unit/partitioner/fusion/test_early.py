"""Pulls are measured on one set of logits, and hold for it; what that does to others is said."""

import numpy as np
import pytest

from mdp.fusion.early_exit import EarlyRule, early_pairs
from mdp.fusion.fuse import Contribution, Fusion, fuse, rule_for, weights_for
from partitioner.fusion.early_exit_bounds import MIN_PICTURES, early_shares, measure_bounds
from partitioner.fusion.stacking import fit_fusion

pytestmark = pytest.mark.torch

CLASSES = 5


def members(
    pictures: int, seed: int, skill: tuple[float, ...]
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Logits of members that see the target through noise, and the targets."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, CLASSES, pictures)
    truth = np.eye(CLASSES, dtype=np.float32)[targets]

    def head(skill: float) -> np.ndarray:
        return (skill * truth + random.normal(size=truth.shape)).astype(np.float32)

    return {k: Contribution(head(s), head(s)) for k, s in enumerate(skill)}, targets


SKILL = (4.0, 3.0, 0.5)


@pytest.mark.parametrize("fusion", ["stacked", "boosted", "bagged"])
def test_on_the_pictures_that_were_measured_no_early_label_is_another(fusion: Fusion) -> None:
    contributions, targets = members(1000, 1, SKILL)
    weights = fit_fusion(contributions, targets)
    bounds = measure_bounds(contributions, weights)
    assert bounds is not None
    assert bounds.pictures == 1000
    assert [(pull.members, pull.arrived) for pull in bounds.pulls] == early_pairs(3)
    rule, ended = EarlyRule(bounds, weights, fusion), 0
    for possible, arrived in early_pairs(3):
        awaited = [k for k in possible if k not in arrived]
        early = rule.ends({k: contributions[k] for k in arrived}, awaited)
        whole = weights_for(possible, rule_for(possible, fusion, fitted=True), weights)
        own = weights_for(arrived, rule_for(arrived, fusion, fitted=True), weights)
        changed = fuse(contributions, whole).argmax(1) != fuse(contributions, own).argmax(1)
        assert not (early & changed).any()
        ended += int(early.sum())
    assert ended > 0


def test_what_it_does_to_other_pictures_is_counted() -> None:
    contributions, targets = members(1000, 1, SKILL)
    weights = fit_fusion(contributions, targets)
    bounds = measure_bounds(contributions, weights)
    assert bounds is not None
    shares = {
        share.arrived: share for share in early_shares(members(800, 2, SKILL)[0], weights, bounds)
    }
    assert set(shares) == {arrived for possible, arrived in early_pairs(3) if len(possible) == 3}
    # The third member knows next to nothing: awaiting it changes little.
    assert shares[0, 1].ended > 0.3
    assert shares[0, 1].changed <= 0.002
    assert shares[2,].ended < 0.01


def test_too_few_pictures_or_a_single_member_tell_nothing() -> None:
    few, targets = members(MIN_PICTURES - 1, 1, SKILL)
    assert measure_bounds(few, fit_fusion(few, targets)) is None
    one, targets = members(1000, 1, SKILL[:1])
    assert measure_bounds(one, fit_fusion(one, targets)) is None
