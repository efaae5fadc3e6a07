"""Plan: which device runs which sub-model on which view of the picture, and why."""

import os
from typing import Annotated, Literal

from msgspec import Meta, field

from mdp.files import Record, read_toml
from mdp.profile import (
    DeviceName,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Precision,
)

#: What fusion can be fitted and measured for: 2^16 subsets, of which some hundred are listed.
MAX_MEMBERS = 16
#: Smallest share of the square's side that a device's view may have.
MIN_REGION = 0.01

ImageSize = Annotated[int, Meta(ge=4, le=1024)]
PatchSize = Annotated[int, Meta(ge=1, le=64)]
Encoding = Literal["raw", "jpeg"]
TeacherArgument = bool | int | float | str


class SubModelSpec(Record, frozen=True):
    """Shape of one ensemble member, in timm's words."""

    image_size: ImageSize
    patch_size: PatchSize
    embed_dim: Annotated[int, Meta(ge=8, le=4096)]
    depth: Annotated[int, Meta(ge=1, le=64)]
    num_heads: Annotated[int, Meta(ge=1, le=64)]
    mlp_ratio: Annotated[float, Meta(gt=0, le=16)]
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"`image_size` {self.image_size} has to be a multiple of "
                f"`patch_size` {self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`embed_dim` {self.embed_dim} has to be a multiple of `num_heads` {self.num_heads}"
            )


class Region(Record, frozen=True):
    """A box inside the picture's centred square, as fractions of that square's side."""

    left: Fraction = 0.0
    top: Fraction = 0.0
    right: Fraction = 1.0
    bottom: Fraction = 1.0

    def __post_init__(self) -> None:
        if not (self.left < self.right and self.top < self.bottom):
            raise ValueError("a region needs `left` < `right` and `top` < `bottom`")
        if min(self.right - self.left, self.bottom - self.top) < MIN_REGION:
            raise ValueError(f"a region needs at least {MIN_REGION:g} of each side")


class PredictedMs(Record, frozen=True):
    """Predicted milliseconds of one picture on one device."""

    compute: NonNegativeFloat
    network: NonNegativeFloat
    total: NonNegativeFloat


class Assignment(Record, frozen=True):
    """One device's part: boosting position, view, sub-model, and how it is run."""

    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    device: DeviceName
    submodel: SubModelSpec
    predicted_ms: PredictedMs
    memory_bytes: PositiveInt
    provider: str
    threads: PositiveInt
    why: str
    region: Region = Region()
    encoding: Encoding = "raw"


class TeacherSpec(Record, frozen=True):
    """A timm model name, its constructor arguments, and the shape they led to."""

    name: Annotated[str, Meta(min_length=1)]
    shape: SubModelSpec
    args: dict[str, TeacherArgument] = field(default_factory=dict)


class SingleDevice(Record, frozen=True):
    """The best that one device can do alone under the same latency target."""

    device: DeviceName
    submodel: SubModelSpec
    predicted_ms: PredictedMs
    is_teacher: bool


class Plan(Record, frozen=True):
    """What `mdp-partition plan` decides; `refused` if one device alone does at least as well."""

    teacher: TeacherSpec
    target_ms: PositiveFloat
    refused: bool
    reason: str
    assignments: Annotated[list[Assignment], Meta(min_length=1, max_length=MAX_MEMBERS)]
    single_device: SingleDevice | None = None
    #: Devices that take no part, each with the reason.
    left_out: dict[str, str] = field(default_factory=dict)
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if [assignment.k for assignment in self.assignments] != list(range(len(self.assignments))):
            raise ValueError("`assignments` have to be listed by `k`, from 0 without gaps")
        devices = [assignment.device for assignment in self.assignments]
        if len(set(devices)) != len(devices):
            raise ValueError(f"`assignments` name a device twice: {', '.join(devices)}")

    def assignment_of(self, device: str) -> Assignment | None:
        """The assignment of `device`, or None."""
        return next((a for a in self.assignments if a.device == device), None)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read plan.toml; raises ConfigError."""
    return read_toml(path, Plan)
