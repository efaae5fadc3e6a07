"""Set up a run: pictures, settings, and the teacher's accuracy."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import Plan, TeacherSpec
from partitioner.assembly.class_rows import rows_by_network
from partitioner.assembly.members import read_map, read_names, rows_of
from partitioner.data.augment import check_policy
from partitioner.data.crops import NAMED, UnreadablePictures, View, view_of
from partitioner.data.datasets import DIGITS, SPLITS, Dataset, SplitName, open_dataset
from partitioner.data.variants import canvas_side
from partitioner.networks.teacher_weights import known_classes
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Augmentation,
    DataFacts,
    Settings,
    TeacherFacts,
    Teaching,
    TrainingConfig,
)
from partitioner.run.weights import weights_in
from partitioner.training.compute import memory_bytes, quicker_autocast, training_device
from partitioner.training.distributed import first_then_others, together
from partitioner.training.teacher import GivenTeacher
from partitioner.training.world import world

if TYPE_CHECKING:
    from partitioner.training.teacher import GivenTeacher


def settings_for(
    asked: TrainingConfig,
    data: Dataset,
    teacher: TeacherSpec,
    weights: Mapping[str, Path] = MappingProxyType({}),
) -> Settings:
    """The content of settings.json; `weights` are the files of the plan's networks."""
    options, flip = asked.options, asked.augmentation.flip
    facts = teacher_facts(asked, data, teacher)
    check_policy(asked.augmentation.rand_augment)
    return Settings(
        seed=options.seed,
        autocast=quicker_autocast() if options.autocast == "auto" else options.autocast,
        data=DataFacts(
            source=data.source if data.source == DIGITS else str(Path(data.source).resolve()),
            classes=len(data.labels),
            limit_train=options.limit_train,
            limit_test=options.limit_test,
            train=data.train.digest[:32],
            calibration=data.calibration.digest[:32],
            test=data.test.digest[:32],
        ),
        teacher=facts,
        teacher_schedule=asked.teacher_schedule.settled(from_scratch=not asked.given_teacher),
        schedule=asked.schedule,
        # Mirrored digits are other signs.
        augmentation=msgspec.structs.replace(
            asked.augmentation, flip=data.source != DIGITS if flip is None else flip
        ),
        weights={name: sha256_of(path) for name, path in weights.items()},
        class_rows=class_rows(asked, data, weights),
    )


def class_rows(
    asked: TrainingConfig, data: Dataset, weights: Mapping[str, Path]
) -> dict[str, list[int]]:
    """The row of each class of the data in the classifiers of pretrained `weights`, by network.

    The names of their classes are labels.txt in the folder of weights, else the teacher's labels
    where the number of classes agrees, else ImageNet's for 1,000 classes. Networks with other class
    names are left out. Raises InputError for labels that are not as many as a classifier has rows.
    """
    options = asked.options
    return rows_by_network(
        weights,
        data.labels,
        options.weights_folder,
        Path(options.teacher_labels) if options.teacher_labels else None,
        read_map(Path(options.teacher_map)) if options.teacher_map else {},
    )


def with_rows(asked: TrainingConfig, data: Dataset, teacher: TeacherFacts | None) -> set[str]:
    """Networks at hand with `class_rows`, where the teacher has such rows and is taken as it is."""
    folder = asked.options.weights_folder
    if folder is None or teacher is None or teacher.classes != "names":
        return set()
    if asked.teacher_schedule.epochs:
        return set()
    found = set[str]()
    for name, path in weights_in(folder).items():
        with suppress(InputError):  # refused once it is planned
            found |= class_rows(asked, data, {name: path}).keys()
    return found


def teaching_of(asked: TrainingConfig, plan: Plan, data: Dataset, progress: Progress) -> Teaching:
    """The teaching mode, with `auto` resolved; raises InputError where live is impossible."""
    wanted, device = asked.options.teaching, training_device()
    if wanted == "kept" or (wanted == "auto" and device.type == "cpu"):
        return "kept"
    obstacle = _not_live(asked, plan) or _too_large(plan, data, memory_bytes(device))
    if not obstacle:
        return "live"
    if wanted == "live":
        raise InputError(f'run.teaching = "live": {obstacle}, or run.teaching = "kept"')
    progress.note(f"the teacher's kept answers teach, not live ones: {obstacle}")
    return "kept"


def _not_live(asked: TrainingConfig, plan: Plan) -> str:
    """The setting that live teaching does not support; empty if there is none."""
    if plan.cameras:
        return "expected pictures without scenes, got cameras"
    augmentation, plain = asked.augmentation, Augmentation()
    # Training the teacher uses variants.
    several = augmentation.variants != plain.variants and not asked.teacher_schedule.epochs
    for name, given, remedy in (
        ("schedule.patience", asked.schedule.patience, "0: the last averaged weights are taken"),
        ("augmentation.rand_augment", augmentation.rand_augment, "none"),
        ("augmentation.erasing", augmentation.erasing, "0"),
        ("augmentation.cutmix", augmentation.cutmix, "0"),
        (
            "augmentation.variants",
            several and augmentation.variants,
            "none: every view is drawn anew",
        ),
    ):
        if given:
            return f"{name} {given}: expected {remedy}"
    if world().size > 1:
        return f"expected one process, torchrun started {world().size}"
    return ""


def _too_large(plan: Plan, data: Dataset, there_bytes: int) -> str:
    """The memory of the pictures where the device has too little; else empty."""
    teacher = View(plan.require_teacher().shape.image_size)
    side = canvas_side([teacher, *(view_of(a) for a in plan.assignments)])
    needed_bytes, most_bytes = 3 * side**2 * len(data.train), there_bytes // 2
    if needed_bytes <= most_bytes:
        return ""
    return (
        f"{len(data.train):,} pictures of {side} px take {needed_bytes:,} bytes, expected at most "
        f"{most_bytes:,}, half of the device's memory: give --limit-train"
    )


