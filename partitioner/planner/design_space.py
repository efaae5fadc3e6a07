"""The planner's design space: shapes and networks, and their costs on any device. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec
from mdp.formats.profile import DeviceProfile, Precision, is_openvino_device
from partitioner.estimates.accuracy import Predictor
from partitioner.estimates.accuracy_law import QUANTISATION_LOSS, Array, model_of, view_of
from partitioner.estimates.latency import Way
from partitioner.estimates.latency_terms import NAMES, terms
from partitioner.estimates.macs import memory_bytes

#: The smallest picture, relative to the teacher's; smaller ones keep too little detail.
MIN_IMAGE_SHARE = 0.5
MIN_EMBED_DIM = 32
MIN_DEPTH = 2
#: Patch sizes relative to the teacher's, and how many tokens a sub-model has at least.
PATCH_FACTORS = (0.5, 1.0, 2.0)
MIN_TOKENS = 5
#: Hidden widths of the MLP relative to the teacher's.
MLP_SHARES = (1.0, 0.5)
#: Head sizes tried after the teacher's own, for widths up to `SMALL_HEADS` of the teacher's heads;
#: wider sub-models keep the teacher's head size, so that its heads can be copied whole.
HEAD_SIZES, SMALL_HEADS = (64, 48, 32, 24, 16), 4
#: Largest ratio of relative depth to relative width, and the reverse: others were not measured, and
#: no teacher can be copied into one very wide layer.
MAX_ASPECT = 2.0
#: Width multiples that kernels do not pad: 16 fp32 values are a vector of AVX-512 or four of NEON,
#: 32 a warp.
KERNEL_MULTIPLE = {"cpu": 16, "arm": 16, "gpu": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignSpace:
    """Every sub-model in every precision that is tried; row i is choice i.

    Rows are ordered by precision, then sub-model.
    """

    #: Number of sub-models.
    shapes: int
    specs: list[Spec]
    #: Terms of the plain ViTs' latency formula `[n, terms]`; zeros of a network.
    counts: Array
    image_sizes: NDArray[np.int64]
    #: Widths of plain ViTs; 0 of a network.
    embed_dims: NDArray[np.int64]
    memory_bytes: NDArray[np.int64]
    capability: Array
    #: Indices of equal views, and of equal architectures.
    view: NDArray[np.int64]
    model: NDArray[np.int64]
    #: Index of choices that compete on a device: plain ViTs of a view, networks of a family;
    #: in one precision.
    group: NDArray[np.int64]
    #: Index of the shape in any precision, unique among a plan's members.
    identity: NDArray[np.int64]
    precisions: tuple[Precision, ...]
    num_classes: int

    def __len__(self) -> int:
        return len(self.specs)

    def of_way(self, way: Way, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices in ascending `rows` of those that may be run this way.

        On a GPU beside a processor only those of unpadded widths.
        """
        if way.precision not in self.precisions:
            return rows[:0]
        first = self.precisions.index(way.precision) * self.shapes
        places = np.arange(*np.searchsorted(rows, [first, first + self.shapes]))
        if is_openvino_device(way.provider):
            places = places[self.embed_dims[rows[places]] % KERNEL_MULTIPLE["gpu"] == 0]
        return places

    def networks_among(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[NetworkSpec]]:
        """Indices in `rows` of the networks, and the networks."""
        places = np.flatnonzero(self.embed_dims[rows] == 0)
        specs = [self.specs[row] for row in rows[places].tolist()]
        return places, [spec for spec in specs if isinstance(spec, NetworkSpec)]

    def fast_on(self, profile: DeviceProfile) -> NDArray[np.bool_]:
        """Choices that have widths that this kind of device does not pad."""
        fast: NDArray[np.bool_] = self.embed_dims % KERNEL_MULTIPLE[profile.kind] == 0
        return fast


def sub_model_grid(teacher: SubModelSpec) -> list[SubModelSpec]:
    """Every plain ViT that is tried: smaller than the teacher, in about its proportions.

    All can be cut from the teacher's weights.
    """
    shapes = [
        SubModelSpec(
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=embed_dim // head_size,
            mlp_ratio=teacher.mlp_ratio * share,
            precision=teacher.precision,
        )
        for image_size, patch_size in _pictures(teacher)
        for embed_dim, head_size in _widths(teacher)
        for depth in range(min(MIN_DEPTH, teacher.depth), teacher.depth + 1)
        if 1 / MAX_ASPECT <= (depth / teacher.depth) / (embed_dim / teacher.embed_dim) <= MAX_ASPECT
        for share in MLP_SHARES
    ]
    return [shape for shape in shapes if size_of(shape) != size_of(teacher)]


