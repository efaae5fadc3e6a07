"""Measure answers of labels that do not exclude each other. Pure."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mdp.formats.bundle import PerRule, SubsetAccuracy, SubsetLabels
from mdp.fusion.fuse import (
    EVEN,
    Contribution,
    Fusion,
    FusionWeights,
    Logits,
    fuse,
    labels_held,
    list_subsets,
    sigmoid,
    weights_for,
)

Flags = NDArray[np.bool_]


def all_right(told: Flags, held: Flags) -> float:
    """Share of the items `[N, L]` of which every label is told as it is."""
    return float((told == held).all(axis=1).mean())


def own_accuracy(logits: Logits, held: Flags) -> float:
    """That share of a member's own log-odds `[N, L]`."""
    return all_right(sigmoid(logits) > EVEN, held)


def labels_calibration_error(shares: Logits, held: Flags, bins: int) -> float:
    """Distance of labels' probabilities `[N, L]` from the share that holds, over bins of them."""
    flat, has = shares.astype(np.float64).ravel(), held.ravel()
    index = np.clip(np.ceil(flat * bins).astype(np.int64) - 1, 0, bins - 1)
    distance = np.bincount(index, weights=has - flat, minlength=bins)
    return float(np.abs(distance).sum() / len(flat))


def measure_several(
    contributions: Mapping[int, Contribution], fusion: FusionWeights, held: Flags, bins: int
) -> tuple[list[SubsetAccuracy], list[SubsetLabels]]:
    """Every arrival subset under each rule, and its stacked answers label by label.

    `contributions` are log-odds `[N, L]` of items with these labels.
    """
    accuracies, by_label = [], []
    for members in list_subsets(contributions):
        shares, told = dict[Fusion, Logits](), dict[Fusion, Flags]()
        for rule in fusion.rules:
            weights = weights_for(members, rule, fusion)
            shares[rule] = sigmoid(fuse(contributions, weights))
            told[rule] = labels_held(shares[rule], weights)
        accuracies.append(
            SubsetAccuracy(
                members=members,
                ece=PerRule(
                    **{
                        rule: labels_calibration_error(one, held, bins)
                        for rule, one in shares.items()
                    }
                ),
                **{rule: all_right(one, held) for rule, one in told.items()},
            )
        )
        by_label.append(label_shares(members, told["stacked"], held))
    return accuracies, by_label


def label_shares(members: tuple[int, ...], told: Flags, held: Flags) -> SubsetLabels:
    """Precision and recall of each label, told `[N, L]`, where each holds of some items."""
    both, named, has = (told & held).sum(axis=0), told.sum(axis=0), held.sum(axis=0)
    return SubsetLabels(
        members=members,
        precision=tuple(
            float(right / count) if count else None
            for right, count in zip(both, named, strict=True)
        ),
        recall=tuple((both / np.maximum(has, 1)).tolist()),
        each=float((told == held).mean()),
    )
