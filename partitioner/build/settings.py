"""The settings of a run: what its settings.json holds, and whether they go with its plan."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import Plan
from partitioner.build.inputs import TrainingInputs
from partitioner.data.augment import check_policy
from partitioner.data.crops import View, view_of
from partitioner.data.datasets import DIGITS, Dataset
from partitioner.data.variants import canvas_side
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Augmentation,
    DataFacts,
    RunOptions,
    Settings,
    Teaching,
    TrainingConfig,
)
from partitioner.training.compute import memory_bytes, quicker_autocast, training_device
from partitioner.training.largest_logits import MOST_CLASSES
from partitioner.training.world import world


def data_facts(options: RunOptions, data: Dataset) -> DataFacts:
    """The pictures of a run, for its folder."""
    return DataFacts(
        source=data.source if data.source == DIGITS else str(Path(data.source).resolve()),
        classes=len(data.labels),
        limit_train=options.limit_train,
        limit_test=options.limit_test,
        train=data.train.digest[:32],
        calibration=data.calibration.digest[:32],
        test=data.test.digest[:32],
    )


def run_settings(
    inputs: TrainingInputs, weights: Mapping[str, Path] = MappingProxyType({})
) -> Settings:
    """The content of settings.json; raises InputError.

    `weights` are the files, by timm's name, that the plan's networks begin with.
    """
    config, data = inputs.config, inputs.data
    options, flip = config.options, config.augmentation.flip
    facts = inputs.require_teacher().facts
    check_kept(options.answers_keep, len(data.labels))
    check_policy(config.augmentation.rand_augment)
    return Settings(
        seed=options.seed,
        autocast=quicker_autocast() if options.autocast == "auto" else options.autocast,
        data=data_facts(options, data),
        teacher=facts,
        teacher_schedule=config.teacher_schedule.with_default_rate(
            from_scratch=not config.has_teacher_weights
        ),
        schedule=config.schedule,
        # Mirrored digits are other signs.
        augmentation=msgspec.structs.replace(
            config.augmentation, flip=data.source != DIGITS if flip is None else flip
        ),
        weights={name: sha256_of(path) for name, path in weights.items()},
        class_rows=inputs.pretrained.class_rows(weights),
        answers_keep=options.answers_keep,
    )


def check_kept(keep: int | None, classes: int) -> None:
    """Raise InputError for more kept logits than classes, and more classes than rows can name."""
    if keep is None:
        return
    if keep > classes:
        raise InputError(
            f"run.answers_keep: expected at most {classes}, as many as classes, got {keep}"
        )
    if classes > MOST_CLASSES:
        raise InputError(
            f"run.answers_keep: expected at most {MOST_CLASSES:,} classes, found {classes:,}"
        )


def teaching_of(config: TrainingConfig, plan: Plan, data: Dataset, progress: Progress) -> Teaching:
    """The teaching mode, with `auto` resolved; raises InputError where live is impossible."""
    wanted, device = config.options.teaching, training_device()
    if wanted == "kept" or (wanted == "auto" and device.type == "cpu"):
        return "kept"
    obstacle = _not_live(config, plan) or _too_large(plan, data, memory_bytes(device))
    if not obstacle:
        return "live"
    if wanted == "live":
        raise InputError(f'run.teaching = "live": {obstacle}, or run.teaching = "kept"')
    progress.note(f"the teacher's kept answers teach, not live ones: {obstacle}")
    return "kept"


def _not_live(config: TrainingConfig, plan: Plan) -> str:
    """The setting that live teaching does not support; empty if there is none."""
    if plan.cameras:
        return "expected pictures without scenes, got cameras"
    augmentation, plain = config.augmentation, Augmentation()
    # Training the teacher uses variants.
    several = augmentation.variants != plain.variants and not config.teacher_schedule.epochs
    for name, given, remedy in (
        ("run.answers_keep", config.options.answers_keep, "none: no answers are kept"),
        ("schedule.patience", config.schedule.patience, "0: the last averaged weights are taken"),
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


def check_scenes(plan: Plan, config: TrainingConfig) -> None:
    """Raise InputError for settings that do not fit a plan with cameras, or one without."""
    schedule = config.schedule
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
    if config.augmentation.mixes and schedule.teacher_views != "own":
        raise InputError(
            f"schedule.teacher_views: expected own with mixup or cutmix, got "
            f"{schedule.teacher_views}: the views of a scene are mixed with different others"
        )
