"""Fitting the latency formula: few groups of terms first, then each term as the points ask. Pure."""

from dataclasses import dataclass

import numpy as np

from partitioner.latency_terms import COLUMN, NAMES, Array

#: What a coarse formula is made of, each with the weight of its terms. The values are weighted by
#: how often the exported graph reads or writes them: 32 times the width for norms, biases, sums,
#: splitting and turning, 13 the hidden layer for the GELU, and so on.
_GROUPS: tuple[dict[str, float], ...] = (
    {"call": 1},
    {"layers": 1},
    {"embedding_macs": 1, "layer_macs": 1, "attention_macs": 1},
    {"width_values": 32, "hidden_values": 13, "map_values": 8, "pixels": 8},
    {"weights": 1},
)
#: With fewer points only the first three groups are told apart, and no term apart from its group.
_MANY_POINTS = 6
#: How strongly a term is held to its group, in points that would say so. Cross-validation hardly
#: sees a difference between none and 0.5 with 40 points; with 14, none doubles the worst errors.
_HOLD = 0.3
#: Relative error that no fit claims to beat: what repeating a measurement differs by.
_LEAST_ERROR = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Coefficients `[terms]` and how unsure they are; see `LatencyModel`."""

    coefficients: Array
    covariance: Array
    error: float


def fit_terms(relative: Array) -> Fitted:
    """The non-negative coefficients whose `relative @ coefficients` is closest to one.

    `relative` `[points, terms]` are the terms over the measured milliseconds.
    """
    count = len(relative)
    groups = _GROUPS if count >= _MANY_POINTS else _GROUPS[:3]
    mixture = np.zeros((len(NAMES), len(groups)))
    for column, group in enumerate(groups):
        for name, weight in group.items():
            mixture[COLUMN[name], column] = weight
    per_group = non_negative_least_squares(relative @ mixture, np.ones(count))
    coarse = mixture @ per_group
    if count < _MANY_POINTS:
        shares = relative @ mixture
        unsure = mixture @ np.linalg.pinv(shares.T @ shares, hermitian=True) @ mixture.T
        return Fitted(coarse, unsure, _left_out_error(shares, shares, per_group))
    # A term is held by its share of the measured time, so that units drop out.
    hold = _HOLD * np.sqrt((relative**2).mean(axis=0))
    system = np.vstack([relative, np.diag(hold)])
    wanted = np.concatenate([np.ones(count), hold * coarse])
    coefficients = non_negative_least_squares(system, wanted)
    unsure = np.linalg.pinv(system.T @ system, hermitian=True)
    return Fitted(coefficients, unsure, _left_out_error(relative, system, coefficients))


def _left_out_error(points: Array, system: Array, coefficients: Array) -> float:
    """Root mean square of each point's relative error, left out of the fit of the used columns.

    `system` are the points' rows and those that hold the coefficients.
    """
    used = coefficients > 0
    inverse = np.linalg.pinv(system[:, used].T @ system[:, used], hermitian=True)
    leverage = np.einsum("ij,jk,ik->i", points[:, used], inverse, points[:, used])
    left_out = (points @ coefficients - 1) / np.maximum(1 - leverage, 0.1)
    return float(np.hypot(_LEAST_ERROR, np.sqrt(np.mean(left_out**2))))


def non_negative_least_squares(a: Array, b: Array) -> Array:
    """The x >= 0 that minimises |a x - b| (Lawson and Hanson, 1974, ch. 23)."""
    from scipy.optimize import nnls

    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    solution: Array = nnls(a / scale, b)[0] / scale
    return solution
