"""Every knob of a run, with its unit and range: what `settings.json` holds."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from mdp.files import Record
from mdp.formats.plan import TeacherArgument

Autocast = Literal["fp32", "bf16"]
Teaching = Literal["kept", "live"]
TeacherViews = Literal["own", "fused", "both"]
Epochs = Annotated[int, Meta(ge=0, le=100_000, description="Passes over the training pictures")]
BatchSize = Annotated[
    int, Meta(ge=1, le=65_536, description="Pictures per step, over all processes")
]
LearningRate = Annotated[float, Meta(gt=0, le=1, description="AdamW's peak step size")]
WeightDecay = Annotated[
    float, Meta(ge=0, le=10, description="AdamW's; not of biases, norms and positions")
]
Smoothing = Annotated[
    float, Meta(ge=0, lt=1, description="Share of a label that is spread over all classes")
]
Weight = Annotated[float, Meta(ge=0, le=1e6)]


class Schedule(Record, frozen=True):
    """The training of one network: AdamW, warm-up, then a cosine down to zero."""

    epochs: Epochs
    batch_size: BatchSize
    learning_rate: LearningRate | None
    weight_decay: WeightDecay
    label_smoothing: Smoothing


#: The teacher's default step size: with random weights, and with given ones.
FROM_SCRATCH, FINE_TUNING = 1e-3, 1e-4
#: The sub-models'.
DRAWN_OR_CUT, PRETRAINED = 2e-3, 3e-4


class TeacherSchedule(Schedule, frozen=True):
    """The training of the teacher before it teaches; 0 epochs take it as it is."""

    epochs: Annotated[
        int, Meta(ge=0, le=100_000, description="Epochs of the teacher; 0 takes it as it is")
    ] = 0
    batch_size: BatchSize = 64
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="AdamW's peak step size; default: 0.001 from scratch, else 0.0001"),
    ] = None
    weight_decay: WeightDecay = 0.05
    label_smoothing: Smoothing = 0.1

    def with_default_rate(self, *, from_scratch: bool) -> "TeacherSchedule":
        """With the default step size filled in."""
        rate = self.learning_rate or (FROM_SCRATCH if from_scratch else FINE_TUNING)
        return msgspec.structs.replace(self, learning_rate=rate)


class MemberSchedule(Schedule, frozen=True):
    """The training of each sub-model."""

    epochs: Annotated[int, Meta(ge=1, le=100_000, description="Epochs per sub-model")] = 20
    later_share: Annotated[
        float,
        Meta(gt=0, le=1, description="Epochs of every later sub-model, as a share of the first's"),
    ] = 0.7
    batch_size: BatchSize = 64
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="AdamW's peak step size; default: 0.002, and 0.0003 for networks that "
            "start from pretrained weights"
        ),
    ] = None
    weight_decay: WeightDecay = 0.05
    label_smoothing: Smoothing = 0.0
    boost_weight: Annotated[
        Weight,
        Meta(
            description="Boosting: weight of the boost heads' loss beside the bag heads' 1; "
            "0: no boost heads"
        ),
    ] = 0.0
    stack_weight: Annotated[
        Weight,
        Meta(
            description="Stacking distillation: weight of imitating the predecessor's last "
            "feature; 0: none"
        ),
    ] = 0.0
    distillation: Annotated[
        float,
        Meta(
            ge=0, le=1, description="Share of the teacher's probabilities in the targets of heads"
        ),
    ] = 0.5
    temperature: Annotated[
        float, Meta(gt=0, le=100, description="Temperature that softens the teacher's answers")
    ] = 2.0
    start: Annotated[
        Literal["auto", "teacher", "scratch"],
        Meta(
            description="Weights that a sub-model starts from: cut from the teacher's, or drawn; "
            "auto cuts the later ones from an earlier sub-model, and draws only what cannot be cut"
        ),
    ] = "auto"
    chain: Annotated[
        Literal["strict", "star"],
        Meta(
            description="What a later sub-model needs: strict, all earlier ones; star, the first "
            "one alone, so that the later ones can be trained side by side"
        ),
    ] = "strict"
    patience: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Stop after so many epochs without a better bag loss on the calibration "
            "split, and take the best; 0 is never",
        ),
    ] = 0
    teacher_views: Annotated[
        TeacherViews,
        Meta(
            description="With scenes: the teacher's answer that a sub-model learns, to its own "
            "camera's picture, fused over a random part of the scene's, or the mean of both"
        ),
    ] = "own"
    shared: Annotated[
        bool,
        Meta(
            description="With scenes: train on the pictures of all cameras, sub-models of one "
            "shape once"
        ),
    ] = False

    @property
    def boosting(self) -> bool:
        """Tell whether members have boost heads."""
        return self.boost_weight > 0

    @property
    def stacking(self) -> bool:
        """Tell whether members imitate their predecessor's feature."""
        return self.stack_weight > 0

    def predecessors(self, k: int) -> range:
        """The sub-models that `k` may start from and, with boosting, adds its answers to."""
        return range(min(k, 1) if self.chain == "star" else k)

    def of(self, k: int, *, pretrained: bool) -> "MemberSchedule":
        """The schedule of sub-model `k`, with the default step size filled in.

        Networks with pretrained weights lose accuracy at the others' step size
        (docs/results/families.md).
        """
        share = self.later_share if k else 1.0
        rate = self.learning_rate or (PRETRAINED if pretrained else DRAWN_OR_CUT)
        return msgspec.structs.replace(
            self, epochs=max(1, round(share * self.epochs)), learning_rate=rate
        )


