"""The training of a plan's sub-models by a teacher, in one run folder."""

from dataclasses import replace
from pathlib import Path

import msgspec

from mdp.errors import ConfigError, InputError, PlanRefused
from mdp.formats.plan import Plan
from partitioner.build.inputs import TrainingInputs
from partitioner.build.settings import check_scenes, run_settings, teaching_of
from partitioner.build.views import cut_views
from partitioner.crew.folder import CrewFolder
from partitioner.crew.run import Together
from partitioner.data.datasets import Dataset
from partitioner.data.scenes import remark_on
from partitioner.networks.members import check_member
from partitioner.networks.teacher import teacher_spec
from partitioner.networks.weight_init import check_source
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule, Settings, differences
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import first_then_others, on_first, together
from partitioner.training.members import train_members
from partitioner.training.teacher import ensure_targets, ensure_teacher


def train_plan(
    inputs: TrainingInputs,
    plan: Plan,
    run: RunFolder,
    progress: Progress,
    *,
    crew: Path | None = None,
    bundle: str = "",
) -> TrainingContext:
    """Finish the training of `plan` in the run folder; raises InputError.

    `crew` is the folder of a crew, whose coordinator this process is. It evaluates the sub-models
    of a `bundle` of this name, too.
    """
    together_with = None
    if crew is not None:
        together_with = Together.of(CrewFolder(crew), plan, inputs.config, inputs.data)
        inputs = replace(inputs, config=together_with.config)
    digest = "" if together_with is None else together_with.digest
    with together():
        check_scenes(plan, inputs.config)
        networks = {a.k: a.network.name for a in plan.assignments if a.network is not None}
        weights = inputs.pretrained.of(networks.values())
        teaching = teaching_of(inputs.config, plan, inputs.data, progress)
        _check_plan(plan, inputs.config.schedule)
        _check_calibration(inputs.data)
        mine = msgspec.structs.replace(
            run_settings(inputs, weights), teaching=teaching, crew=digest
        )
    on_first(lambda: run.start_or_continue(mine, plan))
    with together():
        settings = _first_settings(mine, plan, run, inputs.data)
    starts = {k: weights[name] for k, name in networks.items() if name in weights}
    work = TrainingContext(run, settings, plan, inputs.data, progress, starts)
    if remark := remark_on(inputs.data):
        progress.note(remark)
    if not work.is_trained:
        progress.note(
            f"{run.path}: takes up to {work.picture_bytes() / 1e6:,.0f} MB of cut pictures, which "
            "are removed when they are no longer needed"
        )
        # Unreadable pictures are reported before hours of training.
        with first_then_others():
            cut_views(work.first_pixels, progress)
    checkpoint = inputs.require_teacher().checkpoint
    if together_with is not None:
        return together_with.train(work, checkpoint, bundle)
    teacher = ensure_teacher(work, checkpoint)
    with first_then_others():
        targets = ensure_targets(work, teacher)
    if work.teacher_view not in work.variants.members:
        on_first(lambda: work.variants.remove_views(work.teacher_view))
    train_members(work, teacher, targets)
    work.remove_trained()
    return work


def _first_settings(mine: Settings, plan: Plan, run: RunFolder, data: Dataset) -> Settings:
    """The first process's settings; raises InputError for other pictures or another plan."""
    kept = run.settings()
    # The first process decides the arithmetic; pictures have to be equal.
    changed = differences(kept.data, msgspec.structs.replace(mine.data, source=kept.data.source))
    if changed:
        raise InputError(f"{data.source}: not what the first process trains on: {changed}")
    changed = differences(run.plan(), plan)
    if changed:
        raise InputError(f"plan: not the first process's: {changed}")
    return kept


def _check_calibration(data: Dataset) -> None:
    """Raise InputError unless every class has a picture to fit the stacking weights on."""
    known = set(data.calibration.targets.tolist())
    missing = [label for target, label in enumerate(data.labels) if target not in known]
    if missing:
        raise InputError(
            f"--data {data.source}: expected pictures of every class in the calibration split, "
            f"found none of {', '.join(missing[:5])}"
        )


def _check_plan(plan: Plan, schedule: MemberSchedule) -> None:
    """Raise unless the plan can be built and its teacher has the planned shape."""
    if plan.refused:
        raise PlanRefused(f"plan refused: {plan.reason}")
    built = teacher_spec(plan.require_teacher().name, plan.require_teacher().args)
    changed = differences(plan.require_teacher(), built)
    if changed:
        raise ConfigError(f"plan, key `teacher`: not the shape of {built.name!r}: {changed}")
    for assignment in plan.assignments:
        check_member(assignment.spec)
    if schedule.start == "teacher":
        vits = [a.submodel for a in plan.assignments if a.submodel is not None]
        check_source(plan.require_teacher(), vits)
