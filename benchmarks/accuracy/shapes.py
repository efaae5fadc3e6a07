"""Teacher and members of the accuracy benchmark: everything about sizes stands here."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.harness.models import vit
from mdp.errors import InputError
from mdp.formats.plan import (
    Assignment,
    Plan,
    PredictedMs,
    SubModelSpec,
    TeacherArgument,
    TeacherSpec,
)
from partitioner.estimates.macs import macs

#: How many classes the heads have when costs are compared; the heads hardly count.
_CLASSES = 10
#: Costs that differ by no more count as the same.
_ABOUT = 1.1
_WHY = "accuracy benchmark: shapes are given, nothing was searched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A teacher, one member per device in boosting order, and what a single device may run."""

    teacher_name: str
    teacher_args: dict[str, TeacherArgument]
    members: tuple[SubModelSpec, ...]
    #: Candidates for the best single model on the fastest device.
    singles: tuple[SubModelSpec, ...]

    def teacher(self) -> TeacherSpec:
        from partitioner.networks.teacher import teacher_spec

        return teacher_spec(self.teacher_name, self.teacher_args)

    @property
    def largest(self) -> SubModelSpec:
        return max(self.members, key=cost)

    @property
    def slowest(self) -> list[SubModelSpec]:
        """What the slowest device could run: members of about the lowest cost."""
        least = min(cost(spec) for spec in self.members)
        return [spec for spec in self.members if cost(spec) <= _ABOUT * least]

    def fitting_singles(self) -> list[SubModelSpec]:
        """The candidates that cost the fastest device no more than its member does.

        Multiply-accumulates stand for latency here; the table shows the measured one.
        """
        fitting = [spec for spec in self.singles if cost(spec) <= cost(self.largest)]
        if not fitting:
            raise InputError(
                "accuracy_shapes: expected a single model that the fastest device fits"
            )
        return fitting


#: What is published: 32 px pictures, a teacher of 16 tokens, four devices of falling speed.
REAL = Shapes(
    teacher_name="vit_tiny_patch16_224",
    teacher_args={
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 192,
        "depth": 6,
        "num_heads": 3,
    },
    members=(
        vit(32, 8, 96, 3, 2),
        vit(24, 8, 96, 3, 2),
        vit(32, 8, 64, 3, 2),
        vit(16, 4, 96, 2, 2),
    ),
    singles=(
        vit(32, 8, 96, 3, 2),
        vit(24, 6, 96, 3, 2),
        vit(32, 8, 64, 6, 2),
    ),
)
#: What is tried in seconds, on the digits.
SMOKE = Shapes(
    teacher_name="vit_tiny_patch16_224",
    teacher_args={"img_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3},
    members=(vit(8, 4, 24, 2, 3), vit(8, 2, 16, 1, 2), vit(4, 2, 16, 2, 2), vit(4, 2, 16, 1, 2)),
    singles=(vit(8, 4, 24, 2, 3), vit(8, 4, 16, 2, 2)),
)


def cost(spec: SubModelSpec) -> int:
    return macs(spec, _CLASSES)


def shape_name(spec: SubModelSpec) -> str:
    """`96x3@32/8`: width x depth @ picture / patch, in pixels."""
    return f"{spec.embed_dim}x{spec.depth}@{spec.image_size}/{spec.patch_size}"


def even(spec: SubModelSpec) -> SubModelSpec:
    """The shape of even depth that costs at most as much: one layer more, and narrower."""
    if spec.depth % 2 == 0:
        return spec
    for width in range(spec.embed_dim, 8, -spec.num_heads):
        narrower = msgspec.structs.replace(
            spec, depth=spec.depth + 1, embed_dim=width - width % spec.num_heads
        )
        if cost(narrower) <= cost(spec):
            return narrower
    raise InputError(f"accuracy_shapes: {shape_name(spec)} has no counterpart of even depth")


def plan_of(teacher: TeacherSpec, members: Sequence[SubModelSpec]) -> Plan:
    nothing = PredictedMs(compute=0.0, network=0.0, total=0.0)
    return Plan(
        teacher=teacher,
        target_ms=1.0,
        refused=False,
        reason=_WHY,
        assignments=[
            Assignment(
                k=k,
                device=f"device-{k}",
                submodel=spec,
                predicted_ms=nothing,
                memory_bytes=1,
                provider="CPUExecutionProvider",
                threads=1,
                why=_WHY,
            )
            for k, spec in enumerate(members)
        ],
    )
