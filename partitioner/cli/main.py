"""`mdp-partition`: decompose a vision transformer into sub-models for unequal devices."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from mdp import console
from mdp.errors import InputError
from mdp.extras import PARTITION, install
from mdp.formats.bundle import Bundle
from mdp.formats.packaged import bundle_by_name
from mdp.formats.plan import read_plan
from mdp.fusion.anomaly_table import DEFAULT_GOOD_RATE
from partitioner import api
from partitioner.cli import assemble as assemble_command
from partitioner.cli import crew as crew_command
from partitioner.cli import export as export_command
from partitioner.cli import inspect as inspect_command
from partitioner.cli import plan as plan_command
from partitioner.cli import quantize as quantize_command
from partitioner.cli import weights as weights_command
from partitioner.cli.common import (
    CrewFolderOption,
    JsonOption,
    NameOption,
    OutOption,
    OwnRunOption,
    RunOption,
    interruptible,
    prepare,
    say,
)
from partitioner.cli.options import add_config_options
from partitioner.cli.simulate import add_to as add_simulate
from partitioner.config import Given
from partitioner.data.datasets import SPLITS, open_dataset
from partitioner.planner.make_plan import Planned
from partitioner.run.folder import RunFolder, default_run
from partitioner.run.progress import Progress
from partitioner.training.distributed import (
    StoppedElsewhere,
    is_first,
    join_group,
    lock_run,
    together,
)

EXIT_CODES = (
    "Exit codes: 0 fine, 2 usage or bad input, 4 the plan was refused, 130 interrupted "
    "(the same command goes on from there), 1 anything unforeseen."
)
app = console.new_app(
    "Decompose a vision transformer into sub-models for unequal devices, which see one scene by "
    "several cameras, or one picture. " + EXIT_CODES,
    "mdp-partition",
)

LimitTestOption = Annotated[int | None, typer.Option(help="Use only so many test pictures.", min=1)]
#: Settings that change between trainings; the others are keys of the --config file.
_TRAINING = (
    *("run.data", "run.limit_train", "run.limit_test", "run.pretrained", "run.teacher_checkpoint"),
    *("run.teacher_labels", "run.weights", "teacher_schedule.epochs", "schedule.epochs"),
    *("run.seed", "run.threads"),
)


plan_command.add_to(app)


@app.command()
@add_config_options(*_TRAINING)
def train(
    *,
    given: Given,
    plan: Annotated[Path, typer.Option(help="The plan.toml of mdp-partition plan.")],
    run: RunOption,
    crew: CrewFolderOption = None,
    json: JsonOption = False,
) -> None:
    """Train the teacher, if asked to, and then a plan's sub-models one after another.

    Under torchrun its processes train each network together, to the same outcome:
    torchrun --nproc-per-node 2 --no-python -- mdp-partition train ...

    Example: mdp-partition train --plan plan.toml --data photos/ --run photos.run
    --teacher-epochs 10
    """
    config, folder = given.training(), RunFolder(run)
    with interruptible(_resume_hint(run)), _one_of_several(config.options.threads):
        from partitioner.build.inputs import TrainingInputs
        from partitioner.build.train import train_plan

        with together():
            chosen = read_plan(plan)
            inputs = TrainingInputs.of_plan(config, chosen)
        with lock_run(folder):
            train_plan(inputs, chosen, folder, _progress(), crew=crew)
    if is_first():
        value = {"run": str(run), "members": len(chosen.assignments), **crew_command.costs(crew)}
        say(json, value, f"trained: {run}")


export_command.add_to(app)


@app.command()
def evaluate(
    *,
    bundle: Annotated[
        Path, typer.Option(callback=bundle_by_name, help="Bundle folder to measure, or a name.")
    ],
    run: OwnRunOption = None,
    data: Annotated[
        str | None, typer.Option(help="Pictures, as for train; default: the run's own.")
    ] = None,
    limit_test: LimitTestOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put the outcome into the bundle's manifest.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure the teacher, each sub-model and every arrival subset on the test split.

    The bundle stays as it is, unless --write puts the outcome into its manifest: the expected
    accuracy of every answer. The accuracy of a teacher whose run is missing is kept. The bundle's
    digest does not change.

    Example: mdp-partition evaluate --bundle bundle/ --data photos/ --write
    """
    with interruptible(f"{bundle} is as it was"):
        opened = Bundle.open(bundle)
        report = api.evaluate(
            bundle, data=data, run=run, limit_test=limit_test, write=write, progress=Progress()
        )
    if json:
        value = {"digest": opened.digest, "written": write}
        console.print_json({**value, **report.as_json(opened)})
    else:
        _tables().print_report(report, opened.manifest.plan, opened.manifest.labels)
    Progress().note(_tables().manifest_remark(opened, report, write=write))


