"""Decides whether an item is one of the classes, by one fused answer. Plain functions of arrays.

The novelty score of an answer is a weighted sum of signals, larger for stranger items:

    energy         -log sum exp z of the fused logits z, less their mean over the classes
    doubt          log(1 - p) of the largest probability p of the fused answer
    disagreement   generalized Jensen-Shannon divergence of the members' own probabilities, in nats
    distance       what the fused logits lack on average over the classes: how far the members'
                   features are from those that they were taught, where their models tell it; the
                   farthest member counts as far as the second farthest

The fused answer decides: in each signal a member counts by its share in the fused logits, so one
that sees less counts less, and one alone to which an item looks unknown does not decide: what a
covered camera sees is far from all that it was taught, whatever lies there, while an item of no
class is far for several. Who knows nothing of an item disagrees with nobody. The logits are those
of stacking, whatever rule the answer is fused by: thresholds are fitted to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.fusion.fuse import Contribution, FusionWeights, SubsetWeights, fuse, rule_for, weights_for
from mdp.fusion.novelty_table import Signal

#: The least 1 - p: beyond it single precision has no differences.
_LEAST_DOUBT = 1e-7

Values = NDArray[np.float64]
Logits = NDArray[np.floating[Any]]


class NoveltyScore:
    """Novelty scores of the answers of one arrival subset."""

    def __init__(self, members: Sequence[int], fusion: FusionWeights) -> None:
        """Scores of ascending `members`, for which `fusion` has fitted weights."""
        self._members = tuple(members)
        self._weights = weights_for(members, "stacked", fusion)
        self._alone = [
            weights_for((k,), rule_for((k,), "stacked", fusion), fusion) for k in members
        ]
        self._shares = shares(self._weights, self._alone)

    def of(
        self, contributions: Mapping[int, Contribution], weights: Mapping[Signal, float]
    ) -> Values:
        """Scores `[...]` of logits `[..., C]`, by the signals that `weights` name."""
        whole = np.asarray(fuse(contributions, self._weights), dtype=np.float64)
        # What all classes have in common changes no probability.
        level = whole.mean(axis=-1)
        fused = whole - level[..., np.newaxis]
        found: Values = np.zeros(fused.shape[:-1])
        for signal, weight in weights.items():
            match signal:
                case "energy":
                    value = energy(fused)
                case "doubt":
                    value = doubt(fused)
                case "disagreement":
                    apart = [fuse(contributions, one) for one in self._alone]
                    value = disagreement(np.stack(apart), self._shares)
                case "distance":
                    value = -level - self._excess(contributions)
            found = found + weight * value
        return found

    def _excess(self, contributions: Mapping[int, Contribution]) -> Values:
        """The part `[...]` of the fused distance by which one member is beyond all others."""
        lacks = [-np.mean(contributions[k].bag, axis=-1, dtype=np.float64) for k in self._members]
        apart = np.sort(np.stack(lacks), axis=0)
        if len(apart) == 1:
            return np.zeros(apart.shape[1:])
        fused_by = np.maximum(self._weights.b, 0.0).reshape(-1, *[1] * (apart.ndim - 1))
        found: Values = (fused_by * np.maximum(np.stack(lacks) - apart[-2], 0.0)).sum(axis=0)
        return found


def shares(weights: SubsetWeights, alone: Sequence[SubsetWeights]) -> list[float]:
    """Shares of members in logits that `weights` fuse, of sum 1; none is negative.

    `alone` are each member's weights by itself: what remains is free of the size of its logits.
    """
    ratios = []
    for row, own in enumerate(alone):
        fused_by = sum(max(0.0, part[row]) for part in (weights.a, weights.b) if part)
        ratios.append(fused_by / max(sum(abs(value) for value in (*own.a, *own.b)), 1e-12))
    whole = sum(ratios)
    return [one / whole if whole else 1 / len(ratios) for one in ratios]


def energy(logits: Logits) -> Values:
    """Negative log of the sum of exponentials `[...]` of logits `[..., C]`."""
    z = np.asarray(logits, dtype=np.float64)
    top = z.max(axis=-1)
    found: Values = -top - np.log(np.exp(z - top[..., np.newaxis]).sum(axis=-1))
    return found


def doubt(logits: Logits) -> Values:
    """Logarithm of one minus the largest probability `[...]`, of logits `[..., C]`."""
    rest = -np.expm1(np.asarray(logits, dtype=np.float64).max(axis=-1) + energy(logits))
    found: Values = np.log(np.maximum(rest, _LEAST_DOUBT))
    return found


def disagreement(apart: Logits, by_share: Sequence[float]) -> Values:
    """Generalized Jensen-Shannon divergence `[...]` of the softmax of logits `[M, ..., C]`.

    A member's weight in it is its share, one of `by_share` `[M]`, times its certainty, one minus
    the entropy of its probabilities against that of equal ones. In nats, 0 to log M.
    """
    z = np.asarray(apart, dtype=np.float64)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    own = _entropy(p)
    certainty = np.maximum(1 - own / np.log(p.shape[-1]), 0.0)
    weights = np.asarray(by_share).reshape(-1, *[1] * (own.ndim - 1)) * certainty
    weights /= np.maximum(weights.sum(axis=0), _LEAST_DOUBT)
    of_mean = _entropy((weights[..., np.newaxis] * p).sum(axis=0))
    found: Values = np.maximum(of_mean - (weights * own).sum(axis=0), 0.0)
    return found


def _entropy(p: Values) -> Values:
    """Entropy over the last axis, in nats; classes of probability 0 add nothing."""
    found: Values = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)
    return found
