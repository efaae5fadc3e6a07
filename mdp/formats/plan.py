"""Plan: which device runs which sub-model on which view of the picture, and why."""

import os
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import replace

from mdp.errors import ConfigError
from mdp.files import Record, read_toml
from mdp.formats import profile

#: Most members of a plan.
MAX_MEMBERS = 64
#: Most members that the planner uses: fusion was fitted and measured for 2^16 subsets, of which
#: some hundred are listed.
PLANNED_MEMBERS = 16
#: Most rungs of a sub-model, the top one included.
MAX_RUNGS = 8
#: Smallest share of the square's side that a device's view may have.
MIN_REGION = 0.01

ImageSize = Annotated[int, Meta(ge=4, le=1024)]
PatchSize = Annotated[int, Meta(ge=1, le=64)]
Encoding = Literal["raw", "jpeg"]
CameraName = profile.DeviceName
BatchSize = Annotated[int, Meta(ge=1, le=64)]
TeacherArgument = bool | int | float | str
#: A factor of logits: above 0, as weights it is multiplied with are bounded.
Scale = Annotated[float, Meta(gt=0, le=1e6)]
Percentile = Annotated[float, Meta(ge=50, le=99.9)]


class SubModelSpec(Record, frozen=True):
    """Shape of one ensemble member, in timm's terms."""

    image_size: ImageSize
    patch_size: PatchSize
    embed_dim: Annotated[int, Meta(ge=8, le=4096)]
    depth: Annotated[int, Meta(ge=1, le=64)]
    num_heads: Annotated[int, Meta(ge=1, le=64)]
    mlp_ratio: Annotated[float, Meta(gt=0, le=16)]
    precision: profile.Precision = "fp32"

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

    @property
    def outline(self) -> str:
        """Width and depth: `96 x 6`."""
        return f"{self.embed_dim} x {self.depth}"

    @property
    def words(self) -> str:
        """The shape in a few words: `24 px, patch 4, 96 x 6`."""
        return f"{self.image_size} px, patch {self.patch_size}, {self.outline}"


class NetworkSpec(Record, frozen=True):
    """An ensemble member that is not a plain ViT of MDP: a network by its name."""

    #: timm's name, or the name of the ONNX file that it came from.
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    image_size: ImageSize
    #: Learned numbers and multiply-accumulates of one picture, both heads included.
    parameters: profile.PositiveInt
    macs: profile.PositiveInt
    precision: profile.Precision = "fp32"

    @property
    def outline(self) -> str:
        """The name."""
        return self.name

    @property
    def words(self) -> str:
        """Name and size in a few words: `152 px, tf_efficientnet_lite0`."""
        return f"{self.image_size} px, {self.name}"


Spec = SubModelSpec | NetworkSpec


def one_spec(submodel: SubModelSpec | None, network: NetworkSpec | None) -> Spec:
    """The one that is not None; raises ValueError unless one of them is."""
    spec = network if submodel is None else submodel
    if spec is None or (submodel is not None and network is not None):
        raise ValueError("expected either `submodel` or `network`")
    return spec


class Region(Record, frozen=True):
    """A box inside the picture's centred square, as fractions of that square's side."""

    left: profile.Fraction = 0.0
    top: profile.Fraction = 0.0
    right: profile.Fraction = 1.0
    bottom: profile.Fraction = 1.0

    def __post_init__(self) -> None:
        if not (self.left < self.right and self.top < self.bottom):
            raise ValueError("a region needs `left` < `right` and `top` < `bottom`")
        if min(self.right - self.left, self.bottom - self.top) < MIN_REGION:
            raise ValueError(f"a region needs at least {MIN_REGION:g} of each side")


class PredictedMs(Record, frozen=True):
    """Predicted milliseconds of one picture on one device."""

    compute: profile.NonNegativeFloat
    network: profile.NonNegativeFloat
    total: profile.NonNegativeFloat


class Rung(Record, frozen=True):
    """A quicker and less accurate form of a sub-model, for bursts: same pictures, same classes."""

    #: Measured share of pictures that it is right on alone.
    accuracy: profile.Fraction
    #: Predicted milliseconds of one picture on the assigned device.
    compute_ms: profile.PositiveFloat
    memory_bytes: profile.PositiveInt
    #: Factors of its boost and bag logits, with which it is fused by the top rung's weights.
    scales: tuple[Scale, Scale]
    why: str
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None
    runtime: profile.RuntimeName = "onnxruntime"

    def __post_init__(self) -> None:
        one_spec(self.submodel, self.network)

    @property
    def spec(self) -> Spec:
        """The network of either family."""
        return one_spec(self.submodel, self.network)


