"""`mdp-partition plan`, and the options that other commands share with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mdp import console
from mdp.errors import InputError, PlanRefused
from mdp.files import write_bytes, write_toml
from partitioner.cli.common import JsonOption, interruptible, prepare
from partitioner.cli.options import takes
from partitioner.cli.plan_plot import FORMATS
from partitioner.planner.make_plan import PlanOptions, precisions_of

if TYPE_CHECKING:
    from partitioner.planner.make_plan import Planned

TeacherOption = Annotated[
    str, typer.Option(help="timm's name of a plain ViT, for instance vit_base_patch16_224.")
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option("--teacher-arg", help="Constructor arguments key=value, one or more."),
]
ProfilesOption = Annotated[
    list[str],
    typer.Option(
        help="Device profiles: files, or names of shipped ones; 'NAME*3' is three boards of a kind."
    ),
]
PrecisionOption = Annotated[
    list[str] | None,
    typer.Option("--precision", help="Precisions to plan with, of those measured; default: fp32."),
]
RunsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs", help="Evaluated bundles of your own, which accuracy is predicted from too."
    ),
]
FamiliesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--families",
        help="What members may be of: ViT, cut from the teacher, families or names of timm's "
        "networks, or all; default: ViT, and networks with a file in --weights.",
    ),
]
#: Options of which one may give several values.
LISTS = ("--profiles", "--teacher-arg", "--precision", "--runs", "--families")


def add_to(app: typer.Typer) -> None:
    """Give the command line its `plan` command."""
    app.command(cls=console.list_options(*LISTS))(plan)


@takes(options=(PlanOptions, ""))
def plan(
    *,
    teacher: TeacherOption,
    profiles: ProfilesOption,
    options: PlanOptions,
    precision: PrecisionOption = None,
    runs: RunsOption = None,
    teacher_arg: ArgumentsOption = None,
    families: FamiliesOption = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of pretrained weights of networks, as for build."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Count the classes of these pictures; else 1,000.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Epochs per sub-model that accuracy is predicted for, of the pictures in --data; "
            "default: as long as it takes.",
        ),
    ] = None,
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
    keeps it. One profile alone gets a plan of one sub-model.

    Example: mdp-partition plan --teacher vit_base_patch16_224 --profiles n100 raspberry-pi-5
    --latency-ms 100 --explain --out plan.toml
    """
    options.check()
    if epochs is not None and data is None:
        raise InputError("--epochs: expected --data beside it, for how many pictures there are")
    kind = _picture_kind(plot)
    with interruptible("nothing was written"):
        planned = _planned(
            teacher, teacher_arg, profiles, options, data, epochs,
            precision=precision, runs=runs, families=families, weights=weights,
            explained=explain, front=pareto or plot is not None,
        )  # fmt: skip
    show(planned, json, front=pareto)
    if plot is not None:
        from partitioner.cli.plan_plot import draw_plan

        write_bytes(plot, draw_plan(planned.plan, planned.pareto, kind))
    refuse(planned)
    write_toml(out, planned.plan)


def _planned(
    teacher: str,
    arguments: list[str] | None,
    profiles: list[str],
    options: PlanOptions,
    data: str | None,
    epochs: int | None,
    *,
    precision: list[str] | None,
    runs: list[Path] | None,
    families: list[str] | None,
    weights: Path | None,
    explained: bool,
    front: bool,
) -> "Planned":
    """Load what planning needs, and plan."""
    prepare(0)
    from partitioner.data.datasets import open_dataset
    from partitioner.estimates.accuracy_law import Training
    from partitioner.networks.teacher import parse_arguments, teacher_spec
    from partitioner.planner.make_plan import make_planned

    pictures = open_dataset(data) if data else None
    training = None
    if pictures is not None and epochs is not None:
        training = Training(pictures=len(pictures.train), epochs=epochs)
    return make_planned(
        teacher_spec(teacher, parse_arguments(arguments or [])),
        profiles,
        options,
        len(pictures.labels) if pictures else 1000,
        precisions=precisions_of(precision, options.any_precision),
        runs=runs or [],
        training=training,
        families=families,
        weights=weights,
        explained=explained,
        front=front,
    )


def _picture_kind(plot: Path | None) -> str:
    """`svg` or `png` by the file's ending; raises InputError for another."""
    if plot is None:
        return ""
    kind = plot.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"--plot: expected FILE.svg or FILE.png, got {str(plot)!r}")
    return kind


def show(planned: "Planned", json: bool, *, front: bool = True) -> None:
    """JSON for machines or tables for people, on stdout; the front only where it was asked for."""
    from dataclasses import replace

    shown = planned if front else replace(planned, pareto=[])
    if json:
        console.print_json(shown.as_json())
    else:
        from partitioner.cli.plan_tables import print_planned

        print_planned(shown)


def refuse(planned: "Planned") -> None:
    """Raise PlanRefused, with what to do instead, if the search marked the plan so."""
    plan = planned.plan
    if not plan.refused:
        return
    text = f"plan refused: {plan.reason}"
    if planned.nearest_ms is not None:
        text += f"; the nearest target with a plan is {planned.nearest_ms:g} ms"
    text += "; --anyway makes this plan all the same"
    if plan.single_device is not None:
        device = plan.single_device.device
        text += f"; the profile of {device} alone gets a plan of one sub-model for it"
    raise PlanRefused(text)
