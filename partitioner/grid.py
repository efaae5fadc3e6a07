"""The grid that the planner searches: shapes of sub-models and what each costs on a device. Pure.

No accuracy predictor exists yet, so capability is a stated proxy: MACs, with a mild preference for
a larger picture. It orders shapes of one family sensibly and says nothing about percentages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mdp.errors import InputError
from mdp.plan import PredictedMs, SubModelSpec
from mdp.profile import DeviceProfile
from partitioner.cost import macs, memory_bytes
from partitioner.latency import LatencyModel, fit_latency, predict

#: The smallest picture, relative to the teacher's; below half of it too little is left to see.
MIN_IMAGE_SHARE = 0.5
MIN_EMBED_DIM = 32
MIN_DEPTH = 2
#: Head sizes tried after the teacher's own, for widths up to `SMALL_HEADS` of the teacher's heads;
#: wider sub-models keep the teacher's head size, so that its heads can be copied whole.
HEAD_SIZES, SMALL_HEADS = (64, 32, 48), 4
#: Relative depth over relative width: sub-models keep within this factor of the teacher's build,
#: for MACs alone would prefer one very wide layer, and no teacher can be copied into that.
MAX_ASPECT = 2.0
#: Exponent of the picture's size in the capability proxy.
IMAGE_PREFERENCE = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sub-model with its predicted cost on one device; `score` is the capability proxy."""

    spec: SubModelSpec
    predicted_ms: PredictedMs
    memory_bytes: int
    macs: int
    score: float


@dataclass(frozen=True, slots=True)
class Device:
    """A profile with its fitted latency and every shape of the grid, the most capable first."""

    profile: DeviceProfile
    latency: LatencyModel
    grid: list[Candidate]
    #: The part of the grid that meets the target and fits the memory, in the same order.
    feasible: list[Candidate]

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.profile.name


def sub_model_grid(teacher: SubModelSpec) -> list[SubModelSpec]:
    """Every shape that the search tries: smaller than the teacher and built in its proportions.

    Raises InputError when the teacher is too small to have one.
    """
    patch = teacher.patch_size
    first = math.ceil(MIN_IMAGE_SHARE * teacher.image_size / patch) * patch
    shapes = [
        SubModelSpec(
            image_size=image_size,
            patch_size=patch,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=embed_dim // head_size,
            mlp_ratio=teacher.mlp_ratio,
            precision=teacher.precision,
        )
        for image_size in range(first, teacher.image_size + 1, patch)
        for embed_dim, head_size in _widths(teacher)
        for depth in range(min(MIN_DEPTH, teacher.depth), teacher.depth + 1)
        if 1 / MAX_ASPECT <= _aspect(teacher, embed_dim, depth) <= MAX_ASPECT
        and (image_size, embed_dim, depth) != size_of(teacher)
    ]
    if not shapes:
        raise InputError(f"a teacher of {words(teacher)} is too small to be decomposed")
    return shapes


def _widths(teacher: SubModelSpec) -> list[tuple[int, int]]:
    """(embed_dim, head size) of every width tried, ascending."""
    own = teacher.embed_dim // teacher.num_heads
    widths = {teacher.embed_dim: own}
    for embed_dim in range(MIN_EMBED_DIM, teacher.embed_dim):
        others = HEAD_SIZES if embed_dim <= SMALL_HEADS * own else ()
        fitting = [size for size in (own, *others) if embed_dim % size == 0]
        if fitting:
            widths[embed_dim] = fitting[0]
    return sorted(widths.items())


def _aspect(teacher: SubModelSpec, embed_dim: int, depth: int) -> float:
    return (depth / teacher.depth) / (embed_dim / teacher.embed_dim)


def size_of(spec: SubModelSpec) -> tuple[int, int, int]:
    """What makes two sub-models of one teacher different."""
    return (spec.image_size, spec.embed_dim, spec.depth)


def words(spec: SubModelSpec) -> str:
    """A shape as a person reads it."""
    return f"{spec.image_size} px, {spec.embed_dim} wide, {spec.depth} deep"


def evaluate_grid(
    profile: DeviceProfile,
    shapes: Sequence[SubModelSpec],
    teacher: SubModelSpec,
    target_ms: float,
    num_classes: int,
) -> Device:
    """Fit the profile's latency and cost every shape on it; raises InputError."""
    latency = fit_latency(profile)
    candidates = [_candidate(profile, latency, s, teacher, num_classes) for s in shapes]
    candidates.sort(key=lambda c: (-c.score, size_of(c.spec)))
    feasible = [
        candidate
        for candidate in candidates
        if candidate.predicted_ms.total <= target_ms
        and candidate.memory_bytes <= profile.memory_bytes
    ]
    return Device(profile, latency, candidates, feasible)


def _candidate(
    profile: DeviceProfile,
    latency: LatencyModel,
    spec: SubModelSpec,
    teacher: SubModelSpec,
    num_classes: int,
) -> Candidate:
    # The heads' MACs grow with the classes, not with what the encoder can tell apart.
    encoder_macs = macs(spec, 0)
    return Candidate(
        spec=spec,
        predicted_ms=predict(profile, latency, spec, num_classes),
        memory_bytes=memory_bytes(spec, num_classes),
        macs=encoder_macs,
        score=encoder_macs * (spec.image_size / teacher.image_size) ** IMAGE_PREFERENCE,
    )
