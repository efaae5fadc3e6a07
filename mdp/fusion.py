"""Contributions of the members that arrived -> one prediction. Plain functions of arrays.

One formula serves every arrival subset S:

    z_S = sum over k in S of (a_Sk * f_k + b_Sk * c_k) + bias_S

with f_k the boost head's and c_k the bag head's logits. Boosting is a = 1, b = 0; bagging is
a = 0, b = 1/|S|; stacking has a, b and bias fitted for that subset on a calibration split.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mdp.files import Record

Logits = NDArray[np.float32]
#: How to combine what arrived; the modes that an answer carries.
Fusion = Literal["stacked", "boosted", "bagged"]
Mode = Literal["boosted", "stacked", "bagged", "single"]
#: Larger weights would only ever overflow: a fit stays within a few hundred.
MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Contribution:
    """One sub-model's logits as fusion sees them, `[..., num_classes]` each."""

    boost: Logits
    bag: Logits


class SubsetWeights(Record, frozen=True):
    """Fitted scalars of one arrival subset; `bias` is empty or has one number per class."""

    members: Annotated[tuple[int, ...], Meta(min_length=1)]
    a: tuple[float, ...]
    b: tuple[float, ...]
    bias: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.members) == len(self.a) == len(self.b):
            raise ValueError("`members`, `a` and `b` need the same length")
        if list(self.members) != sorted(set(self.members)) or self.members[0] < 0:
            raise ValueError("`members` have to be distinct, not negative and ascending")


class FusionWeights(Record, frozen=True):
    """Stacking weights of every arrival subset: the content of a bundle's `fusion.json`."""

    num_classes: Annotated[int, Meta(ge=1)]
    subsets: list[SubsetWeights]
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        for subset in self.subsets:
            if subset.bias and len(subset.bias) != self.num_classes:
                raise ValueError(f"`bias` needs {self.num_classes} numbers, got {len(subset.bias)}")
            # Written so that a NaN is refused too.
            if not np.abs((*subset.a, *subset.b, *subset.bias)).max() <= MAX_WEIGHT:
                raise ValueError(
                    f"weights of members {list(subset.members)} have to be finite and at most "
                    f"{MAX_WEIGHT:g} in size"
                )
        if len({subset.members for subset in self.subsets}) != len(self.subsets):
            raise ValueError("`subsets` list the same members twice")

    def by_members(self) -> dict[tuple[int, ...], SubsetWeights]:
        """The subsets by their ascending member indices."""
        return {subset.members: subset for subset in self.subsets}


def arrival_subsets(members: Iterable[int]) -> list[tuple[int, ...]]:
    """Every non-empty subset, ascending inside, smaller ones first."""
    ordered = sorted(members)
    return [subset for size in range(1, len(ordered) + 1) for subset in combinations(ordered, size)]


def is_boosting_prefix(members: Sequence[int]) -> bool:
    """Whether ascending `members` are 0, 1, ... without a gap, so that their boost heads add up."""
    return list(members) == list(range(len(members)))


def rule_for(members: Sequence[int], wanted: Fusion, *, fitted: bool) -> Fusion:
    """The rule with which ascending `members` are combined when the caller asked for `wanted`.

    `fitted` says whether stacking weights exist for this subset. A boosted sum is only meaningful
    for a boosting prefix; whatever cannot be had falls back to the bag heads, which stand alone.
    """
    if wanted == "boosted" and is_boosting_prefix(members):
        return "boosted"
    if wanted == "stacked" and fitted:
        return "stacked"
    return "bagged"


def mode_of(members: Sequence[int], rule: Fusion) -> Mode:
    """What an answer is called: `single` for one member, else the rule that made it."""
    return "single" if len(members) == 1 else rule


def weights_for(
    members: Sequence[int], rule: Fusion, stacking: Mapping[tuple[int, ...], SubsetWeights]
) -> SubsetWeights:
    """The weights of `rule` for ascending `members`; KeyError where stacking was not fitted."""
    key, size = tuple(members), len(members)
    if rule == "stacked":
        return stacking[key]
    if rule == "boosted":
        return SubsetWeights(members=key, a=(1.0,) * size, b=(0.0,) * size)
    return SubsetWeights(members=key, a=(0.0,) * size, b=(1.0 / size,) * size)


def fuse(contributions: Mapping[int, Contribution], weights: SubsetWeights) -> Logits:
    """Fused logits z_S `[..., num_classes]` of the members that `weights` name."""
    fused: Logits = np.zeros_like(contributions[weights.members[0]].boost, dtype=np.float32)
    for k, a, b in zip(weights.members, weights.a, weights.b, strict=True):
        if a:
            fused += a * contributions[k].boost
        if b:
            fused += b * contributions[k].bag
    if weights.bias:
        fused += np.asarray(weights.bias, dtype=np.float32)
    return fused


def probabilities(logits: Logits) -> Logits:
    """Softmax over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), dtype=np.float32)
