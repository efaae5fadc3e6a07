"""A whole build in a row: read the inputs, plan, train, export and evaluate."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.build import MeasuredBuild, build_measured
from partitioner.build.plan import plan_with_teacher
from partitioner.build.steps import (
    check_members,
    check_target,
    evaluate_step,
    export_step,
    inspect_step,
    quantize_step,
)
from partitioner.build.train import train_plan
from partitioner.config import BuildConfig, measures
from partitioner.export.evaluate import Report
from partitioner.export.inspect_bundle import InspectRequest, open_inspected
from partitioner.planner.make_plan import Planned
from partitioner.run.folder import RunFolder, bundle_name, default_run
from partitioner.run.progress import Progress
from partitioner.training.distributed import is_first, lock_run, together
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
    crew that trains, with this process as its desk. With `inspect` the models get anomaly heads in
    the end; whether there are enough scenes is checked before anything is trained. `clock` gives
    the seconds of a build by measurement.

    Of torchrun's processes all but the first return None. Raises InputError and PlanRefused.
    """
    folder = RunFolder(run or default_run(out))
    named = _check_request(config, out, name, crew)
    inputs = BuildInputs.read(config)
    if measures(config):
        _check_inspected(inspect, inputs.cameras.values())
        measured = build_measured(inputs, out, folder, named, progress, clock)
        if inspect is not None:
            with lock_run(folder):
                inspect_step(out, inspect, progress)
        return BuildOutcome(measured.report, measured)
    planned = plan_with_teacher(inputs, folder, progress)
    inputs = _accept(planned, inputs, on_plan)
    _check_inspected(inspect, planned.plan.cameras)
    with lock_run(folder):
        work = train_plan(inputs, planned.plan, folder, progress, crew=crew, bundle=named)
        if not is_first():
            return None
        export_step(work, out, named)
        bundle, report = evaluate_step(out, inputs.data, folder, progress)
        profiles = [device.profile for device in planned.problem.devices]
        report = quantize_step(bundle, inputs.data, folder, profiles, progress) or report
        folder.remove_pictures()
        if inspect is not None:
            inspect_step(out, inspect, progress)
        return BuildOutcome(report)


@together()
def _check_request(config: BuildConfig, out: Path, name: str | None, crew: Path | None) -> str:
    """The bundle's name; raises InputError for what this build cannot do, before files are read."""
    named = bundle_name(name, out)
    if measures(config) and crew is not None:
        raise InputError("--crew: a build by measurement trains on this machine: expected none")
    if measures(config) and world().size > 1:
        raise InputError("torchrun: expected one process for a build by measurement")
    check_target(out)
    return named


@together()
def _check_inspected(inspect: InspectRequest | None, cameras: Iterable[str]) -> None:
    """Raise InputError for too few scenes to fit anomaly heads to."""
    if inspect is not None:
        open_inspected(inspect, cameras)


@together()
def _accept(
    planned: Planned, inputs: BuildInputs, on_plan: Callable[[Planned], object]
) -> BuildInputs:
    """The inputs of the plan's cameras alone, once `on_plan` has the plan.

    Raises PlanRefused, and InputError for sub-models that cannot be measured here.
    """
    if not planned.plan.refused:
        inputs = inputs.for_cameras(planned.plan.cameras)
        check_members(planned.plan, inputs.data)
    if is_first():
        on_plan(planned)
    planned.check()
    return inputs
