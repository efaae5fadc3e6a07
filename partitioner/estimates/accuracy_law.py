"""Accuracy of a member of some size, alone and beside others: a law with few constants. Pure.

A model's *capability* c is minus the logarithm of its share of wrong answers, its *lack* 1/c. With
L the teacher's lack on the user's pictures, a member of the same training has

    l = L + k * (p - P)

where p and P are what member and teacher lack on ImageNet-1k: of a plain ViT, by its shape,

    p = level + scale * (w/384)**-width * (d/12)**-depth * (n/197)**-tokens

for width w, depth d and n tokens (ViT-S/16 at 224 px has 384, 12 and 197), of a public network,
what it was published with, and `blur * (s/r)**2` more where it sees r instead of s pixels along the
side. ImageNet-1k's thousand classes at 224 px ask for more than few classes or small pictures do:

    k = (classes / 1000)**classes * (pixels of the teacher / 224)**pixels

A training of n pictures (times epochs) leaves something to learn, by where it starts:

    l = sqrt(l**2 + sqrt(k) * start**2 * 100,000 / n)

A part of the square of area a costs `area * log(1/a)` more. A network with public weights as they
are, untouched, has no training to make up for fewer pixels than it was published with, whatever the
task, and a part with sides f shows it as many as the whole at r/f:

    l = L + k * (p - P) + blur * b(r/f) + untouched_area * log(1/a)

with b(r) = max(0, (s/r)**2 - 1) and p as published. It is the most that a member lacks whose
classifier starts as rows of the public one. So no part is taken to be better than the whole at the
same pixels per picture, nor, of trained members, at the same picture size. Members that arrive
together have

    c(S) = (sum over k in S of s_k * c_k ** p) ** (1 / p)

in which a part of every sum counts only the best of those that see the same picture or are of one
family. So c(S) grows with each member's capability and never falls when a member is added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Region, Spec, SubModelSpec
from mdp.formats.profile import Precision
from partitioner.estimates.catalogue import catalogue, network_of
from partitioner.estimates.macs import macs
from partitioner.regions import WHOLE

Array = NDArray[np.float64]
Start = Literal["cut", "pretrained", "scratch"]
#: In a training's place: public weights as they are.
Untouched = Literal["untouched"]
#: ViT-S/16 at 224 px: width, depth, tokens, and pixels along a patch.
_VIT_S = (384.0, 12.0, 197.0, 16.0)
#: What patches of e times fewer pixels along the side lack at the same number of tokens: a guess,
#: for hardly a recipe was published with both.
_DETAIL = 0.015
#: What ImageNet-1k is: classes, and pixels along the side that it is mostly published at.
PUBLISHED_CLASSES, _PIXELS = 1000, 224
#: Pictures times epochs that the law's starts are about.
SEEN = 100_000
#: No model is taken to be right on more than 1 - exp(-1 / this).
_LEAST_LACK = 0.1
#: The family of members that are cut from the teacher.
PLAIN_VIT = "plain ViT"
#: By how much planning takes a quantised member to be more often wrong: what the gate of
#: quantisation allows the whole answer to lose by default, taken for each member. The others keep
#: at least half of fp32's digits in every product and are taken to lose nothing.
QUANTISATION_LOSS: dict[Precision, float] = {"int8": 0.005, "int8-static": 0.005}


class Training(Record, frozen=True):
    """The training of a member."""

    pictures: Annotated[int, Meta(ge=1)]
    epochs: Annotated[float, Meta(gt=0)]
    #: Weights cut from the teacher, of a public network, or drawn.
    start: Start = "cut"
    #: Whether its classifier started as rows of the public one, where the teacher's did and is
    #: taken as it is.
    rows: bool = False

    @property
    def pictures_seen(self) -> float:
        """Pictures times epochs."""
        return self.pictures * self.epochs


class AloneLaw(Record, frozen=True):
    """The constants of a member alone, none of them negative."""

    #: Exponents of width, depth and tokens.
    exponents: tuple[float, float, float]
    scale: float
    #: What published plain ViTs lack whatever their size.
    level: float
    #: What a public network lacks on smaller pictures.
    blur: float
    classes: float
    pixels: float
    #: What 100,000 pictures leave to learn of ImageNet-1k.
    cut: float
    pretrained: float
    scratch: float
    area: float
    #: What an untouched network lacks in parts of the square.
    untouched_area: float


class AccuracyLaw(Record, frozen=True):
    """The law's constants, none of them negative."""

    alone: AloneLaw
    #: p: the larger, the less do members of equal capability add to each other.
    sharpness: float
    #: Share of a member's part that only the best of those with the same view adds, and of those
    #: of the same family.
    same_view: float
    same_model: float

    @property
    def own(self) -> float:
        """Share of its part that every member adds, whatever the others are."""
        return 1 - self.same_view - self.same_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task that members are taught: the teacher, its accuracy, and the number of classes."""

    teacher: SubModelSpec
    accuracy: float
    num_classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LawMember:
    """A member as the law sees it: its capability, and what it has in common with others."""

    capability: float
    view: object
    model: object


def view_of(spec: Spec, region: Region = WHOLE) -> tuple[int, Region]:
    """The key of what a member sees: picture size and region."""
    return (spec.image_size, region)


def model_of(spec: Spec) -> str:
    """The key of how a member is built: its family; a network of none is its own."""
    if isinstance(spec, NetworkSpec):
        network = network_of(spec)
        return spec.name if network is None else network.family
    return PLAIN_VIT


def features(specs: Sequence[SubModelSpec]) -> Array:
    """`[n, 4]`: logarithms of how much larger each shape is than ViT-S/16 at 224 px.

    Of width, depth, tokens, and the pixels along a patch's side.
    """
    rows = np.array([_sizes(spec) for spec in specs]).reshape(-1, len(_VIT_S))
    logs: Array = np.log(rows) - np.log(_VIT_S)
    return logs


def _sizes(spec: SubModelSpec) -> tuple[float, ...]:
    hidden = int(spec.embed_dim * spec.mlp_ratio)
    # The width whose layers have as many weights at the usual MLP ratio of 4.
    width = (spec.embed_dim * (4 * spec.embed_dim + 2 * hidden) / 12) ** 0.5
    tokens = (spec.image_size // spec.patch_size) ** 2 + 1.0
    return (width, float(spec.depth), tokens, float(spec.patch_size))


def lack_as_published(law: AloneLaw, specs: Sequence[Spec]) -> Array:
    """The error of members `[n]` on ImageNet-1k by what is published, networks at their own size.

    Raises InputError for a network that the catalogue does not have.
    """
    values = np.zeros(len(specs))
    plain = [(k, spec) for k, spec in enumerate(specs) if isinstance(spec, SubModelSpec)]
    if plain:
        sizes = features([spec for _, spec in plain])
        values[[k for k, _ in plain]] = law.level + shape_lack(law.exponents, law.scale, sizes)
    for k, spec in enumerate(specs):
        if isinstance(spec, NetworkSpec):
            network = network_of(spec)
            if network is None:
                raise InputError(f"expected a network of the catalogue, got {spec.name!r}")
            values[k] = 1 / capability_of(network.top1 / 100)
    return values


def shape_lack(exponents: Sequence[float] | Array, scale: float, sizes: Array) -> Array:
    """The error of plain ViTs of these `features` `[n, 4]` by their size."""
    values: Array = scale * np.exp(-sizes[:, :-1] @ np.array(exponents)) - _DETAIL * sizes[:, -1]
    return values


def blur(spec: Spec, region: Region = WHOLE) -> float:
    """The ratio of the pixels it was published with to those that it sees, less one; of a part
    as if it saw the whole at the same pixels per picture. 0 of a plain ViT.
    """
    network = network_of(spec) if isinstance(spec, NetworkSpec) else None
    if network is None:
        return 0.0
    return max(0.0, area_of(region) * (network.image_size / spec.image_size) ** 2 - 1)


def demand(law: AloneLaw, task: Task) -> float:
    """The weight of errors on ImageNet-1k in this task: 1 for its classes and picture size."""
    pixels = min(task.teacher.image_size / _PIXELS, 1.0)
    return float((task.num_classes / PUBLISHED_CLASSES) ** law.classes * pixels**law.pixels)


def capabilities(
    law: AloneLaw,
    task: Task,
    specs: Sequence[Spec],
    regions: Sequence[Region],
    trainings: Sequence[Training | Untouched | None],
    *,
    capped: bool = False,
) -> Array:
    """Capability `[n]` of members; without a training one as long as it takes.

    `capped`: a plain ViT is taken to be no better than the best network of the catalogue that costs
    as much. Raises InputError for a network that the catalogue does not have.
    """
    taught, much = 1 / capability_of(task.accuracy), demand(law, task)
    teacher, *lacks = lack_as_published(law, [task.teacher, *specs]).tolist()
    least = _least_published(specs) if capped else np.zeros(len(specs))
    found = []
    for spec, region, training, own, floor in zip(
        specs, regions, trainings, lacks, least.tolist(), strict=True
    ):
        smaller, untouched = -math.log(area_of(region)), taught + much * (own - teacher)
        if training == "untouched":
            untouched += law.blur * blur(spec, region) + law.untouched_area * smaller
            found.append(untouched)
            continue
        lack = max(taught + much * (max(own + law.blur * blur(spec), floor) - teacher), _LEAST_LACK)
        left = 0.0 if training is None else much**0.25 * share_to_learn(law, training)
        lack = math.hypot(lack, left)
        if training is not None and training.rows:
            lack = min(lack, untouched + law.blur * blur(spec))
        found.append(lack + law.area * smaller)
    values: Array = 1 / np.maximum(found, _LEAST_LACK)
    return values


def area_of(region: Region) -> float:
    """Share of the square."""
    return (region.right - region.left) * (region.bottom - region.top)


def _least_published(specs: Sequence[Spec]) -> Array:
    """The error `[n]` of the best network of at most a plain ViT's cost; 0 beyond the catalogue."""
    front = sorted(
        (network.costs[network.image_size].macs, 1 / capability_of(network.top1 / 100))
        for network in catalogue().values()
    )
    costs = np.array([cost for cost, _ in front])
    least = np.concatenate([[0.0], np.minimum.accumulate([lack for _, lack in front]), [0.0]])
    own = np.array([macs(s, 0) if isinstance(s, SubModelSpec) else np.inf for s in specs])
    places = np.searchsorted(costs, own, side="right")
    values: Array = least[np.where(own > costs[-1], len(costs) + 1, places)]
    return values