def teacher_facts(asked: TrainingConfig, data: Dataset, teacher: TeacherSpec) -> TeacherFacts:
    """The source of the teacher's weights, and the mapping of their classes to the data's.

    Raises InputError for weights that do not fit the teacher, or names that do not fit the classes.
    """
    options, labels = asked.options, asked.options.teacher_labels
    if options.pretrained and options.teacher_checkpoint is not None:
        raise InputError("--pretrained and --teacher-checkpoint: expected one of the two, got both")
    if labels is not None and not asked.given_teacher:
        raise InputError(
            "--teacher-labels: expected --teacher-checkpoint or --pretrained beside it"
        )
    if options.teacher_map is not None and labels is None:
        raise InputError("--teacher-map: expected --teacher-labels beside it")
    if not asked.given_teacher and not asked.teacher_schedule.epochs:
        raise InputError(
            f"--teacher: {teacher.name!r} does not know these {len(data.labels)} classes: give "
            "--teacher-epochs N to train it, --teacher-checkpoint FILE or --pretrained"
        )
    checkpoint = checkpoint_of(asked)
    facts = TeacherFacts(
        name=teacher.name,
        pretrained=options.pretrained,
        checkpoint=sha256_of(checkpoint) if checkpoint else None,
        args=teacher.args,
        file=checkpoint.name if checkpoint else None,
    )
    if not asked.given_teacher:
        return facts
    known = known_classes(teacher, checkpoint)
    if labels is None:
        kept = known == len(data.labels)
        return msgspec.structs.replace(facts, classes="kept" if kept else "probe")
    names = read_names(Path(labels))
    if len(names) != known:
        raise InputError(
            f"{labels}: names {len(names)} classes, expected {known}: as many as the classifier of "
            f"{checkpoint or teacher.name} has rows"
        )
    rows = rows_of(
        names,
        data.labels,
        read_map(Path(options.teacher_map)) if options.teacher_map else {},
        labels,
        "give --teacher-map FILE with their names there, or no --teacher-labels for a linear probe",
    )
    return msgspec.structs.replace(facts, classes="names", rows=rows)


def given_teacher(
    run: RunFolder,
    teacher: TeacherSpec,
    facts: TeacherFacts,
    data: Dataset,
    asked: TrainingConfig,
    progress: Progress,
) -> "GivenTeacher":
    """A teacher with given weights; raises InputError where `run` has another one."""
    from partitioner.training.teacher import GivenTeacher

    with together():
        run.check_teacher(facts)
    return GivenTeacher(run, teacher, facts, data, checkpoint_of(asked), progress)


def teacher_accuracy(given: "GivenTeacher", asked: TrainingConfig, progress: Progress) -> float:
    """Share of the calibration pictures that a teacher with given weights is right on.

    As it is before it is trained further. Raises InputError.
    """
    with first_then_others():
        if not given.measured:
            cut_views(given.pixels, progress)
        given.accuracy()
    share = given.accuracy()
    if asked.teacher_schedule.epochs:
        progress.note(
            f"teacher: {share:.1%} of the calibration pictures before more training, assumed by "
            "the plan; --teacher-accuracy overrides it"
        )
    return share


def checkpoint_of(asked: TrainingConfig) -> Path | None:
    """The user's teacher checkpoint, if any; raises InputError where it is missing."""
    if asked.options.teacher_checkpoint is None:
        return None
    path = Path(asked.options.teacher_checkpoint)
    if not path.is_file():
        raise InputError(f"{path}: expected a teacher checkpoint, found no file")
    return path


def open_pictures(asked: TrainingConfig, cameras: Sequence[str] = ()) -> Dataset:
    """The pictures of a training, or with `cameras` its scenes; raises InputError."""
    options = asked.options
    return open_dataset(
        options.data,
        limit_train=options.limit_train,
        limit_test=options.limit_test,
        cameras=cameras,
    )


def check_scenes(plan: Plan, asked: TrainingConfig) -> None:
    """Raise InputError for settings that do not fit a plan with cameras, or one without."""
    schedule = asked.schedule
    if not plan.cameras:
        if schedule.shared:
            raise InputError("schedule.shared: expected --camera for every device beside it")
        return
    if len([a for a in plan.assignments if a.camera]) < len(plan.assignments):
        without = next(a.device for a in plan.assignments if a.camera is None)
        raise InputError(
            f"--camera: expected one for every device of the plan, got none: {without}"
        )
    for name, weight in (
        ("boost_weight", schedule.boost_weight),
        ("stack_weight", schedule.stack_weight),
    ):
        if weight:
            raise InputError(
                f"schedule.{name}: expected 0 with --camera, got {weight:g}: sub-models see "
                "different pictures"
            )
    if asked.augmentation.mixes and schedule.teacher_views != "own":
        raise InputError(
            f"schedule.teacher_views: expected own with mixup or cutmix, got "
            f"{schedule.teacher_views}: the views of a scene are mixed with different others"
        )


def cut_views(cut: Callable[[SplitName], object], progress: Progress) -> None:
    """Cut every split; raises UnreadablePictures naming the unreadable ones of all of them."""
    broken: list[str] = []
    for split in SPLITS:
        try:
            cut(split)
        except UnreadablePictures as error:
            broken += error.reasons
    if len(broken) > NAMED:
        for reason in broken:
            progress.note(reason)
    if broken:
        raise UnreadablePictures(broken)
