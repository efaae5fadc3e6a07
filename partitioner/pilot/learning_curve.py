"""The accuracy that twice as many pictures would bring, from that of fewer. Pure.

Classifiers are fitted to one, two and three quarters of the pictures, and answer the other ones.
Their error falls with the number of pictures roughly as a power law (Hestness et al., Deep Learning
Scaling is Predictable, Empirically, 2017), which is followed to all pictures and to twice as many.
The quarters are of whole groups and have the same share of every class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from partitioner.pilot.blend import Blend
from partitioner.pilot.linear import Array, Index, fit, log_softmax

#: Parts that the groups of every class are dealt into.
PARTS = 4
#: Least groups of a class that counts. With four, of which a quarter is a single one, ten of 24
#: measured gains lay outside of their ranges (docs/lab-log.md).
LEAST_GROUPS = 5
#: Two-sided 90 % quantile of the standard normal distribution.
_NINE_OF_TEN = 1.645
#: Error of the extrapolation itself: its standard deviation, as a share of the gain.
_EXTRAPOLATION = 0.3
#: A gain below this is said to be none.
_NOTHING = 0.005


@dataclass(frozen=True, slots=True)
class CurveMember:
    """Features and rows of one member of an ensemble, and constants of its classifier."""

    #: Features `[N, D]` of all pictures.
    features: NDArray[np.floating]
    #: Rows `[S]` of the pictures that its device answers, of one class from place to place.
    rows: Index
    penalty: float
    sharpness: float
    #: Rows of the network's own classifier, of which no picture is learned; None without any.
    blend: Blend | None = None


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Accuracy, as fractions, against the number of groups to learn from."""

    #: Groups of a class, on average.
    groups: float
    #: Measured with one, two and three quarters of the groups.
    measured: tuple[float, ...]
    #: Gain by twice as many groups, and the ends of a range that it lies in nine times of ten.
    gain: float
    low: float
    high: float


def learning_curve(
    members: Sequence[CurveMember], targets: Index, groups: Index, num_classes: int
) -> LearningCurve | None:
    """The curve of the members together, which add up their log-probabilities.

    `targets` and `groups` `[N]` are those of all pictures. Classes with fewer than
    `LEAST_GROUPS` groups are learned but not counted; None if that leaves none.
    """
    part = _dealt(targets, groups)
    wrong = np.stack(
        [_wrong(members, targets, part, num_classes, count) for count in range(1, PARTS)]
    )
    seen = members[0].rows
    counted = part[seen] >= 0
    if not counted.any():
        return None
    by_group = _means(wrong[:, counted], groups[seen][counted])
    gain, low, high = extrapolate(by_group)
    kept = part >= 0
    count = len(np.unique(groups[kept])) / len(np.unique(targets[kept]))
    return LearningCurve(
        groups=count,
        measured=tuple((1 - by_group.mean(axis=1)).tolist()),
        gain=gain,
        low=low,
        high=high,
    )


def describe(curve: LearningCurve | None, what: str) -> str:
    """One line: what twice as many of `what`, pictures or scenes, would bring."""
    if curve is None:
        return f"twice as many {what}: not predicted, expected {LEAST_GROUPS} {what} of a class"
    gain, low, high = (f"{100 * value:.1f}" for value in (curve.gain, curve.low, curve.high))
    if curve.high < _NOTHING:
        return f"with twice as many {what} no more than +{high} points"
    return f"with twice as many {what} about +{gain} points ({low} to {high})"


def _dealt(targets: Index, groups: Index) -> Index:
    """The part of each picture `[N]`; -1 for classes with too few groups."""
    part = np.full(len(targets), -1)
    _, first, of_group = np.unique(groups, return_index=True, return_inverse=True)
    label = targets[first]
    for place, target in enumerate(np.unique(label)):
        members = np.flatnonzero(label == target)
        if len(members) >= LEAST_GROUPS:
            dealt = np.full(len(first), -1)
            # Another part first for each class, so that all have about the same size.
            dealt[members] = (np.arange(len(members)) + place) % PARTS
            inside = label[of_group] == target
            part[inside] = dealt[of_group[inside]]
    return part


def _wrong(
    members: Sequence[CurveMember], targets: Index, part: Index, num_classes: int, count: int
) -> Array:
    """Share of wrong answers to each picture `[S]` by classifiers of `count` other parts."""
    rows = members[0].rows
    right, wrong = targets[rows], np.zeros((2, len(rows)))
    for chosen in combinations(range(PARTS), count):
        fitted = np.isin(part, (*chosen, -1))
        asked = ~fitted[rows]
        total = np.zeros((int(asked.sum()), num_classes))
        for member in members:
            classifier = fit(
                member.features[fitted],
                targets[fitted],
                num_classes,
                penalty=member.penalty,
                sharpness=member.sharpness,
            )
            if member.blend is not None:
                classifier = member.blend.with_fitted(classifier)
            total += log_softmax(
                classifier.logits(np.asarray(member.features[member.rows[asked]], np.float64))
            )
        wrong[0, asked] += total.argmax(axis=1) != right[asked]
        wrong[1, asked] += 1
    found: Array = wrong[0] / np.maximum(wrong[1], 1)
    return found


def _means(values: Array, groups: Index) -> Array:
    """Means `[K, G]` of values `[K, S]` over the pictures of each group."""
    _, of_group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.stack([np.bincount(of_group, row) / counts for row in values])


def extrapolate(by_group: Array) -> tuple[float, float, float]:
    """The gain by twice as many groups and its range, from errors `[K, G]` of shares of them.

    The logarithm of the error is linear in that of the number of groups: fitted by least squares,
    its error by the spread over the groups.
    """
    shares, count = by_group.shape
    x = np.log(np.arange(1, shares + 1) / PARTS)
    error = np.maximum(by_group.mean(axis=1), 0.5 / count)
    slopes = -(x - x.mean()) / ((x - x.mean()) ** 2).sum()
    power = max(0.0, float(slopes @ np.log(error)))
    level = float(np.exp(np.log(error).mean() + power * x.mean()))
    left = 2.0**-power
    gain = level * (1 - left)
    # The derivative by each logarithm of an error; both level and power depend on it.
    by_log = gain * (1 / shares + x.mean() * slopes) + level * left * np.log(2) * slopes
    spread = np.cov(by_group / error[:, None]) / count
    deviation = np.sqrt(float(by_log @ spread @ by_log) + (_EXTRAPOLATION * gain) ** 2)
    reach = _NINE_OF_TEN * float(deviation)
    return gain, max(0.0, gain - reach), min(level, gain + reach)