@app.command(cls=console.list_options(*plan_command.LISTS))
@add_config_options(
    *("plan.teacher", "plan.teacher_args", "plan.profiles", "plan.cameras", "plan.latency_ms"),
    *("plan.min_accuracy", "plan.families", "plan.anyway", "run.minutes", "run.labels", *_TRAINING),
)
def build(
    *,
    given: Given,
    out: OutOption,
    run: OwnRunOption = None,
    name: NameOption = None,
    crew: CrewFolderOption = None,
    inspect: Annotated[
        str | None, typer.Option(help="Fit anomaly heads to these good scenes.")
    ] = None,
    defects: Annotated[
        str | None, typer.Option(help="Folder of defective scenes, for --inspect.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help=f"Percent of good items rejected; default: {100 * DEFAULT_GOOD_RATE:g}."),
    ] = None,
    all_good: Annotated[
        bool, typer.Option("--all-good", help="Take all scenes of --inspect for good.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a bundle for these devices; what is done already is not done again.

    Without --teacher by measurement: every network of --weights, and every depth of a vision
    transformer, is measured on the pictures with a classifier of their classes. Those that are best
    together within --latency-ms are trained in what is left of --minutes, and served.

    Example: mdp-partition build --weights weights/ --data photos/ --profiles n100 raspberry-pi-5
    --latency-ms 40 --out bundle/

    With --teacher it is planned by what earlier trainings were worth, trained, and served.

    Example: mdp-partition build --teacher vit_base_patch16_224 --data photos/
    --profiles a.toml b.toml c.toml --latency-ms 100 --teacher-epochs 10 --out bundle/
    """
    config, folder = given.build(), run or default_run(out)
    if inspect is None and (defects is not None or rate is not None or all_good):
        raise InputError("--defects, --rate, --all-good: expected --inspect GOOD beside them")
    rejected = DEFAULT_GOOD_RATE if rate is None else inspect_command.rate_of(rate)

    def show(planned: Planned) -> None:
        if not json or planned.plan.refused:
            plan_command.show(planned, json)

    progress = _progress()
    with (
        interruptible(_resume_hint(folder)),
        progress.step("build"),
        _one_of_several(config.options.threads),
    ):
        from partitioner.build.bundle import build_bundle
        from partitioner.export.inspect_bundle import InspectRequest

        wanted = None
        if inspect is not None:
            wanted = InspectRequest(
                good=inspect, option="--inspect", defects=defects, rate=rejected, all_good=all_good
            )
        built = build_bundle(
            config, out, progress, run=run, name=name, crew=crew, inspect=wanted, on_plan=show
        )
    if built is None:
        return
    bundle, measured = Bundle.open(out), built.measured
    if json:
        value = {"bundle": str(out), "digest": bundle.digest, "run": str(folder)}
        before = crew_command.costs(crew) if measured is None else measured.to_json()
        heads = {} if inspect is None else inspect_command.facts_of(bundle)
        console.print_json({**value, **before, **built.report.as_json(bundle), **heads})
        return
    from partitioner.cli import pilot_tables

    if measured is not None:
        pilot_tables.print_pilot(measured.pilot)
    _tables().print_report(built.report, bundle.manifest.plan, bundle.manifest.labels)
    if measured is not None:
        print(pilot_tables.accuracy_line(measured))
    if inspect is not None:
        _tables().print_inspection(bundle)
    _tables().print_written(bundle, folder)


quantize_command.add_to(app)
inspect_command.add_to(app)
assemble_command.add_to(app)
weights_command.add_to(app)


@app.command()
def data(
    *,
    data: Annotated[str, typer.Option(help="`digits` or a folder, as for train.")],
    limit_train: Annotated[
        int | None, typer.Option(help="Use only so many pictures for training.", min=1)
    ] = None,
    limit_test: LimitTestOption = None,
    labels: Annotated[
        Literal["one", "several"],
        typer.Option(help="several: a folder a+b has items of both labels, none those without."),
    ] = "one",
    split: Annotated[str, typer.Option(help=f"Split to write: {', '.join(SPLITS)}.")] = "test",
    out: Annotated[
        Path | None, typer.Option(help="Write the split there, one folder per class.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count the pictures of every class and split, and write a split as a folder per class.

    Example: mdp-partition data --data digits --split test --out digits-test/
    """
    with interruptible("nothing was written"):
        from partitioner.data.crops import write_tree

        pictures = open_dataset(
            data, limit_train=limit_train, limit_test=limit_test, several=labels == "several"
        )
        if split not in SPLITS:
            raise InputError(f"--split: expected one of {', '.join(SPLITS)}, got {split!r}")
        if out is not None:
            chosen = pictures.split(split)
            write_tree(chosen, pictures.set_names, out, Progress())
    if json:
        console.print_json(_tables().data_as_json(pictures))
    else:
        _tables().print_data(pictures)


add_simulate(app)
app.add_typer(crew_command.app, name="crew")


def main() -> NoReturn:
    """Entry point of `mdp-partition`."""
    console.run(_with_extra, "mdp-partition")


def _with_extra() -> None:
    """Run a command; raises InputError naming the extra where a package of it is missing."""
    try:
        app()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PARTITION:
            raise
        raise InputError(
            f"{module} is not installed; this command needs it: {install('partition')}"
        ) from error


def _resume_hint(run: Path) -> str:
    return f"what is finished is kept in {run}, and the same command goes on from there"


@contextmanager
def _one_of_several(threads: int) -> Iterator[None]:
    """Load torch and join torchrun's other processes, if any; one reports errors for all."""
    prepare(threads)
    try:
        with join_group():
            yield
    except StoppedElsewhere as error:
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt:
        if is_first():
            raise
        raise SystemExit(console.INTERRUPTED) from None


def _progress() -> Progress:
    """Progress on stderr, by the first process."""
    return Progress() if is_first() else Progress(io.StringIO())


def _tables() -> Any:
    """rich is loaded only when something is printed."""
    from partitioner.cli import tables

    return tables
