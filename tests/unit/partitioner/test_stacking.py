"""The fitted weights: exact derivatives, never worse than their start, and the optimum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.fusion import Contribution, arrival_subsets, fuse, weights_for
from partitioner.stacking import _derivatives, cross_entropy, fit_fusion, fit_subset


def logits(
    seed: int, count: int, classes: int, members: int, noise: float = 1.0
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Noisy contributions `[count, classes]`, on unlike scales, and their targets."""
    random = np.random.default_rng(seed)
    targets = random.integers(classes, size=count)
    truth = np.eye(classes)[targets]

    def head(scale: float) -> np.ndarray:
        return ((truth + noise * random.normal(size=truth.shape)) * scale).astype(np.float32)

    contributions = {
        k: Contribution(boost=head(10.0**-k), bag=head(3.0 * (k + 1))) for k in range(members)
    }
    return contributions, targets


def loss_of(contributions, weights, targets) -> float:
    fused = fuse(contributions, weights)
    return cross_entropy(fused[np.newaxis].astype(np.float64), np.ones(1), targets)


def test_derivatives_match_finite_differences():
    contributions, targets = logits(0, 40, 5, 2)
    basis = np.stack([contributions[0].boost, contributions[1].bag]).astype(np.float64)
    theta, step = np.array([0.3, 0.7]), 1e-5
    gradient, hessian = _derivatives(basis, theta, targets)
    for axis in range(2):
        move = step * np.eye(2)[axis]
        up, down = theta + move, theta - move
        slope = (cross_entropy(basis, up, targets) - cross_entropy(basis, down, targets)) / 2 / step
        bend = _derivatives(basis, up, targets)[0] - _derivatives(basis, down, targets)[0]
        assert gradient[axis] == pytest.approx(slope, rel=1e-5)
        assert hessian[axis] == pytest.approx(bend / 2 / step, rel=1e-5)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 6), st.floats(0, 3))
def test_never_worse_than_the_better_start(seed: int, members: int, classes: int, noise: float):
    contributions, targets = logits(seed, 60, classes, members, noise)
    for subset in arrival_subsets(contributions):
        fitted = fit_subset(contributions, subset, targets)
        plain = [weights_for(subset, rule, {}) for rule in ("boosted", "bagged")]
        best = min(loss_of(contributions, weights, targets) for weights in plain)
        assert loss_of(contributions, fitted, targets) <= best + 1e-6


def test_a_useless_member_gets_little_weight():
    contributions, targets = logits(1, 400, 4, 2, noise=0.5)
    random = np.random.default_rng(2)
    blind = random.normal(size=(400, 4)).astype(np.float32)
    contributions[1] = Contribution(boost=blind, bag=blind[::-1].copy())
    fitted = fit_subset(contributions, (0, 1), targets)
    useful = abs(fitted.a[0]) * contributions[0].boost.std() + (
        abs(fitted.b[0]) * contributions[0].bag.std()
    )
    assert abs(fitted.a[1]) + abs(fitted.b[1]) < 0.1 * useful


def test_weights_stay_finite_where_calibration_has_no_mistake():
    contributions, targets = logits(3, 50, 3, 2, noise=0.0)
    for subset in fit_fusion(contributions, targets).subsets:
        assert np.isfinite([*subset.a, *subset.b]).all()
        assert max(map(abs, (*subset.a, *subset.b))) < 1e4


def test_constant_logits_are_no_trouble():
    flat = np.zeros((20, 3), dtype=np.float32)
    fitted = fit_subset({0: Contribution(flat, flat)}, (0,), np.arange(20) % 3)
    assert np.isfinite([*fitted.a, *fitted.b]).all()


def test_every_subset_is_fitted_and_the_same_again():
    contributions, targets = logits(4, 80, 4, 3)
    fusion = fit_fusion(contributions, targets)
    assert [s.members for s in fusion.subsets] == arrival_subsets(range(3))
    assert fusion == fit_fusion(contributions, targets)
    assert fusion.num_classes == 4
