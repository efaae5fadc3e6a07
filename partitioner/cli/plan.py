"""`mdp-partition plan`: which device runs which sub-model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from mdp import console
from mdp.errors import InputError
from mdp.files import write_bytes, write_toml
from mdp.formats.plan import Plan
from partitioner import api
from partitioner.cli.common import JsonOption, interruptible, picture_kind, prepare
from partitioner.cli.options import add_config_options
from partitioner.config import BuildConfig, Given, check_one_label
from partitioner.run.progress import Progress

if TYPE_CHECKING:
    from partitioner.planner.make_plan import Planned

#: Options that take several values.
LISTS = ("--profiles", "--teacher-arg", "--camera", "--precision", "--runs", "--families")


def add_to(app: typer.Typer) -> None:
    """Give the command line its `plan` command."""
    app.command(cls=console.list_options(*LISTS))(plan)


@add_config_options(
    *("plan.teacher", "plan.teacher_args", "plan.profiles", "plan.latency_ms"),
    *("plan.min_accuracy", "plan.precision", "plan.runs", "plan.families"),
    *("plan.anyway", "plan.cameras", "run.weights", "run.data", "run.labels", "schedule.epochs"),
)
def plan(
    *,
    given: Given,
    out: Annotated[Path, typer.Option(help="Plan file to write.")] = Path("plan.toml"),
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each device has what it has.")
    ] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="List the best plans of every latency.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of both to write, FILE.svg or FILE.png.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Decide which device runs which sub-model, and predict latency and accuracy.

    A plan that would not beat the best single device is refused with exit code 4, unless --anyway
    keeps it. One profile alone gets a plan of one sub-model. Accuracy is predicted for 1,000
    classes and a converged training, unless --data and --epochs are given.

    Example: mdp-partition plan --teacher vit_base_patch16_224 --profiles n100 raspberry-pi-5
    --latency-ms 100 --explain --out plan.toml

    Without --teacher it is planned by measurement, as by build: every network of --weights is
    measured on --data.

    Example: mdp-partition plan --weights weights/ --data photos/ --profiles n100 raspberry-pi-5
    --latency-ms 40 --out plan.toml
    """
    if given.value("plan.teacher") is None:
        for option, wanted in (("--explain", explain), ("--pareto", pareto), ("--plot", plot)):
            if wanted:
                raise InputError(f"{option}: expected --teacher beside it")
        _plan_by_measurement(given.build(), out, json=json)
        return
    check_one_label(given.value("run.labels"))
    settings, kind, data = given.planning(), picture_kind(plot), given.value("run.data")
    limited = data is not None or "schedule.epochs" in given.options
    with interruptible("nothing was written"):
        planned = api.plan(
            settings,
            data=data,
            epochs=given.value("schedule.epochs") if limited else None,
            weights=given.value("run.weights"),
            explained=explain,
            front=pareto or plot is not None,
            even_refused=True,
        )
    show(planned, json, front=pareto)
    if plot is not None:
        from partitioner.cli.plan_plot import draw_plan

        write_bytes(plot, draw_plan(planned.plan, planned.pareto, kind))
    planned.check()
    _write(planned.plan, out)


def _plan_by_measurement(config: BuildConfig, out: Path, *, json: bool) -> None:
    """Measure and choose, print the outcome, and write the plan; raises InputError."""
    with interruptible("nothing was written"), TemporaryDirectory(prefix="mdp-views-") as cache:
        prepare(config.options.threads)
        from partitioner.build.inputs import BuildInputs
        from partitioner.build.measured.planning import choose, plan_of

        inputs = BuildInputs.read(config)
        pilot = choose(inputs, Path(cache), Progress())
        planned, tested = plan_of(pilot, inputs), len(inputs.data.test)
    if json:
        console.print_json({**msgspec.to_builtins(planned), "pilot": pilot.to_json(tested)})
    else:
        from partitioner.cli import pilot_tables

        pilot_tables.print_pilot(pilot)
        print(f"all together: {pilot.predict_words(tested)} test pictures")
    _write(planned, out)


def _write(planned: Plan, out: Path) -> None:
    if out.exists():
        Progress().note(f"{out}: replaced")
    write_toml(out, planned)


def show(planned: "Planned", json: bool, *, front: bool = True) -> None:
    """Print the plan as JSON or tables; the Pareto front only with `front`."""
    from dataclasses import replace

    shown = planned if front else replace(planned, pareto=[])
    if json:
        console.print_json(shown.as_json())
    else:
        from partitioner.cli.plan_tables import print_planned

        print_planned(shown)