class Augmentation(Record, frozen=True):
    """Strengths of a picture's variants; all of it is done by timm."""

    variants: Annotated[
        int, Meta(ge=1, le=1024, description="Variants per picture, the unchanged one included")
    ] = 8
    min_area: Annotated[
        float, Meta(gt=0, le=1, description="Smallest share of the picture that a crop keeps")
    ] = 0.6
    flip: Annotated[
        bool | None, Meta(description="Mirror half of the variants; on for folders, off for digits")
    ] = None
    rand_augment: Annotated[
        str, Meta(description="RandAugment in timm's notation, as rand-m6-n2-mstd0.5; empty is off")
    ] = ""
    erasing: Annotated[
        float, Meta(ge=0, le=1, description="Share of the variants with a random part erased")
    ] = 0.0
    mixup: Annotated[
        float, Meta(ge=0, le=10, description="Mixup's alpha: variants are blends of two; 0 is off")
    ] = 0.0
    cutmix: Annotated[
        float, Meta(ge=0, le=10, description="CutMix's alpha: variants are patched from two; 0 off")
    ] = 0.0

    @property
    def mixes(self) -> bool:
        """Tell whether a variant is made from two pictures."""
        return self.mixup > 0 or self.cutmix > 0


class RunOptions(Record, frozen=True):
    """Pictures, given weights and arithmetic of a training: `[run]` of run.toml."""

    data: Annotated[
        str,
        Meta(
            description="`digits`, or a folder with one folder per class, or with train/ and test/ "
            "or val/ that hold such folders; one tree is split by hashes of names"
        ),
    ]
    labels: Annotated[
        Literal["one", "several"],
        Meta(
            description="Labels of an item: one, its folder's name; or several: a folder a+b has "
            "items of both labels, none those without"
        ),
    ] = "one"
    limit_train: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Use only so many pictures of training and calibration, of each class alike"
        ),
    ] = None
    limit_test: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Use only so many test pictures")
    ] = None
    pretrained: Annotated[
        bool, Meta(description="Start the teacher from timm's weights, which are downloaded")
    ] = False
    teacher_checkpoint: Annotated[
        str | None,
        Meta(description="Start the teacher from this .safetensors or .pth (weights only)"),
    ] = None
    teacher_labels: Annotated[
        str | None,
        Meta(
            description="Names of the classes that the teacher's given weights answer, one a line: "
            "their classifier is cut to the data's classes by name; without names a linear probe "
            "is fitted where the number of classes differs"
        ),
    ] = None
    teacher_map: Annotated[
        str | None,
        Meta(
            description="Two columns, parted by a tab: a class of the data, and its name in "
            "--teacher-labels"
        ),
    ] = None
    weights: Annotated[
        str | None,
        Meta(
            description="Folder of pretrained weights that networks start from, each in a file of "
            "timm's name of it, as tf_efficientnet_lite0.safetensors, and labels.txt, the names of "
            "their classes; nothing is fetched"
        ),
    ] = None
    minutes: Annotated[
        Annotated[float, Meta(ge=0, le=10_000)] | None,
        Meta(
            description="Build by measurement, in about so many minutes: networks with given "
            "weights are measured on the pictures, and what time is left trains those that are "
            "chosen; 0 trains none; default without --teacher: 10"
        ),
    ] = None
    seed: Annotated[
        int, Meta(ge=0, lt=2**32, description="Seed of weights, variants and order of pictures")
    ] = 0
    autocast: Annotated[
        Literal["auto", "fp32", "bf16"],
        Meta(description="Arithmetic of training; auto is bf16 where it is quicker"),
    ] = "auto"
    teaching: Annotated[
        Literal["auto", "kept", "live"],
        Meta(
            description="Whether the teacher answers a few variants of each picture once, or is "
            "asked on a view drawn anew in every step; auto is live on an accelerator"
        ),
    ] = "auto"
    answers_keep: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(
            description="Keep only so many of the teacher's largest logits of a picture, and what "
            "the others weigh together: 4 bytes each and 2, instead of 2 for each class"
        ),
    ] = None
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Threads to train with; 0 is this process's share of the cores",
        ),
    ] = 0

    @property
    def weights_folder(self) -> Path | None:
        """Folder of pretrained weights of networks, if there is one."""
        return None if self.weights is None else Path(self.weights)


