"""Decides whether an item differs from the good ones, by the members' scores. Plain functions.

A member's score says how far the strangest place of its picture is from the same place of good
items; its unit differs from camera to camera. As its *surprise*, the negative decimal logarithm of
the rate at which good items score so high, it is comparable: 2 is one good item in a hundred.
Beyond what was seen of good items the rate falls exponentially (Pickands, Annals of Statistics 3,
1975, with shape 0).

Surprises are fused by a power mean: the mean (Fisher's sum of logarithms) where all cameras see a
defect, the maximum where one does. A threshold belongs to every arrival subset.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.fusion.anomaly_table import KNOTS, MAXIMUM, ScoreTail

Values = NDArray[np.float64]
Scores = NDArray[np.floating[Any]] | float
#: Decimal logarithms of the knots' rates, negative.
_SURPRISES = tuple(float(-np.log10(share)) for share in KNOTS)
#: No surprise is larger: a picture that is all wrong leaves a power mean finite.
_MOST = 1e3
#: Nineteen of twenty cases of a normal distribution are within so many standard deviations.
_NINETEEN_OF_TWENTY = 1.959964


def surprise(scores: Scores, tail: ScoreTail) -> Values:
    """Surprises `[...]` of a member's scores `[...]`; 0 for those below all good items."""
    x = np.asarray(scores, dtype=np.float64)
    inside = np.interp(x, _ascending(tail.scores), _SURPRISES)
    beyond = _SURPRISES[-1] + (x - tail.scores[-1]) / tail.decade
    found: Values = np.minimum(np.where(x > tail.scores[-1], beyond, inside), _MOST)
    return found


def fuse_surprises(surprises: Sequence[Values], power: int) -> Values:
    """The power mean `[...]` of members' surprises, each `[...]`; `MAXIMUM` is their maximum."""
    u = np.stack([np.asarray(one, dtype=np.float64) for one in surprises])
    if power >= MAXIMUM or len(u) == 1:
        found: Values = u.max(axis=0)
        return found
    top = np.maximum(u.max(axis=0), 1e-12)
    # Divided by the largest, so that no power overflows.
    mean: Values = top * np.mean((u / top) ** power, axis=0) ** (1 / power)
    return mean


def surprises_of(scores: Mapping[int, Scores], tails: Sequence[ScoreTail]) -> dict[int, Values]:
    """Surprises of members' scores, by member."""
    return {k: surprise(one, tails[k]) for k, one in scores.items()}


def share_range(share: float, count: int) -> tuple[float, float]:
    """The range of a share of all items, of which `count` had it in `share`, in 19 of 20 cases.

    It holds for items like those that were measured. Wilson's score interval (Journal of the
    American Statistical Association 22, 1927).
    """
    z = _NINETEEN_OF_TWENTY
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    width = z / (1 + z**2 / count)
    width *= math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - width), min(1.0, centre + width)


def _ascending(scores: Sequence[float]) -> Values:
    """Scores that rise strictly, as interpolation needs."""
    found = np.array(scores, dtype=np.float64)
    step = 1e-9 * max(1.0, float(np.abs(found).max()))
    return found + step * np.arange(len(found))
