"""How sure a ratio of percentiles is: rounds drawn anew, as requests of one round are alike."""

from collections.abc import Sequence

import numpy as np

#: Times that the rounds are drawn anew, and the share of the outcomes that an interval holds.
DRAWS = 2000
SHARE = 0.95


def ratio_interval(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], point: float
) -> tuple[float, float]:
    """Where `SHARE` of the ratios lie that `point`, a percentile, has in rounds drawn anew.

    Both were measured in the same rounds, so a round is drawn for both.
    """
    draw = np.random.default_rng(0)
    ours_, theirs_ = [np.asarray(block) for block in ours], [np.asarray(block) for block in theirs]
    ratios = []
    for _ in range(DRAWS):
        rounds = draw.integers(0, len(ours_), size=len(ours_))
        a = np.percentile(np.concatenate([ours_[i] for i in rounds]), point)
        b = np.percentile(np.concatenate([theirs_[i] for i in rounds]), point)
        ratios.append(a / b)
    edge = (1 - SHARE) / 2 * 100
    low, high = np.percentile(ratios, [edge, 100 - edge])
    return float(low), float(high)
