"""What a run is about to be: its pictures, its settings, and how good its teacher is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import TeacherSpec
from partitioner.assembly.members import read_map, read_names, rows_of
from partitioner.data.datasets import DIGITS, SPLITS, Dataset, SplitName, open_dataset
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Asked,
    DataFacts,
    Settings,
    TeacherFacts,
)
from partitioner.training.distributed import first_then_others, together


def settings_for(
    asked: Asked,
    data: Dataset,
    teacher: TeacherSpec,
    weights: Mapping[str, Path] = MappingProxyType({}),
) -> Settings:
    """What this run's settings.json has to say; `weights` are those of the plan's networks."""
    from partitioner.data.augment import check_policy
    from partitioner.training.compute import quicker_autocast

    options, flip = asked.options, asked.augmentation.flip
    facts = teacher_facts(asked, data, teacher)
    check_policy(asked.augmentation.rand_augment)
    if asked.schedule.shrinkage < 1 and asked.schedule.boost_target != "logits":
        raise InputError("schedule.shrinkage: expected 1 unless boost_target is logits")
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
        joint_schedule=asked.joint_schedule,
        # Mirrored digits are other signs; mirrored photographs are still photographs.
        augmentation=msgspec.structs.replace(
            asked.augmentation, flip=data.source != DIGITS if flip is None else flip
        ),
        weights={name: sha256_of(path) for name, path in weights.items()},
    )


def teacher_facts(asked: Asked, data: Dataset, teacher: TeacherSpec) -> TeacherFacts:
    """Where the teacher's weights come from, and how their classes become the data's.

    Raises InputError where the weights do not fit the teacher or the names not the classes.
    """
    from partitioner.networks.teacher_weights import known_classes

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


def teacher_accuracy(
    run: RunFolder,
    teacher: TeacherSpec,
    facts: TeacherFacts,
    data: Dataset,
    asked: Asked,
    progress: Progress,
) -> float:
    """Share of the calibration pictures that a teacher with given weights is right on.

    As it is before it is trained further. Raises InputError, also where `run` has another teacher.
    """
    from partitioner.training.teacher import GivenTeacher

    with together():
        run.check_teacher(facts)
    given = GivenTeacher(run, teacher, facts, data, checkpoint_of(asked), progress)
    with first_then_others():
        cut_views(given.pixels, progress)
        given.accuracy()
    share = given.accuracy()
    if asked.teacher_schedule.epochs:
        progress.note(
            f"teacher: {share:.1%} of the calibration pictures before it is trained further, which "
            "the plan is made for; --teacher-accuracy tells it another"
        )
    return share


def checkpoint_of(asked: Asked) -> Path | None:
    """The user's teacher checkpoint, if one was named; raises InputError where it is not there."""
    if asked.options.teacher_checkpoint is None:
        return None
    path = Path(asked.options.teacher_checkpoint)
    if not path.is_file():
        raise InputError(f"{path}: expected a teacher checkpoint, found no file")
    return path


def open_asked(asked: Asked) -> Dataset:
    """The pictures that a training was asked for; raises InputError."""
    options = asked.options
    return open_dataset(
        options.data, limit_train=options.limit_train, limit_test=options.limit_test
    )


def cut_views(cut: Callable[[SplitName], object], progress: Progress) -> None:
    """Cut every split; raises UnreadablePictures naming the unreadable ones of all of them."""
    from partitioner.data.crops import NAMED, UnreadablePictures

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