def share_to_learn(law: AloneLaw, training: Training) -> float:
    """The share of ImageNet-1k that a training leaves to learn."""
    start = {"cut": law.cut, "pretrained": law.pretrained, "scratch": law.scratch}
    return float(start[training.start] * (SEEN / training.pictures_seen) ** 0.5)


def capability_of(accuracy: float) -> float:
    """Minus the logarithm of the share of wrong answers, of an accuracy below 1."""
    return float(-np.log1p(-accuracy))


def accuracy_of(capability: Array, num_classes: int) -> Array:
    """Share of right answers, at least that of guessing."""
    values: Array = np.maximum(-np.expm1(-capability), 1 / num_classes)
    return values


def together(law: AccuracyLaw, members: Sequence[LawMember]) -> float:
    """Capability of members that all arrived; 0 of none."""
    if not members:
        return 0.0
    best = max(member.capability for member in members)
    if best <= 0:
        return 0.0
    total = 0.0
    best_of: list[dict[object, float]] = [{}, {}]
    for member in members:
        part = (member.capability / best) ** law.sharpness
        total += part
        for known, key in zip(best_of, (member.view, member.model), strict=True):
            known[key] = max(known.get(key, 0.0), part)
    total *= law.own
    for share, known in zip((law.same_view, law.same_model), best_of, strict=True):
        total += share * sum(known.values())
    return float(best * total ** (1 / law.sharpness))
