"""Contributions of the members that arrived -> one prediction. Plain functions of arrays.

One formula serves every arrival subset S:

    z_S = sum over k in S of (a_Sk * f_k + b_Sk * c_k) + bias_S

with f_k the boost head's and c_k the bag head's logits. Members trained without boosting have the
bag head alone, and weights without `a`. Boosting is a = 1, b = 0; bagging is a = 0, b = 1/|S|;
stacking has a, b and bias fitted for that subset on a calibration split. Where a size has too many
subsets to list, its subsets share one fitted pair (a_k, b_k) per member. Boosted and bagged logits
are divided by a fitted temperature, which changes no label.

Softmax makes probabilities of z. Of labels that do not exclude each other, z are log-odds, of which
sigmoid makes a probability of each label by itself; it holds above a threshold fitted for S.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from numpy.typing import NDArray

from mdp.files import Record
from mdp.fusion.anomaly_table import Anomaly
from mdp.fusion.novelty_table import Novelty

Logits = NDArray[np.float32]
#: How to combine what arrived; the modes that an answer carries.
Fusion = Literal["stacked", "boosted", "bagged"]
FUSIONS: tuple[str, ...] = get_args(Fusion)
Mode = Literal["boosted", "stacked", "bagged", "single"]
Share = Annotated[float, Meta(ge=0, le=1)]
#: With several labels an item, the probability above which a label holds where none was fitted.
EVEN = 0.5
#: Larger weights would only ever overflow: a fit stays within a few hundred.
MAX_WEIGHT = 1e6
#: A size with more subsets than this is not listed. Up to 8 members every size is; of 16 members
#: one, two, all, all but one and all but two are.
MAX_LISTED = 120


class Contribution(Struct, frozen=True):
    """One sub-model's logits, `[..., num_classes]` per head."""

    #: None where the sub-model has the bag head alone.
    boost: Logits | None
    bag: Logits
    #: Of a model with an anomaly head, `[...]`: how far the strangest place of the picture is from
    #: good items.
    anomaly: NDArray[np.float32] | float | None = None
    #: The same of every place, uint8 `[..., 16, 16]`.
    anomaly_map: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, heads: Sequence[Logits]) -> "Contribution":
        """The logits of the boost head and the bag head, or of the bag head alone."""
        return cls(heads[0] if len(heads) == 2 else None, heads[-1])

    @property
    def heads(self) -> tuple[Logits, ...]:
        """The logits of the boost head, if there is one, and the bag head."""
        return (self.bag,) if self.boost is None else (self.boost, self.bag)


class Temperatures(Record, frozen=True):
    """Divisors of plain boosted and bagged logits, so that their softmax is calibrated.

    Stacking has none: its scalars include it.
    """

    boosted: float = 1.0
    bagged: float = 1.0

    def __post_init__(self) -> None:
        # Written so that a NaN is refused too.
        if not all(1 / MAX_WEIGHT <= value <= MAX_WEIGHT for value in (self.boosted, self.bagged)):
            raise ValueError(f"temperatures have to be {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}")


