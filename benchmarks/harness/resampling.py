"""Rounds of blocks that take turns, and bootstrap intervals of ratios of their percentiles."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

#: Resamplings, and the share of their ratios in an interval.
DRAWS = 2000
SHARE = 0.95

Name = TypeVar("Name")
Rounds = Sequence[Sequence[float]]


def in_rounds(
    blocks: Mapping[Name, Callable[[], Sequence[float]]], rounds: int
) -> dict[Name, list[Sequence[float]]]:
    """Each block's values in every round; a first round warms up and is not counted."""
    found: dict[Name, list[Sequence[float]]] = {name: [] for name in blocks}
    for number in range(rounds + 1):
        for name, block in blocks.items():
            values = block()
            if number:
                found[name].append(values)
    return found


def ratio_interval(ours: Rounds, theirs: Rounds, point: float) -> tuple[float, float]:
    """Bootstrap interval of the ratio of percentiles `point`; requests of a round are alike.

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
