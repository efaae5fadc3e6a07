"""Settings of a plan: targets, devices, and the base of its predictions."""

import math
from collections.abc import Sequence
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import CameraName, TeacherArgument
from mdp.formats.profile import Precision

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: Arguments of a teacher that users cannot set.
_RESERVED = ("num_classes", "in_chans", "pretrained", "checkpoint_path", "dynamic_img_size")


class PlanSettings(Record, frozen=True, kw_only=True):
    """The table `[plan]` of run.toml; raises InputError for a value out of range."""

    profiles: Annotated[
        list[str],
        Meta(
            description="Device profiles: files, or names of shipped ones; 'NAME*3' is three "
            "boards of a kind"
        ),
    ]
    teacher: Annotated[
        str | None,
        Meta(
            description="timm's name of a plain ViT, for instance vit_base_patch16_224; without it "
            "a build measures the networks of --weights"
        ),
    ] = None
    teacher_args: Annotated[
        dict[str, TeacherArgument],
        Meta(description="Arguments of timm's constructor of it: key=value, one or more"),
    ] = msgspec.field(default_factory=dict)
    cameras: Annotated[
        dict[str, CameraName],
        Meta(
            description="Devices' cameras, where --data has scenes (a folder per class, in it one "
            "per scene, in it a picture per camera): device=camera, one or more; default: each its "
            "own, where the pictures are called as the devices; of two devices "
            "with one camera the second computes it where the first is too weak"
        ),
    ] = msgspec.field(default_factory=dict)
    precision: Annotated[
        list[str], Meta(description="Precisions to plan with, of those measured; default: fp32")
    ] = msgspec.field(default_factory=list)
    runs: Annotated[
        list[str], Meta(description="Evaluated bundles of your own to predict accuracy from")
    ] = msgspec.field(default_factory=list)
    families: Annotated[
        list[str] | None,
        Meta(
            description="Architectures of members: ViT, cut from the teacher, families or names of "
            "timm's networks, or all; default: ViT, and those in --weights"
        ),
    ] = None
    latency_ms: Annotated[
        float | None, Meta(description="Target of one answer, in milliseconds")
    ] = None
    percentile: Annotated[
        float | None,
        Meta(
            description="What percentage of the answers is to be complete within the target, for "
            "instance 95; default: each member's typical answer is within it"
        ),
    ] = None
    min_accuracy: Annotated[
        float | None,
        Meta(
            description="Look for the quickest plan whose expected accuracy is predicted to be at "
            "least this share; --latency-ms is then the most that it may take"
        ),
    ] = None
    max_energy_j: Annotated[
        float | None, Meta(description="Joules that one answer may take on all devices together")
    ] = None
    teacher_accuracy: Annotated[
        float | None,
        Meta(
            description="Share of pictures that the teacher is right on; default: as measured in "
            "--runs of this teacher, else 0.8"
        ),
    ] = None
    client_mbit: Annotated[
        float | None,
        Meta(
            description="What the client's own network port carries, in Mbit/s: all crops leave "
            "through it; default: as much as the quickest of the profiles' links; inf: no limit"
        ),
    ] = None
    any_precision: Annotated[
        bool, Meta(description="Plan with every precision that a profile has measured")
    ] = False
    anyway: Annotated[bool, Meta(description="Keep a plan that would be refused")] = False

    def __post_init__(self) -> None:
        if self.latency_ms is None and self.min_accuracy is None:
            raise InputError("expected --latency-ms, --min-accuracy or both, got neither")
        for key, value in (("latency_ms", self.latency_ms), ("max_energy_j", self.max_energy_j)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"plan.{key}: expected a number above 0, got {value:g}")
        if self.client_mbit is not None:
            check_client_mbit(self.client_mbit, "plan.client_mbit")
        if self.percentile is not None and not 50 <= self.percentile <= 99.9:
            raise InputError(
                f"plan.percentile: expected a number from 50 to 99.9, got {self.percentile:g}"
            )
        for key, value in (
            ("min_accuracy", self.min_accuracy),
            ("teacher_accuracy", self.teacher_accuracy),
        ):
            if value is not None and not 0 < value < 1:
                raise InputError(f"plan.{key}: expected a share above 0 and below 1, got {value:g}")
        self.precisions()
        for key in self.teacher_args:
            check_argument(key)

    def require_teacher(self) -> str:
        """The teacher's name; raises InputError where none is given."""
        if self.teacher is None:
            raise InputError("plan.teacher: expected the name of a plain ViT, got none")
        return self.teacher

    def precisions(self) -> tuple[Precision, ...]:
        """The precisions to plan with; raises InputError for an unknown one."""
        for name in self.precision:
            if name not in PRECISIONS:
                known = ", ".join(PRECISIONS)
                raise InputError(f"plan.precision: expected some of {known}, got {name!r}")
        named = self.precision or ("fp32",)
        return tuple(p for p in PRECISIONS if self.any_precision or p in named)


def check_argument(key: str) -> None:
    """Raise InputError for an argument of the teacher that `mdp-partition` sets itself."""
    if key in _RESERVED:
        raise InputError(f"--teacher-arg: {key!r} is set by mdp-partition itself")


def check_client_mbit(client_mbit: float, name: str = "--client-mbit") -> float:
    """`client_mbit` if a port can carry it, infinity included; raises InputError."""
    if not client_mbit > 0:
        raise InputError(f"{name}: expected a number above 0, got {client_mbit:g}")
    return client_mbit


def check_cameras(settings: PlanSettings, devices: Sequence[str]) -> None:
    """Raise InputError for the camera of none of `devices`."""
    for device, camera in settings.cameras.items():
        if device not in devices:
            raise InputError(
                f"plan.cameras: expected cameras of {', '.join(devices)}; camera {camera!r} is "
                f"said to be {device}'s, which --profiles lacks"
            )