class SubsetWeights(Record, frozen=True):
    """Fitted scalars of one arrival subset; `bias` is empty or has one number per class."""

    members: Annotated[tuple[int, ...], Meta(min_length=1)]
    #: Empty where no boost head counts.
    a: tuple[float, ...]
    b: tuple[float, ...]
    bias: tuple[float, ...] = ()
    temperatures: Temperatures = Temperatures()
    #: With several labels an item, the probability of each class above which it holds.
    thresholds: tuple[Share, ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if len(self.b) != len(self.members) or len(self.a) not in (0, len(self.b)):
            raise ValueError("`members`, `a` and `b` need the same length, or `a` is empty")
        if list(self.members) != sorted(set(self.members)) or self.members[0] < 0:
            raise ValueError("`members` have to be distinct, not negative and ascending")


class SizeWeights(Record, frozen=True):
    """Fitted scalars that all unlisted subsets of one size share; `a[k]`, `b[k]` are member k's."""

    size: Annotated[int, Meta(ge=1)]
    a: tuple[float, ...]
    b: tuple[float, ...]
    temperatures: Temperatures = Temperatures()

    def __post_init__(self) -> None:
        if len(self.b) < self.size or len(self.a) not in (0, len(self.b)):
            raise ValueError("`a` and `b` need the same length, at least `size`, or `a` is empty")

    def of(self, members: Sequence[int]) -> SubsetWeights:
        """These weights for ascending `members`."""
        return SubsetWeights(
            members=tuple(members),
            a=tuple(self.a[k] for k in members if self.a),
            b=tuple(self.b[k] for k in members),
            temperatures=self.temperatures,
        )


class FusionWeights(Record, frozen=True):
    """Weights of every arrival subset: the content of a bundle's `fusion.json`."""

    num_classes: Annotated[int, Meta(ge=1)]
    subsets: list[SubsetWeights]
    #: For the subsets that are not listed, by their size.
    by_size: tuple[SizeWeights, ...] = ()
    #: With cameras, of each member: in which share of scenes its label is that of the others, at
    #: least (95 % one-sided). Without cameras not written, for clients that predate it.
    agreement: tuple[Share, ...] | UnsetType = UNSET
    #: By which scores an item is none of the classes; not written where that was not fitted.
    novelty: Novelty | UnsetType = UNSET
    #: By which scores an item differs from good ones; not written for models without that head.
    anomaly: Anomaly | UnsetType = UNSET
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        for subset in self.subsets:
            if subset.bias and len(subset.bias) != self.num_classes:
                raise ValueError(f"`bias` needs {self.num_classes} numbers, got {len(subset.bias)}")
            if subset.thresholds and len(subset.thresholds) != self.num_classes:
                raise ValueError(
                    f"`thresholds` need {self.num_classes} numbers, got {len(subset.thresholds)}"
                )
            what = f"members {list(subset.members)}"
            _check_weights(what, (*subset.a, *subset.b, *subset.bias))
        for shared in self.by_size:
            _check_weights(f"size {shared.size}", (*shared.a, *shared.b))
        for scored in self.novelty.subsets if self.novelty else ():
            if scored.members and self.weights_of(scored.members) is None:
                raise ValueError(f"`novelty` has members {list(scored.members)} without weights")
        for place in self.anomaly.subsets if self.anomaly else ():
            if place.members and self.weights_of(place.members) is None:
                raise ValueError(f"`anomaly` has members {list(place.members)} without weights")
        if len({subset.members for subset in self.subsets}) != len(self.subsets):
            raise ValueError("`subsets` list the same members twice")
        if len({shared.size for shared in self.by_size}) != len(self.by_size):
            raise ValueError("`by_size` lists the same size twice")
        if len({len(shared.b) for shared in self.by_size}) > 1:
            raise ValueError("`by_size` needs weights of the same members for every size")
        if len({bool(subset.thresholds) for subset in self.subsets}) > 1:
            raise ValueError("`thresholds` have to be given everywhere or nowhere")
        if self.several and (self.by_size or self.novelty or self.agreement):
            raise ValueError("`thresholds` go with none of `by_size`, `novelty` and `agreement`")
        boosting = {bool(subset.a) for subset in self.subsets}
        if len(boosting | {bool(shared.a) for shared in self.by_size}) > 1:
            raise ValueError("`a` has to be empty everywhere or nowhere")

    @property
    def several(self) -> bool:
        """Tell whether several labels may hold of one item."""
        return any(bool(subset.thresholds) for subset in self.subsets)

    @property
    def rules(self) -> tuple[Fusion, ...]:
        """The rules that can combine these members: `boosted` only where they have boost heads."""
        boosting = any(subset.a for subset in self.subsets)
        return ("boosted", "stacked", "bagged") if boosting else ("stacked", "bagged")

    def weights_of(self, members: Sequence[int]) -> SubsetWeights | None:
        """The weights of ascending `members`: their own, else those of their size, else None."""
        wanted, size = tuple(members), len(members)
        own = next((subset for subset in self.subsets if subset.members == wanted), None)
        if own is not None:
            return own
        shared = next((entry for entry in self.by_size if entry.size == size), None)
        if shared is None or wanted[-1] >= len(shared.b):
            return None
        return shared.of(wanted)


def _check_weights(what: str, weights: Sequence[float]) -> None:
    # Written so that a NaN is refused too.
    if not np.abs(weights).max() <= MAX_WEIGHT:
        raise ValueError(f"weights of {what} have to be finite and at most {MAX_WEIGHT:g} in size")


def sizes_not_listed(count: int) -> list[int]:
    """The sizes of which `count` members have too many subsets to list each; none up to 8."""
    return [size for size in range(1, count + 1) if comb(count, size) > MAX_LISTED]


def list_subsets(members: Iterable[int]) -> list[tuple[int, ...]]:
    """The subsets with weights and a measured accuracy of their own, smaller ones first.

    Every subset of a size with few of them, and each boosting prefix, as only these may be boosted.
    """
    ordered = sorted(members)
    unlisted = sizes_not_listed(len(ordered))
    listed: list[tuple[int, ...]] = []
    for size in range(1, len(ordered) + 1):
        if size not in unlisted:
            listed += combinations(ordered, size)
        elif is_boosting_prefix(ordered[:size]):
            listed.append(tuple(ordered[:size]))
    return listed


def is_boosting_prefix(members: Sequence[int]) -> bool:
    """Tell whether ascending `members` are 0, 1, ... without a gap: their boost heads add up."""
    return list(members) == list(range(len(members)))


def rule_for(members: Sequence[int], wanted: Fusion, fusion: FusionWeights) -> Fusion:
    """The rule that combines ascending `members` when the caller asked for `wanted`.

    `boosted` needs boost heads and a boosting prefix, `stacked` weights fitted to these members;
    else the answer is `bagged`.
    """
    if wanted == "boosted" and wanted in fusion.rules and is_boosting_prefix(members):
        return "boosted"
    if wanted == "stacked" and fusion.weights_of(members) is not None:
        return "stacked"
    return "bagged"


def mode_of(members: Sequence[int], rule: Fusion) -> Mode:
    """The name of an answer: `single` for one member, else the rule that made it."""
    return "single" if len(members) == 1 else rule


def weights_for(members: Sequence[int], rule: Fusion, fusion: FusionWeights) -> SubsetWeights:
    """The weights of `rule` for ascending `members`; KeyError where stacking was not fitted.

    Temperatures that were never fitted are 1.
    """
    key, size = tuple(members), len(members)
    fitted = fusion.weights_of(key)
    if rule == "stacked":
        if fitted is None:
            raise KeyError(key)
        return fitted
    temperatures = Temperatures() if fitted is None else fitted.temperatures
    if rule == "boosted":
        return SubsetWeights(members=key, a=(1 / temperatures.boosted,) * size, b=(0.0,) * size)
    return SubsetWeights(members=key, a=(), b=(1 / (size * temperatures.bagged),) * size)


def fuse(contributions: Mapping[int, Contribution], weights: SubsetWeights) -> Logits:
    """Fused logits z_S `[..., num_classes]` of the members that `weights` name."""
    members = [contributions[k] for k in weights.members]
    heads = [m.boost for m in members if weights.a and m.boost is not None]
    heads += [member.bag for member in members]
    scalars = weights.a + weights.b
    if heads[0].ndim == 1:
        # One picture of a call: a single product is faster than two steps per member.
        fused: Logits = np.array(scalars, dtype=np.float32).dot(np.array(heads))
    else:
        fused = np.zeros_like(heads[0], dtype=np.float32)
        for scalar, head in zip(scalars, heads, strict=True):
            if scalar:
                fused += scalar * head
    if weights.bias:
        fused += np.asarray(weights.bias, dtype=np.float32)
    return fused


def scale_rung(contribution: Contribution, scales: tuple[float, float]) -> Contribution:
    """A lower rung's logits times its factors of boost and bag, for the weights of the top."""
    heads = contribution.heads
    factors = np.array(scales[-len(heads) :], dtype=np.float32)
    return Contribution.of([factor * head for factor, head in zip(factors, heads, strict=True)])


def probabilities(logits: Logits) -> Logits:
    """Softmax over the last axis."""
    shifted = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    return np.asarray(shifted / np.add.reduce(shifted, axis=-1, keepdims=True), dtype=np.float32)


def sigmoid(logits: Logits) -> Logits:
    """Probability of each label by itself, of log-odds."""
    # Of the smaller of both ends, so that none overflows.
    small = np.exp(-np.abs(logits))
    found = np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    return np.asarray(found, dtype=np.float32)


def labels_held(shares: Logits, weights: SubsetWeights) -> NDArray[np.bool_]:
    """Tell whether each label holds `[..., L]`, by probabilities `[..., L]` and the thresholds."""
    thresholds = np.asarray(weights.thresholds or (EVEN,), dtype=np.float32)
    return np.asarray(shares > thresholds)
