"""Fit the fusion of labels that do not exclude each other, for every arrival subset. Pure.

Of a subset S the fused log-odds of label l are z = sum over k in S of b_k (c_kl - p_l) + p_l + d_l,
with the members' log-odds c and those p of the label's share of the items: each member adds its
weight of evidence, times a scalar that lessens what several members see alike, and p counts once.
The scalars of a subset are one number for all members, or one each where that surely helps; d
corrects a label as far as it does. Their binary cross-entropy is convex, and Newton's method finds
the least. A label holds above one half, or another threshold that surely makes fewer errors.

Thresholds are those with the fewest errors, and not those with the best F1: of a label that a
subset cannot see, which is so with a camera missing, the best F1 is to tell it of every item.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.fusion.fuse import (
    EVEN,
    MAX_WEIGHT,
    Contribution,
    FusionWeights,
    SubsetWeights,
    Temperatures,
    list_subsets,
    sizes_not_listed,
)

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Standard errors by which a gain exceeds 0 that counts, as in `stacking`.
STANDARD_ERRORS = 1.5
#: Parts of the items; each is judged by a fit to the others.
PARTS = 5
#: Standard errors by which a threshold has to make fewer errors than one half: the best of many
#: that are tried, of every label and subset, is often better by chance.
THRESHOLD_ERRORS = 3.0
#: Thresholds that are tried beside one half.
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))
#: Pulls toward the start, in items that say so: of the scalars, and of each label's correction.
_SCALAR_PULL, _SHIFT_PULL = 10.0, 20.0
#: A pull that keeps corrections at none.
_NONE = 1e9
_STEPS, _CONVERGED = 50, 1e-8


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of fitting: one scalar for all members or one each, and the pull on corrections."""

    each: bool
    shift_pull: float


#: From the plainest on; one replaces an earlier one where it is surely better.
_WAYS = (
    _Way(each=False, shift_pull=_NONE),
    _Way(each=False, shift_pull=_SHIFT_PULL),
    _Way(each=True, shift_pull=_NONE),
    _Way(each=True, shift_pull=_SHIFT_PULL),
)


def check_members(count: int) -> None:
    """Raise InputError for more members than have every arrival subset listed."""
    if sizes_not_listed(count):
        raise InputError(
            f"run.labels: several labels an item: expected at most 8 devices, got {count}"
        )


def fit_several_fusion(contributions: Mapping[int, Contribution], held: Flags) -> FusionWeights:
    """Weights and thresholds of every arrival subset, of members' log-odds and labels `[N, L]`.

    Raises InputError for log-odds that are not finite.
    """
    check_members(len(contributions))
    for k, part in contributions.items():
        if not np.isfinite(part.bag).all():
            raise InputError(f"sub-model {k}: expected finite calibration logits, found others")
    subsets = [
        fit_several_subset(contributions, members, held) for members in list_subsets(contributions)
    ]
    return FusionWeights(num_classes=held.shape[1], subsets=subsets)


def fit_several_subset(
    contributions: Mapping[int, Contribution], members: Sequence[int], held: Flags
) -> SubsetWeights:
    """Weights and thresholds of one arrival subset."""
    count = held.sum(axis=0) + 0.5
    base = np.log(count / (len(held) + 1 - count))
    evidence = np.stack([contributions[k].bag.astype(np.float64) - base for k in members])
    part = np.arange(len(held)) % PARTS
    best = _WAYS[0]
    left_out = _left_out(evidence, base, held, part, best)
    for way in _WAYS[1:] if len(held) >= 2 * PARTS else ():
        if way.each and len(members) == 1:
            continue
        found = _left_out(evidence, base, held, part, way)
        if _is_sure(_losses(left_out, held) - _losses(found, held)):
            best, left_out = way, found
    scalars, shift = _fit(evidence, base, held, best)
    bias = base * (1 - scalars.sum()) + shift
    return SubsetWeights(
        members=tuple(members),
        a=(),
        b=tuple(np.clip(scalars, -MAX_WEIGHT, MAX_WEIGHT).tolist()),
        bias=tuple(np.clip(bias, -MAX_WEIGHT, MAX_WEIGHT).tolist()),
        temperatures=Temperatures(),
        thresholds=tuple(
            threshold_of(1 / (1 + np.exp(-np.clip(one, -500, 500))), has)
            for one, has in zip(left_out.T, held.T, strict=True)
        ),
    )