class TrainingConfig(Record, frozen=True):
    """The settings of a training: tables of run.toml, of which `options` is `[run]`."""

    options: RunOptions = field(name="run")
    teacher_schedule: TeacherSchedule = TeacherSchedule()
    schedule: MemberSchedule = MemberSchedule()
    augmentation: Augmentation = Augmentation()

    @property
    def has_teacher_weights(self) -> bool:
        """Tell whether the teacher has weights at hand, the user's or timm's."""
        return self.options.pretrained or self.options.teacher_checkpoint is not None


class DataFacts(Record, frozen=True):
    """The pictures of a run."""

    source: str
    classes: int
    limit_train: int | None
    limit_test: int | None
    #: First half of each split's digest.
    train: str
    calibration: str
    test: str


class MeasuredRun(Record, frozen=True):
    """The content of a run folder's measured.json, of a build by measurement."""

    data: DataFacts
    #: Files of pretrained weights by timm's name.
    weights: dict[str, str]
    devices: list[str]
    latency_ms: float


class TeacherFacts(Record, frozen=True):
    """The teacher's name, arguments and weights."""

    name: str
    pretrained: bool
    #: sha256 of the file given with --teacher-checkpoint.
    checkpoint: str | None
    args: dict[str, TeacherArgument] = field(default_factory=dict)
    #: Name of that file.
    file: str | None = None
    #: Its classifier: kept as it is (or drawn with the rest), rows cut by name, or a linear probe.
    classes: Literal["kept", "names", "probe"] = "kept"
    #: With `names`: the row of each class of the data.
    rows: list[int] | None = None


class Settings(Record, frozen=True):
    """Everything that a run's outcome depends on, except the plan in plan.toml."""

    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    #: Arithmetic of the matrix products in training.
    autocast: Autocast
    data: DataFacts
    teacher: TeacherFacts
    teacher_schedule: TeacherSchedule
    schedule: MemberSchedule
    augmentation: Augmentation
    #: timm's names of the plan's networks -> sha256 of the weights that they start from.
    weights: dict[str, str] = field(default_factory=dict)
    #: timm's names of networks whose heads start as rows of their own classifier -> the row of each
    #: class of the data; heads of others with weights start as a linear probe.
    class_rows: dict[str, list[int]] = field(default_factory=dict)
    #: Whether sub-models learn from the teacher's kept answers or from its answers to fresh views.
    teaching: Teaching = "kept"
    #: Digest of a crew's plan whose weights are not those of one process.
    crew: str = ""
    #: The largest of the teacher's logits that are kept of each picture; None: all.
    answers_keep: int | None = None
    format_version: Literal[1] = 1


#: Keys of a plan that are computed from others: named only where nothing else differs.
_FOLLOWING = re.compile(
    r"accuracy\b|deadline_ms|energy_j|left_out|memory_bytes|on_time|predicted_ms|reason|single_device|why"
)
_HASH = re.compile(r"[0-9a-f]{32,64}")
_SPLITS = {"train": "training", "calibration": "calibration", "test": "test"}


def differences(there: object, here: object) -> str:
    """The first five keys in which two records differ, in words; empty if they are equal.

    Users' settings come first, then parts of lists; keys computed from these are left out.
    """
    old, new = _flat(msgspec.to_builtins(there)), _flat(msgspec.to_builtins(here))
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    set_by_hand = [key for key in keys if not _FOLLOWING.search(key)]
    whole = [key for key in set_by_hand if not re.search(r"\.\d+\b", key)]
    found = [
        _difference(key, old.get(key, "absent"), new.get(key, "absent"))
        for key in whole or set_by_hand or keys
    ]
    return "; ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _difference(key: str, old: object, new: object) -> str:
    """One key that differs; hashes are not shown."""
    part, _, split = key.rpartition(".")
    if part in ("", "data") and split in _SPLITS:
        return f"the {_SPLITS[split]} pictures differ"
    if any(isinstance(value, str) and _HASH.fullmatch(value) for value in (old, new)):
        return f"{key} differs"
    return f"{key} was {old}, is now {new}"


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings and lists as one mapping from a dotted path to a plain value."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, item in items:
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat
