"""Builds and plans by measurement as `mdp-partition` shows them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from mdp import console
from mdp.errors import InputError
from mdp.files import write_toml
from mdp.formats.bundle import Bundle
from partitioner.cli.common import interruptible
from partitioner.config import BuildConfig
from partitioner.run.folder import RunFolder, bundle_name
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, use_threads
from partitioner.training.world import world


def plan(config: BuildConfig, out: Path, *, json: bool) -> None:
    """Measure and choose, print the outcome, and write the plan; raises InputError."""
    with interruptible("nothing was written"), TemporaryDirectory(prefix="mdp-views-") as cache:
        use_threads(config.options.threads or own_threads())
        from partitioner.measured.inputs import BuildInputs
        from partitioner.measured.planning import plan_of
        from partitioner.pilot.measure import run_pilot

        progress, inputs = Progress(), BuildInputs.read(config)
        pilot = run_pilot(
            inputs.data,
            inputs.weights,
            inputs.devices(),
            inputs.cameras,
            inputs.target_ms,
            Path(cache),
            progress,
            inputs.class_rows,
        )
        planned, tested = plan_of(pilot, inputs), len(inputs.data.test)
    if json:
        console.print_json({**msgspec.to_builtins(planned), "pilot": pilot.to_json(tested)})
    else:
        from partitioner.cli import pilot_tables

        pilot_tables.print_pilot(pilot)
        print(f"all together: {pilot.predict_words(tested)} test pictures")
    if out.exists():
        progress.note(f"{out}: replaced")
    write_toml(out, planned)


def build(
    config: BuildConfig, out: Path, run: Path, *, name: str | None, crew: Path | None, json: bool
) -> None:
    """Build a bundle by measurement and print its tables; raises InputError."""
    if crew is not None:
        raise InputError("--crew: a build by measurement trains on this machine: expected none")
    if world().size > 1:
        raise InputError("torchrun: expected one process for a build by measurement")
    named = bundle_name(name, out)
    with interruptible(f"what is finished is kept in {run}, and the same command goes on there"):
        use_threads(config.options.threads or own_threads())
        from partitioner.measured.build import build_measured
        from partitioner.measured.inputs import BuildInputs

        progress = Progress()
        inputs = BuildInputs.read(config)
        found = build_measured(inputs, out, RunFolder(run), named, progress)
    bundle = Bundle.open(out)
    if json:
        value = {"bundle": str(out), "digest": bundle.digest, "run": str(run), **found.to_json()}
        console.print_json({**value, **found.report.as_json(bundle)})
        return
    from partitioner.cli import pilot_tables, tables

    pilot_tables.print_pilot(found.pilot)
    tables.print_report(found.report, bundle.manifest.plan)
    print(pilot_tables.predicted_and_measured(found))
    print(f"{out}: {len(bundle.manifest.plan.assignments)} sub-models, digest {bundle.digest}")
