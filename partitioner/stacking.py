"""Fit the stacking weights of every arrival subset on calibration logits. Plain numpy.

For a subset S the fused logits z = sum over k of (a_k f_k + b_k c_k) are linear in the 2|S|
scalars, so their cross-entropy is convex in them and Newton's method finds the best ones. Scalars
and not matrices: with a calibration split of ordinary size a full matrix per subset overfits.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.fusion import Contribution, FusionWeights, SubsetWeights, arrival_subsets

#: Pull toward the starting point, relative to each weight's curvature there; it keeps the weights
#: finite where the calibration split is classified without a mistake.
RIDGE = 1e-2
_MAX_STEPS = 50
_CONVERGED = 1e-9

Values = NDArray[np.float64]


def fit_fusion(
    contributions: Mapping[int, Contribution], targets: NDArray[np.int64], *, ridge: float = RIDGE
) -> FusionWeights:
    """Weights of every arrival subset from contributions `[N, C]` and targets `[N]`."""
    subsets = [fit_subset(contributions, m, targets, ridge) for m in arrival_subsets(contributions)]
    return FusionWeights(num_classes=contributions[0].bag.shape[1], subsets=subsets)


def fit_subset(
    contributions: Mapping[int, Contribution],
    members: Sequence[int],
    targets: NDArray[np.int64],
    ridge: float = RIDGE,
) -> SubsetWeights:
    """Weights of one subset: from the better of boosting and bagging, never with a higher loss.

    Both starting points get the temperature that suits them, so that only their shape competes.
    """
    size = len(members)
    parts = [contributions[k].boost for k in members] + [contributions[k].bag for k in members]
    basis = np.stack([np.asarray(part, dtype=np.float64) for part in parts])
    starts = [np.r_[np.ones(size), np.zeros(size)], np.r_[np.zeros(size), np.full(size, 1 / size)]]
    tempered = [start * _temperature(basis, start, targets) for start in starts]
    start = min(tempered, key=lambda theta: cross_entropy(basis, theta, targets))
    theta = _newton(basis, start, targets, ridge)
    if cross_entropy(basis, theta, targets) > cross_entropy(basis, start, targets):
        theta = start
    return SubsetWeights(
        members=tuple(members),
        a=tuple(float(value) for value in theta[:size]),
        b=tuple(float(value) for value in theta[size:]),
    )


def cross_entropy(basis: Values, theta: Values, targets: NDArray[np.int64]) -> float:
    """Mean negative log-likelihood of `targets[N]` under logits theta[P] . basis[P, N, C]."""
    z = np.tensordot(theta, basis, axes=1)
    return float((_log_sum_exp(z) - z[np.arange(len(targets)), targets]).mean())


def _temperature(basis: Values, theta: Values, targets: NDArray[np.int64]) -> float:
    """The factor by which logits theta . basis are best multiplied, at least slightly positive."""
    fused = np.tensordot(theta, basis, axes=1)[np.newaxis]
    # Start near logits of unit size: from far away the softmax is flat and Newton would crawl.
    first = 1 / max(float(fused.std()), 1e-12)
    factor = float(_newton(fused, np.array([first]), targets, RIDGE)[0])
    return max(factor, 1e-3 * first)


def _newton(basis: Values, start: Values, targets: NDArray[np.int64], ridge: float) -> Values:
    """Minimise cross-entropy plus a ridge toward `start`, by damped Newton steps."""
    theta, curvature = start, _derivatives(basis, start, targets)[1]
    pull = ridge * np.diag(curvature) + 1e-12

    def objective(point: Values) -> float:
        return cross_entropy(basis, point, targets) + float(pull @ (point - start) ** 2) / 2

    value = objective(theta)
    for _ in range(_MAX_STEPS):
        gradient, hessian = _derivatives(basis, theta, targets)
        gradient = gradient + pull * (theta - start)
        step = np.linalg.solve(hessian + np.diag(pull), gradient)
        share = 1.0
        while (lower := objective(theta - share * step)) > value and share > 1e-6:
            share /= 2
        if value - lower < _CONVERGED:
            break
        theta, value = theta - share * step, lower
    return theta


def _derivatives(basis: Values, theta: Values, targets: NDArray[np.int64]) -> tuple[Values, Values]:
    """Gradient `[P]` and Hessian `[P, P]` of `cross_entropy`."""
    z = np.tensordot(theta, basis, axes=1)
    p = np.exp(z - _log_sum_exp(z)[:, np.newaxis])
    mean = (basis * p).sum(axis=2)
    chosen = basis[:, np.arange(len(targets)), targets]
    second = np.tensordot(basis * p, basis, axes=([1, 2], [1, 2]))
    count = len(targets)
    return (mean - chosen).mean(axis=1), (second - mean @ mean.T) / count


def _log_sum_exp(z: Values) -> Values:
    top = z.max(axis=1)
    total: Values = top + np.log(np.exp(z - top[:, np.newaxis]).sum(axis=1))
    return total
