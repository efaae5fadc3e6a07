"""A whole build in a row: read the inputs, plan, train, export and evaluate."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mdp.errors import InputError
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.build import MeasuredBuild, build_measured
from partitioner.build.plan import plan_with_teacher
from partitioner.build.steps import evaluate_step, export_step, inspect_step, quantize_step
from partitioner.build.train import train_plan
from partitioner.config import BuildConfig, measures
from partitioner.export.evaluate import Report
from partitioner.export.inspect_bundle import InspectRequest, open_inspected
from partitioner.planner.make_plan import Planned
from partitioner.run.folder import RunFolder, bundle_name, default_run
from partitioner.run.progress import Progress
from partitioner.run.target import check_target
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import lock_run, on_first, together
from partitioner.training.world import world


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """The outcome of a build, whose bundle has the evaluation of the report."""

    report: Report
    #: What was measured before and kept; None with a teacher.
    measured: MeasuredBuild | None = None


def build_bundle(
    config: BuildConfig,
    out: Path,
    progress: Progress,
    *,
    run: Path | None = None,
    name: str | None = None,
    crew: Path | None = None,
    inspect: InspectRequest | None = None,
    on_plan: Callable[[Planned], object] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> BuildOutcome | None:
    """Plan, train, export and evaluate in a row, by measurement or with a teacher.

    `on_plan` gets the plan of a build with a teacher, refused or not. `crew` is the folder of a
    crew that trains, with this process as its coordinator. With `inspect` the models get anomaly
    heads in the end; whether there are enough scenes is checked before anything is trained. `clock`
    gives the seconds of a build by measurement.

    Of torchrun's processes all but the first return None. Raises InputError and PlanRefused.
    """
    folder, by_measurement = RunFolder(run or default_run(out)), measures(config)
    with together():
        if by_measurement:
            _check_one_process(crew)
        named = bundle_name(name, out)
        check_target(out)
        inputs = BuildInputs.read(config)
        inputs.check_run(folder)
        if by_measurement:
            _check_inspected(inspect, inputs.cameras.values())
    if by_measurement:
        measured = build_measured(inputs, out, folder, named, progress, clock)
        if inspect is not None:
            with lock_run(folder):
                inspect_step(out, inspect, progress)
        return BuildOutcome(measured.report, measured)
    planned = plan_with_teacher(inputs, folder, progress)
    on_first(partial(_accept, planned, inspect, on_plan))
    inputs = inputs.for_cameras(planned.plan.cameras)
    with lock_run(folder):
        work = train_plan(inputs, planned.plan, folder, progress, crew=crew, bundle=named)
        return on_first(partial(_finish, work, planned, out, named, inspect))


def _check_one_process(crew: Path | None) -> None:
    """Raise InputError where others are to train with this process."""
    if crew is not None:
        raise InputError("--crew: a build by measurement trains on this machine: expected none")
    if world().size > 1:
        raise InputError("torchrun: expected one process for a build by measurement")


def _check_inspected(inspect: InspectRequest | None, cameras: Iterable[str]) -> None:
    """Raise InputError for too few scenes to fit anomaly heads to."""
    if inspect is not None:
        open_inspected(inspect, cameras)


def _accept(
    planned: Planned, inspect: InspectRequest | None, on_plan: Callable[[Planned], object]
) -> None:
    """Hand over the plan, refused or not.

    Raises PlanRefused, and InputError for too few scenes to inspect.
    """
    on_plan(planned)
    planned.check()
    _check_inspected(inspect, planned.plan.cameras)


def _finish(
    work: TrainingContext, planned: Planned, out: Path, name: str, inspect: InspectRequest | None
) -> BuildOutcome:
    """Export and evaluate what was trained, and fit anomaly heads where they are wanted."""
    run, data, progress = work.run, work.data, work.progress
    export_step(work, out, name)
    bundle, report = evaluate_step(out, data, run, progress)
    profiles = [device.profile for device in planned.problem.devices]
    report = quantize_step(bundle, data, run, profiles, progress) or report
    run.remove_pictures()
    if inspect is not None:
        inspect_step(out, inspect, progress)
    return BuildOutcome(report)