class Assignment(Record, frozen=True):
    """One device's part: boosting position, view, sub-model, and how it is run.

    The sub-model is either a plain ViT of MDP, `submodel`, or another `network`.
    """

    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    device: profile.DeviceName
    predicted_ms: PredictedMs
    memory_bytes: profile.PositiveInt
    provider: str
    threads: profile.Threads
    why: str
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None
    region: Region = Region()
    encoding: Encoding = "raw"
    runtime: profile.RuntimeName = "onnxruntime"
    #: Predicted joules of one picture; None where the profile has no power.
    energy_j: profile.NonNegativeFloat | None = None
    #: Predicted share of pictures that this member is right on alone.
    accuracy: profile.Fraction | None = None
    #: Most pictures that the device computes at once, when several wait.
    batch: BatchSize = 1
    #: Whether the threads of one run spin while they wait for each other.
    spin: bool = False
    #: Whose pictures of a scene the sub-model is made for; None: pictures that all devices see.
    camera: CameraName | None = None
    #: Its quicker forms, from the one below the top downward; not written where there are none, for
    #: agents and clients that predate them.
    rungs: Annotated[tuple[Rung, ...], Meta(min_length=1, max_length=MAX_RUNGS - 1)] | UnsetType = (
        UNSET
    )

    def __post_init__(self) -> None:
        spec, above_ms = one_spec(self.submodel, self.network), self.predicted_ms.compute
        for number, rung in enumerate(self.lower, 1):
            if rung.spec.image_size != spec.image_size:
                raise ValueError(
                    f"`rungs`: expected pictures of {spec.image_size} px at rung {number}, as at "
                    f"the top, got {rung.spec.image_size}"
                )
            if rung.compute_ms >= above_ms:
                raise ValueError(
                    f"`rungs`: expected rung {number} to take less than the {above_ms:g} ms of "
                    f"the one above, got {rung.compute_ms:g}"
                )
            above_ms = rung.compute_ms

    @property
    def lower(self) -> tuple[Rung, ...]:
        """The rungs below the top; empty without any."""
        return self.rungs or ()

    def at(self, number: int) -> "Assignment":
        """This assignment with only its rung `number`, 0 for the top, in place of all."""
        if number == 0:
            return replace(self, rungs=UNSET)
        rung = self.lower[number - 1]
        return replace(
            self,
            rungs=UNSET,
            submodel=rung.submodel,
            network=rung.network,
            runtime=rung.runtime,
            memory_bytes=rung.memory_bytes,
        )

    @property
    def spec(self) -> Spec:
        """The sub-model of either family."""
        return one_spec(self.submodel, self.network)

    @property
    def vit(self) -> SubModelSpec:
        """The shape of a plain ViT; raises ConfigError for another family."""
        if self.submodel is None:
            raise ConfigError(
                f"sub-model {self.k} is {self.spec.words}: expected a plain ViT of a plan made by "
                "mdp-partition plan; others can be served, evaluated and quantized"
            )
        return self.submodel

    def in_precision(self, precision: profile.Precision) -> "Assignment":
        """A copy with its sub-model in another precision."""
        if self.submodel is None:
            assert self.network is not None
            return replace(self, network=replace(self.network, precision=precision))
        return replace(self, submodel=replace(self.submodel, precision=precision))


class Replica(Record, frozen=True):
    """A further device that serves sub-model `k`, so that losing one device loses no member."""

    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    device: profile.DeviceName
    predicted_ms: PredictedMs
    memory_bytes: profile.PositiveInt
    provider: str
    threads: profile.Threads
    why: str
    encoding: Encoding = "raw"
    runtime: profile.RuntimeName = "onnxruntime"
    energy_j: profile.NonNegativeFloat | None = None
    batch: BatchSize = 1
    spin: bool = False


class PredictedAccuracy(Record, frozen=True):
    """Predicted accuracy of a plan's answers, as fractions of pictures.

    All None where `unknown` says why nothing is predicted.
    """

    #: With every member in.
    all_in: profile.Fraction | None = None
    #: Mean over which devices happen to be there, by each one's availability.
    expected: profile.Fraction | None = None
    #: Typical error of such predictions on runs that they were not fitted to.
    typical_error: profile.Fraction | None = None
    #: Nine of ten such trainings end between these with every member in.
    low: profile.Fraction | None = None
    high: profile.Fraction | None = None
    #: Why no recorded training is like the planned one; empty if one is.
    unknown: str = ""


