"""A linear classifier in closed form, and its accuracy on pictures that it was not fitted to. Pure.

Ridge regression of one-hot labels on standardised features, with an intercept. Its predictions for
pictures left out follow from one decomposition, without fitting again: with the hat matrix H and
the residuals r of all pictures, those of a fold f left out are (I - H_ff)^-1 r_f (the PRESS
residuals; Cook and Weisberg, Residuals and Influence in Regression, 1982, section 2.2). A fold has
a group of every class, and a group is one picture, or all pictures of one scene. Were a group left
out alone, its class would be rarer than the others in that fit, and the classifier worse at it
than the one that is fitted in the end: by 14 points with five pictures of each of 40 classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Penalties that are tried: weights of the squared norm against summed squared errors.
PENALTIES = tuple(float(10**power) for power in np.arange(1.0, 4.01, 0.5))
#: What scores are multiplied by to become logits, the inverse of a temperature.
SHARPNESS = tuple(float(2**power) for power in np.arange(0.0, 6.01, 0.5))
#: Least number of folds where classes are unequal.
_LEAST_FOLDS = 10
#: Up to so many pictures, penalty and sharpness of a part are chosen without it; and the parts.
_FEW, _PARTS = 200, 10
#: Two-sided 90 % quantile of the standard normal distribution.
_NINE_OF_TEN = 1.645
#: Least standard deviation of a feature; one that never changes carries nothing.
_LEAST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Classifier:
    """Logits `weight @ feature + bias` of one feature `[D]`."""

    #: `[C, D]` and `[C]`.
    weight: Array
    bias: Array

    def logits(self, features: Array) -> Array:
        """Logits `[N, C]` of features `[N, D]`."""
        found: Array = features @ self.weight.T + self.bias
        return found


@dataclass(frozen=True, slots=True)
class LabelCalibration:
    """Log-odds of scores where several labels may hold: `scale * score + shift`."""

    #: `[L]`.
    scale: Array
    shift: Array
    #: Log-odds `[L]` of each label's share of the pictures.
    base: Array


@dataclass(frozen=True, slots=True)
class HeldOutPredictions:
    """Predictions for pictures that a classifier was not fitted to."""

    #: Log-probabilities `[N, C]` of each picture, by a classifier fitted to the other folds; where
    #: several labels may hold, weights of evidence `[N, L]` (`truth`).
    answers: Array
    #: The penalty and the sharpness with the least cross-entropy of all.
    penalty: float
    sharpness: float
    #: In place of the sharpness where several labels may hold.
    by_label: LabelCalibration | None = None

    @property
    def logits(self) -> Array:
        """The answers as a model tells them: log-probabilities, or log-odds of each label."""
        return self.answers if self.by_label is None else self.answers + self.by_label.base


def leave_groups_out(
    features: NDArray[np.floating], targets: Index, groups: Index, num_classes: int
) -> HeldOutPredictions:
    """Predict each of the `folds` by a classifier of all others.

    `features` are `[N, D]`, `targets` and `groups` `[N]`. Penalty and sharpness are those with the
    least cross-entropy of the pictures left out. Of few pictures each part is predicted with those
    that are best for the others, without it: else networks that are right on it by chance would be
    the surest, and several together seem better than they are, by 30 points with five pictures of
    two classes that are hard to tell apart.
    """
    scores, losses = _score_left_out(features, targets, groups, num_classes)
    best = int(losses.argmin())
    chosen = np.full(len(targets), best)
    if len(targets) <= _FEW:
        parts = folds(targets, groups) % _PARTS
        for part in np.unique(parts):
            others = parts != part
            if len(np.unique(groups[others])) > 1:
                chosen[~others] = _score_left_out(
                    features[others], targets[others], groups[others], num_classes
                )[1].argmin()
    penalties, sharps = np.divmod(chosen, len(SHARPNESS))
    scores = scores[penalties, np.arange(len(targets))]
    return HeldOutPredictions(
        answers=log_softmax(np.array(SHARPNESS)[sharps, None] * scores),
        penalty=PENALTIES[best // len(SHARPNESS)],
        sharpness=SHARPNESS[best % len(SHARPNESS)],
    )


def _score_left_out(
    features: NDArray[np.floating], targets: Index, groups: Index, num_classes: int
) -> tuple[Array, Array]:
    """Scores `[P, N, C]` of the pictures left out, and the cross-entropy `[P x S]` of them.

    P are the penalties, and S the values of sharpness.
    """
    scores = scores_left_out(features, np.eye(num_classes)[targets], folds(targets, groups))
    every = np.arange(len(targets))
    losses = [
        -float(log_softmax(sharp * one)[every, targets].mean())
        for one in scores
        for sharp in SHARPNESS
    ]
    return scores, np.array(losses)


def scores_left_out(features: NDArray[np.floating], labels: Array, of_fold: Index) -> Array:
    """Scores `[P, N, C]` of each fold by regressions of labels `[N, C]` fitted to the others."""
    x = _standardise(features)[0]
    mean = labels.mean(axis=0)
    u, squares = _singular_vectors(x)
    centred = labels - mean
    projected = u.T @ centred
    blocks, scores = _blocks(of_fold), list[Array]()
    for penalty in PENALTIES:
        shrunk = squares / (squares + penalty)
        residuals = centred - u @ (shrunk[:, None] * projected)
        scores.append(labels - _press(residuals, u, shrunk, blocks, len(x)))
    return np.stack(scores)


def folds(targets: Index, groups: Index) -> Index:
    """The fold `[N]` of each picture: a group of every class, and each group whole.

    There are as many as the rarest class has groups, but at least `_LEAST_FOLDS` where another
    class has so many. A class with fewer groups than folds is in some of them.
    """
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    of_group = targets[first]
    counts = np.unique(of_group, return_counts=True)[1]
    count = max(2, min(counts.max(), max(_LEAST_FOLDS, counts.min())))
    found = np.empty(len(first), dtype=np.int64)
    for number, target in enumerate(np.unique(of_group)):
        places = np.flatnonzero(of_group == target)
        # Each class begins at another fold, so that none has all pictures where classes have one.
        found[places] = (number + np.arange(len(places))) % count
    return found[group]


def fit(
    features: NDArray[np.floating],
    targets: Index,
    num_classes: int,
    *,
    penalty: float,
    sharpness: float,
) -> Classifier:
    """The classifier of features `[N, D]` and targets `[N]`; its softmax gives probabilities."""
    plain = ridge_weights(features, np.eye(num_classes)[targets], penalty)
    return Classifier(weight=sharpness * plain.weight, bias=sharpness * plain.bias)


def ridge_weights(features: NDArray[np.floating], labels: Array, penalty: float) -> Classifier:
    """The ridge regression of labels `[N, C]` on features `[N, D]`."""
    x, mean, scale = _standardise(features)
    centre = labels.mean(axis=0)
    if x.shape[1] <= len(x):
        system = x.T @ x + penalty * np.eye(x.shape[1])
        weight = np.linalg.solve(system, x.T @ (labels - centre))
    else:
        system = x @ x.T + penalty * np.eye(len(x))
        weight = x.T @ np.linalg.solve(system, labels - centre)
    weight = weight / scale[:, None]
    return Classifier(weight=weight.T, bias=centre - mean @ weight)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities `[N, C]`."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def interval(right: int, count: int, tested: int | None = None) -> tuple[float, float]:
    """The range of the share of right answers to many new pictures, in nine of ten cases.

    With `tested`, of so many new ones, whose sampling adds to that of the `count` pictures left
    out, of which `right` were answered rightly. Wilson's score interval, 1927.
    """
    z, share = _NINE_OF_TEN, right / count
    worth = 1 / (1 / count + (1 / tested if tested else 0.0))
    centre = (share + z**2 / (2 * worth)) / (1 + z**2 / worth)
    width = z / (1 + z**2 / worth)
    width *= math.sqrt(share * (1 - share) / worth + z**2 / (4 * worth**2))
    # Of shares of 0 and 1 one end is the share itself, but for rounding.
    return max(0.0, min(share, centre - width)), min(1.0, max(share, centre + width))


def _standardise(features: NDArray[np.floating]) -> tuple[Array, Array, Array]:
    """Features `[N, D]` with mean 0 and variance 1, and their mean and scale `[D]`."""
    x = np.asarray(features, dtype=np.float64)
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), _LEAST_SCALE)
    return (x - mean) / scale, mean, scale


def _singular_vectors(x: Array) -> tuple[Array, Array]:
    """Left singular vectors `[N, R]` and squared singular values `[R]`, by the smaller product."""
    if x.shape[1] <= len(x):
        squares, v = np.linalg.eigh(x.T @ x)
        kept = squares > squares[-1] * 1e-10
        return (x @ v[:, kept]) / np.sqrt(squares[kept]), squares[kept]
    squares, u = np.linalg.eigh(x @ x.T)
    kept = squares > squares[-1] * 1e-10
    return u[:, kept], squares[kept]


def _blocks(fold_of: Index) -> list[Index]:
    """Pictures by fold, `[F, f]` for each size f of a fold."""
    order = np.argsort(fold_of, kind="stable")
    _, counts = np.unique(fold_of, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return [
        order[starts[counts == size][:, None] + np.arange(size)]
        for size in np.unique(counts).tolist()
    ]


def _press(residuals: Array, u: Array, shrunk: Array, blocks: Sequence[Index], count: int) -> Array:
    """Residuals `[N, C]` of each fold by the classifier fitted to the others."""
    found = np.empty_like(residuals)
    for block in blocks:
        part = u[block]  # [F, f, R]
        hat = (part * shrunk) @ part.transpose(0, 2, 1) + 1 / count
        system = np.eye(block.shape[1]) - hat
        found[block] = np.linalg.solve(system, residuals[block])
    return found
