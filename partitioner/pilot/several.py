"""A linear classifier of labels that do not exclude each other, and what it says of others. Pure.

Ridge regression of each label's zeros and ones, in closed form and with pictures left out as in
`linear`. Its scores become log-odds by a scale and a shift of each label, fitted by logistic
regression (Platt, Probabilistic Outputs for Support Vector Machines, 1999) to scores of pictures
left out; those of a part of the pictures by the other parts.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partitioner.pilot.linear import (
    PENALTIES,
    Array,
    Classifier,
    HeldOutPredictions,
    Index,
    LabelCalibration,
    folds,
    ridge_weights,
    scores_left_out,
)
from partitioner.pilot.truth import Flags, base_of

#: Parts whose scale and shift are fitted to the others.
_PARTS = 10
_STEPS, _CONVERGED = 50, 1e-9
#: Keeps scale and shift finite where scores tell a label without an error.
_RIDGE = 1e-3


def leave_out_several(
    features: NDArray[np.floating], held: Flags, targets: Index, groups: Index
) -> HeldOutPredictions:
    """Weights of evidence of every picture by a classifier of the other folds.

    `features` are `[N, D]`, `held` `[N, L]`, `targets` `[N]` the index of each picture's set of
    labels, by which folds are dealt, and `groups` `[N]` are left out whole. The penalty is that
    with the least binary cross-entropy, over all labels.
    """
    of_fold = folds(targets, groups)
    scores = scores_left_out(features, held.astype(np.float64), of_fold)
    parts = of_fold % _PARTS
    logits = [_calibrate_parts(one, held, parts) for one in scores]
    losses = [
        float(np.logaddexp(0, np.where(held, -one, one)).sum(axis=1).mean()) for one in logits
    ]
    best = int(np.argmin(losses))
    scale, shift = calibrate(scores[best], held)
    base = base_of(held)
    return HeldOutPredictions(
        answers=logits[best] - base,
        penalty=PENALTIES[best],
        sharpness=1.0,
        by_label=LabelCalibration(scale, shift, base),
    )


def fit_several(
    features: NDArray[np.floating], held: Flags, penalty: float, by_label: LabelCalibration
) -> Classifier:
    """The classifier of features `[N, D]` and labels `[N, L]`; its logits are log-odds."""
    plain = ridge_weights(features, held.astype(np.float64), penalty)
    return Classifier(
        weight=by_label.scale[:, None] * plain.weight,
        bias=by_label.scale * plain.bias + by_label.shift,
    )


def _calibrate_parts(scores: Array, held: Flags, parts: Index) -> Array:
    """Log-odds `[N, L]` of scores; those of each part by scale and shift of the other parts."""
    logits = np.empty_like(scores)
    names: Sequence[int] = np.unique(parts).tolist()
    for part in names:
        inside = parts == part
        scale, shift = calibrate(scores[~inside], held[~inside])
        logits[inside] = scale * scores[inside] + shift
    return logits


def calibrate(scores: Array, held: Flags) -> tuple[Array, Array]:
    """Scale and shift `[L]` of scores `[N, L]`, by Newton's method, for all labels at once.

    The targets are Platt's, which are never quite 0 or 1.
    """
    count = held.sum(axis=0)
    high, low = (count + 1) / (count + 2), 1 / (len(held) - count + 2)
    wanted = np.where(held, high, low)
    spread = np.maximum(scores.std(axis=0), 1e-9)
    # Of unit size, and from their mean, so that one ridge suits all.
    centre = scores.mean(axis=0)
    unit = (scores - centre) / spread
    scale, shift = np.ones(scores.shape[1]), np.log(wanted.mean(axis=0) / (1 - wanted.mean(axis=0)))
    value = _objective(unit, wanted, scale, shift)
    for _ in range(_STEPS):
        share = 1 / (1 + np.exp(-np.clip(scale * unit + shift, -500, 500)))
        error, curve = share - wanted, share * (1 - share) + 1e-12
        gradient = np.stack([(error * unit).mean(axis=0) + _RIDGE * scale, error.mean(axis=0)])
        first, both, second = (
            (curve * unit**2).mean(axis=0) + _RIDGE,
            (curve * unit).mean(axis=0),
            curve.mean(axis=0),
        )
        determinant = np.maximum(first * second - both**2, 1e-12)
        steps = np.stack(
            [
                (second * gradient[0] - both * gradient[1]) / determinant,
                (first * gradient[1] - both * gradient[0]) / determinant,
            ]
        )
        size = np.ones(len(scale))
        for _ in range(30):
            found = _objective(unit, wanted, scale - size * steps[0], shift - size * steps[1])
            worse = found > value
            if not worse.any():
                break
            size = np.where(worse, size / 2, size)
        kept = found <= value
        scale = np.where(kept, scale - size * steps[0], scale)
        shift = np.where(kept, shift - size * steps[1], shift)
        gained, value = value - np.minimum(found, value), np.minimum(found, value)
        if gained.max() < _CONVERGED:
            break
    # A score never speaks against the label that it was fitted to.
    scale = np.maximum(scale, 0.0) / spread
    return scale, shift - scale * centre


def _objective(unit: Array, wanted: Array, scale: Array, shift: Array) -> Array:
    logits = scale * unit + shift
    losses: Array = (np.logaddexp(0, logits) - wanted * logits).mean(axis=0)
    return losses + _RIDGE / 2 * scale**2
