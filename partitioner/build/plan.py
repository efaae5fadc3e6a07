"""The plan of a build with a teacher, by what earlier trainings were worth."""

from contextlib import suppress

import msgspec

from mdp.errors import InputError
from partitioner.build.inputs import BuildInputs, TrainingInputs
from partitioner.build.steps import check_members
from partitioner.data.scenes import single_pictures
from partitioner.estimates.accuracy_law import Training
from partitioner.planner.make_plan import Planned, make_planned
from partitioner.run.folder import RunFolder
from partitioner.run.plan_settings import PlanSettings
from partitioner.run.progress import Progress
from partitioner.training.distributed import together


def plan_with_teacher(inputs: BuildInputs, run: RunFolder, progress: Progress) -> Planned:
    """The plan of a build, refused or not.

    Raises InputError, also for sub-models that cannot be measured on this machine.

    A teacher with given weights is measured on the calibration pictures first, unless the settings
    say how accurate it is.
    """
    settings = inputs.config.plan
    if inputs.config.has_teacher_weights and settings.teacher_accuracy is None:
        pictures = single_pictures(inputs.data)
        share = inputs.require_teacher().accuracy(run, pictures, progress)
        settings = msgspec.structs.replace(settings, teacher_accuracy=share)
    with together():
        planned = _plan(inputs, settings)
        if not planned.plan.refused:
            check_members(planned.plan, inputs.for_cameras(planned.plan.cameras).data)
    return planned


def _plan(inputs: BuildInputs, settings: PlanSettings) -> Planned:
    schedule = inputs.config.schedule
    return make_planned(
        inputs.require_teacher().spec,
        settings,
        len(inputs.data.labels),
        training=Training(
            pictures=len(inputs.data.train),
            epochs=schedule.epochs,
            start="scratch" if schedule.start == "scratch" else "cut",
        ),
        rows=networks_that_know(inputs),
        profiles=list(inputs.profiles.values()),
        weights=None if inputs.config.options.weights is None else inputs.weights,
    )


def networks_that_know(inputs: TrainingInputs) -> set[str]:
    """Networks at hand that know the data's classes, beside a teacher that does and stays as it is.

    Empty where the teacher has no rows for the classes, or is trained.
    """
    config, found = inputs.config, set[str]()
    if not config.has_teacher_weights or config.teacher_schedule.epochs:
        return found
    if inputs.require_teacher().facts.classes != "names":
        return found
    for name in inputs.pretrained.files:
        with suppress(InputError):  # refused once it is planned
            found |= inputs.pretrained.class_rows([name]).keys()
    return found
