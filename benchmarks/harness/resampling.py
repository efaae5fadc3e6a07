"""Rounds in which several things take turns, and how sure a ratio of their percentiles is."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

#: Times that the rounds are drawn anew, and the share of the outcomes that an interval holds.
DRAWS = 2000
SHARE = 0.95

Name = TypeVar("Name")
Rounds = Sequence[Sequence[float]]


def in_rounds(
    blocks: Mapping[Name, Callable[[], Sequence[float]]], rounds: int
) -> dict[Name, list[Sequence[float]]]:
    """What each block gives in every round; a first round warms up and is not counted."""
    found: dict[Name, list[Sequence[float]]] = {name: [] for name in blocks}
    for number in range(rounds + 1):
        for name, block in blocks.items():
            values = block()
            if number:
                found[name].append(values)
    return found


def ratio_interval(ours: Rounds, theirs: Rounds, point: float) -> tuple[float, float]:
    """Where `SHARE` of the ratios lie that `point`, a percentile, has in rounds drawn anew.

    Both were measured in the same rounds, so a round is drawn for both: requests of one round are
    alike.
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