class TeacherSpec(Record, frozen=True):
    """A timm model name, its constructor arguments, and the resulting shape."""

    name: Annotated[str, Meta(min_length=1)]
    shape: SubModelSpec
    args: dict[str, TeacherArgument] = field(default_factory=dict)


class SingleDevice(Record, frozen=True):
    """The best that one device can do alone under the same latency target."""

    device: profile.DeviceName
    predicted_ms: PredictedMs
    is_teacher: bool
    #: Either a plain ViT or a public network.
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None
    #: Predicted, as a fraction of pictures.
    accuracy: profile.Fraction | None = None
    region: Region = Region()

    def __post_init__(self) -> None:
        one_spec(self.submodel, self.network)

    @property
    def spec(self) -> Spec:
        """The specification of the network that it runs."""
        return one_spec(self.submodel, self.network)


class Plan(Record, frozen=True):
    """The result of `mdp-partition plan`; `refused` if one device alone does at least as well."""

    target_ms: profile.PositiveFloat
    refused: bool
    reason: str
    assignments: Annotated[list[Assignment], Meta(min_length=1, max_length=MAX_MEMBERS)]
    #: None where the members were not decomposed from one model but assembled.
    teacher: TeacherSpec | None = None
    single_device: SingleDevice | None = None
    #: Devices that take no part, each with the reason.
    left_out: dict[str, str] = field(default_factory=dict)
    #: Devices that serve a member which `assignments` give to another one.
    replicas: list[Replica] = field(default_factory=list)
    accuracy: PredictedAccuracy | None = None
    #: The deadline with which answers are complete at the predicted latencies (with a percentile:
    #: that share of them), the client's decoding included; the target is about the typical answer.
    deadline_ms: profile.PositiveFloat | None = None
    #: Percentage of answers to be complete within the target, the client's decoding included; None:
    #: each member's typical answer is within it.
    percentile: Percentile | None = None
    #: Predicted share of answers that are complete within the target with all devices there; only
    #: with a percentile.
    on_time: profile.Fraction | None = None
    #: Assumed bits per second of the client's network port, which all crops share; None: not
    #: modelled.
    client_bps: profile.PositiveFloat | None = None
    #: Number of classes.
    num_classes: Annotated[int, Meta(ge=2)] | None = None
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if [assignment.k for assignment in self.assignments] != list(range(len(self.assignments))):
            raise ValueError("`assignments` have to be listed by `k`, from 0 without gaps")
        devices = [assignment.device for assignment in self.assignments]
        if len(set(devices)) != len(devices):
            raise ValueError(f"`assignments` name a device twice: {', '.join(devices)}")
        for replica in self.replicas:
            if replica.k >= len(self.assignments):
                raise ValueError(
                    f"`replicas` name sub-model {replica.k}, which no device is assigned"
                )
        devices += [replica.device for replica in self.replicas]
        if len(set(devices)) != len(devices):
            raise ValueError("`replicas` name a device twice, or one that has an assignment")

    @property
    def cameras(self) -> list[str]:
        """Cameras of the sub-models, each once; empty where all see one picture."""
        return list(dict.fromkeys(a.camera for a in self.assignments if a.camera is not None))

    def require_teacher(self) -> TeacherSpec:
        """The teacher; raises ConfigError for an assembled plan, which has none."""
        if self.teacher is None:
            raise ConfigError(
                "the plan has no teacher, its members were assembled: expected one made by "
                "mdp-partition plan"
            )
        return self.teacher

    @property
    def finest_px(self) -> int:
        """Side in pixels of a picture that no member enlarges."""
        if self.teacher is not None:
            return self.teacher.shape.image_size
        return max(assignment.spec.image_size for assignment in self.assignments)

    def assignment_of(self, device: str) -> Assignment | None:
        """The assignment of `device`, also as a replica, or None."""
        own = next((a for a in self.assignments if a.device == device), None)
        replica = next((r for r in self.replicas if r.device == device), None)
        if own is not None or replica is None:
            return own
        changes = {name: getattr(replica, name) for name in replica.__struct_fields__}
        return replace(self.assignments[replica.k], **changes)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read plan.toml; raises ConfigError."""
    return read_toml(path, Plan)