def _pictures(teacher: SubModelSpec) -> list[tuple[int, int]]:
    """(image_size, patch_size) of every picture tried, in whole patches of the teacher's."""
    step = teacher.patch_size
    first = math.ceil(MIN_IMAGE_SHARE * teacher.image_size / step) * step
    patches = [int(step * f) for f in PATCH_FACTORS if (step * f).is_integer() and step * f >= 1]
    return [
        (image_size, patch)
        for image_size in range(first, teacher.image_size + 1, step)
        for patch in patches
        if image_size % patch == 0
        and _tokens(image_size, patch) <= _tokens(teacher.image_size, step)
        and (_tokens(image_size, patch) >= MIN_TOKENS or patch == step)
    ]


def _tokens(image_size: int, patch_size: int) -> int:
    return (image_size // patch_size) ** 2 + 1


def _widths(teacher: SubModelSpec) -> list[tuple[int, int]]:
    """(embed_dim, head size) of every width tried, ascending."""
    own = teacher.embed_dim // teacher.num_heads
    widths = {teacher.embed_dim: own}
    for embed_dim in range(MIN_EMBED_DIM, teacher.embed_dim):
        others = HEAD_SIZES if embed_dim <= SMALL_HEADS * own else ()
        fitting = [
            size
            for size in (own, *others)
            if embed_dim % size == 0 and embed_dim // size <= teacher.num_heads * (own // size)
        ]
        if fitting:
            widths[embed_dim] = fitting[0]
    return sorted(widths.items())


def size_of(spec: SubModelSpec) -> tuple[int, int, int, int, float]:
    """Key of a sub-model among those of one teacher."""
    return (spec.image_size, spec.patch_size, spec.embed_dim, spec.depth, spec.mlp_ratio)


def words(spec: Spec) -> str:
    """A sub-model in words."""
    text = spec.words
    if isinstance(spec, SubModelSpec):
        text = (
            f"{spec.image_size} px, patch {spec.patch_size}, "
            f"{spec.embed_dim} wide, {spec.depth} deep"
        )
        if spec.mlp_ratio != 4:
            text += f", MLP x{spec.mlp_ratio:g}"
    if spec.precision != "fp32":
        text += f", {spec.precision}"
    return text


def make_design_space(
    teacher: SubModelSpec,
    predictor: Predictor,
    precisions: Sequence[Precision] = ("fp32",),
    *,
    shapes: Sequence[SubModelSpec] | None = None,
    networks: Sequence[NetworkSpec] = (),
) -> DesignSpace:
    """Latency terms, bytes and capability of shapes and networks, the same for all devices.

    Shapes are by default the teacher's grid. Raises InputError for a network without a known
    accuracy.
    """
    vits = list(sub_model_grid(teacher) if shapes is None else shapes)
    plain: list[Spec] = [*vits, *networks]
    num_classes = predictor.num_classes
    counts = np.concatenate([terms(vits, num_classes), np.zeros((len(networks), len(NAMES)))])
    known = tuple(dict.fromkeys(precisions))
    specs: list[Spec] = []
    capability, memory = [], []
    for precision in known:
        mine = [_with_precision(spec, precision) for spec in plain]
        capability.append(after_quantisation(predictor.of_specs(mine), precision))
        memory.append(np.array([memory_bytes(spec, num_classes) for spec in mine]))
        specs += mine
    views = [view_of(spec) for spec in specs]
    models = [model_of(spec) for spec in specs]
    return DesignSpace(
        shapes=len(plain),
        specs=specs,
        counts=np.tile(counts, (len(known), 1)),
        image_sizes=np.array([spec.image_size for spec in specs]),
        embed_dims=np.array([s.embed_dim if isinstance(s, SubModelSpec) else 0 for s in specs]),
        memory_bytes=np.concatenate(memory),
        capability=np.concatenate(capability),
        view=_indices(views),
        model=_indices(models),
        group=_indices(
            [
                (view if isinstance(spec, SubModelSpec) else model, spec.precision)
                for spec, view, model in zip(specs, views, models, strict=True)
            ]
        ),
        identity=np.tile(np.arange(len(plain)), len(known)),
        precisions=known,
        num_classes=num_classes,
    )


def after_quantisation(capability: Array, precision: Precision) -> Array:
    """Capability after the assumed loss of a precision."""
    loss = QUANTISATION_LOSS.get(precision, 0.0)
    values: Array = -np.log(np.minimum(np.exp(-capability) + loss, 1.0))
    return values


@lru_cache(maxsize=100_000)
def _with_precision(spec: Spec, precision: Precision) -> Spec:
    return msgspec.structs.replace(spec, precision=precision)


def _indices(keys: Sequence[object]) -> NDArray[np.int64]:
    """Indices `[n]` of the keys, equal for equal keys."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys])
