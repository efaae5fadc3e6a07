"""What a sub-model of some size is worth, alone and beside others: a law with few constants. Pure.

A model's *capability* is minus the logarithm of its share of wrong answers. With `C` the
teacher's, a sub-model has

    c = C * exp(-C * (width * log W/w + depth * log D/d + tokens * log N/n
                      + detail * log R/r + area * log 1/a))

where w, d, n are its width, depth and tokens, r the pixels of its picture along the side of the
square, a the share of the square that it sees, and capitals are the teacher's. A teacher that is
right on half of the pictures loses little by being made smaller, one that is nearly always right
loses much; that is the factor C in the exponent. Members that arrive together have

    c(S) = (sum over k in S of s_k * c_k ** p) ** (1 / p)

in which a part of every sum counts only the best of those that see the same picture, the same
region of it, or are built alike. So c(S) grows with each member's capability and never falls when a
member is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Region, Spec, SubModelSpec
from mdp.formats.profile import Precision
from partitioner.estimates.catalogue import network_of

Array = NDArray[np.float64]
#: Names of a shape's features, in the order of the law's exponents.
FEATURES = ("width", "depth", "tokens", "detail", "area")
WHOLE = Region()
#: The family of members that are cut from the teacher.
PLAIN_VIT = "plain ViT"
#: By how much planning takes a quantised member to be more often wrong: what the gate of
#: quantisation allows the whole answer to lose by default, taken for each member. The others keep
#: at least half of fp32's digits in every product and are taken to lose nothing.
QUANTISATION_LOSS: dict[Precision, float] = {"int8": 0.005, "int8-static": 0.005}


class AccuracyLaw(Record, frozen=True):
    """The law's constants, none of them negative."""

    #: Exponents of `FEATURES`.
    exponents: tuple[float, float, float, float, float]
    #: p: the larger, the less do members of equal capability add to each other.
    sharpness: float
    #: Share of a member's part that only the best of those with the same view adds, and of those
    #: with the same width and depth.
    same_view: float
    same_model: float
    #: The same of those with the same region, whatever their picture size.
    same_region: float = 0.0

    @property
    def own(self) -> float:
        """Share of its part that every member adds, whatever the others are."""
        return 1 - self.same_view - self.same_model - self.same_region


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as the law sees it: its capability, and what it has in common with others."""

    capability: float
    view: object
    model: object
    region: object = None


def view_of(spec: Spec, region: Region = WHOLE) -> tuple[int, Region]:
    """What makes two members see the same: picture size and region."""
    return (spec.image_size, region)


def model_of(spec: Spec) -> str:
    """What makes two members be built alike: their family; a network of none is its own."""
    if isinstance(spec, NetworkSpec):
        network = network_of(spec)
        return spec.name if network is None else network.family
    return PLAIN_VIT


def features(
    teacher: SubModelSpec, specs: Sequence[SubModelSpec], regions: Sequence[Region] | None = None
) -> Array:
    """`[n, 5]`: logarithms of how much smaller each shape is than the teacher."""
    seen = regions or [WHOLE] * len(specs)
    most = teacher.image_size
    rows = np.array([_sizes(s, r, most) for s, r in zip(specs, seen, strict=True)])
    logs: Array = np.log(np.array(_sizes(teacher, WHOLE, most))) - np.log(
        rows.reshape(-1, len(FEATURES))
    )
    return logs


def _sizes(spec: SubModelSpec, region: Region, most_detail: int) -> tuple[float, ...]:
    hidden = int(spec.embed_dim * spec.mlp_ratio)
    # The width whose layers have as many weights at the usual MLP ratio of 4.
    width = (spec.embed_dim * (4 * spec.embed_dim + 2 * hidden) / 12) ** 0.5
    tokens = (spec.image_size // spec.patch_size) ** 2 + 1
    area = (region.right - region.left) * (region.bottom - region.top)
    # A part of the square is seen closer, which counts up to what the teacher sees.
    detail = max(spec.image_size, min(spec.image_size / area**0.5, most_detail))
    return (width, float(spec.depth), float(tokens), detail, area)


def capability_of(accuracy: float) -> float:
    """Minus the logarithm of the share of wrong answers, of an accuracy below 1."""
    return float(-np.log1p(-accuracy))


def capabilities(law: AccuracyLaw, teacher_accuracy: float, shrinkage: Array) -> Array:
    """Capability `[n]` of sub-models whose `features` are `shrinkage[n, 5]`."""
    top = capability_of(teacher_accuracy)
    values: Array = top * np.exp(-top * (shrinkage @ np.array(law.exponents)))
    return values


def accuracy_of(capability: Array, num_classes: int) -> Array:
    """Share of right answers, at least that of guessing."""
    values: Array = np.maximum(-np.expm1(-capability), 1 / num_classes)
    return values


def together(law: AccuracyLaw, members: Sequence[Member]) -> float:
    """Capability of members that all arrived; 0 of none."""
    if not members:
        return 0.0
    best = max(member.capability for member in members)
    if best <= 0:
        return 0.0
    total = 0.0
    best_of: list[dict[object, float]] = [{}, {}, {}]
    for member in members:
        part = (member.capability / best) ** law.sharpness
        total += part
        for known, key in zip(best_of, (member.view, member.model, member.region), strict=True):
            known[key] = max(known.get(key, 0.0), part)
    total *= law.own
    for share, known in zip((law.same_view, law.same_model, law.same_region), best_of, strict=True):
        total += share * sum(known.values())
    return float(best * total ** (1 / law.sharpness))