def threshold_of(shares: Values, held: Flags) -> float:
    """The probability above which a label is told to hold, by items left out `[N]`."""
    even = (shares > EVEN) != held
    best, errors = EVEN, int(even.sum())
    for threshold in THRESHOLDS:
        wrong = (shares > threshold) != held
        changed = int((wrong != even).sum())
        if wrong.sum() < errors and even.sum() - wrong.sum() > THRESHOLD_ERRORS * changed**0.5:
            best, errors = threshold, int(wrong.sum())
    return best


def _left_out(
    evidence: Values, base: Values, held: Flags, part: NDArray[np.intp], way: _Way
) -> Values:
    """Log-odds `[N, L]` of every item, by a fit to the other parts."""
    found = np.empty(held.shape)
    for number in np.unique(part).tolist():
        inside = part == number
        outside = ~inside if not inside.all() else inside
        scalars, shift = _fit(evidence[:, outside], base, held[outside], way)
        found[inside] = np.tensordot(scalars, evidence[:, inside], axes=1) + base + shift
    return found


def _losses(logits: Values, held: Flags) -> Values:
    """Binary cross-entropy `[N]` of log-odds `[N, L]`, summed over the labels."""
    found: Values = np.logaddexp(0, np.where(held, -logits, logits)).sum(axis=1)
    return found


def _is_sure(gains: Values) -> bool:
    error = float(gains.std()) / len(gains) ** 0.5
    return bool(float(gains.mean()) > STANDARD_ERRORS * error)


def _fit(evidence: Values, base: Values, held: Flags, way: _Way) -> tuple[Values, Values]:
    """Scalars `[K]` and corrections `[L]` of weights of evidence `[K, N, L]`."""
    together = evidence.sum(axis=0, keepdims=True)
    common, shift = _newton(together, base, held, np.full(1, 1 / len(evidence)), way.shift_pull)
    start = np.repeat(common, len(evidence))
    return _newton(evidence, base, held, start, way.shift_pull) if way.each else (start, shift)


def _newton(
    evidence: Values, base: Values, held: Flags, start: Values, shift_pull: float
) -> tuple[Values, Values]:
    """The scalars `[K]` and corrections `[L]` with the least binary cross-entropy, near `start`.

    The Hessian of the corrections is diagonal, which leaves a system of the scalars alone.
    """
    count = len(held)
    # In items: as much as so many of them would say.
    pull = _SCALAR_PULL / count * np.maximum((evidence**2).sum(axis=2).mean(axis=1) / 4, 1e-9)
    shift_pull = shift_pull / count / 4
    scalars, shift = start.copy(), np.zeros(held.shape[1])

    def objective(b: Values, d: Values) -> float:
        logits = np.tensordot(b, evidence, axes=1) + base + d
        ridge = float(pull @ (b - start) ** 2) / 2 + shift_pull * float(d @ d) / 2
        return float(_losses(logits, held).mean()) + ridge

    value = objective(scalars, shift)
    for _ in range(_STEPS):
        logits = np.tensordot(scalars, evidence, axes=1) + base + shift
        share = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        error, curve = share - held, share * (1 - share)
        gradient = np.einsum("knl,nl->k", evidence, error) / count + pull * (scalars - start)
        shift_gradient = error.mean(axis=0) + shift_pull * shift
        weighted = evidence * curve
        second = np.einsum("knl,jnl->kj", weighted, evidence) / count + np.diag(pull)
        both, diagonal = weighted.mean(axis=1), curve.mean(axis=0) + shift_pull + 1e-12
        system = second - (both / diagonal) @ both.T
        step = np.linalg.solve(system, gradient - both @ (shift_gradient / diagonal))
        shift_step = (shift_gradient - both.T @ step) / diagonal
        size = 1.0
        while (lower := objective(scalars - size * step, shift - size * shift_step)) > value:
            size /= 2
            if size < 1e-6:
                return scalars, shift
        scalars, shift = scalars - size * step, shift - size * shift_step
        gained, value = value - lower, lower
        if gained < _CONVERGED:
            break
    return scalars, shift
