"""`mdp-partition export`: a finished run's sub-models, or untrained ones, as a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import read_plan
from partitioner import api
from partitioner.cli.common import JsonOption, NameOption, OutOption, interruptible, prepare, say
from partitioner.data.datasets import open_dataset
from partitioner.run.folder import bundle_name
from partitioner.run.progress import Progress


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command()(export)


def export(
    *,
    out: OutOption,
    run: Annotated[Path | None, typer.Option(help="Folder of a finished run.")] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Random weights instead of a run's, for latency.")
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(help="With --untrained: the plan.toml of mdp-partition plan.")
    ] = None,
    labels: Annotated[
        int | None, typer.Option(help="With --untrained: the number of classes.", min=2)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --untrained: take the classes of these pictures.")
    ] = None,
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Write the sub-models of a finished run as ONNX files, checked against torch, in a bundle.

    With --untrained those of a plan, with random weights in the planned precision and runtime:
    as fast as trained ones, and their answers mean nothing.

    Examples: mdp-partition export --run photos.run --out bundle/
    mdp-partition export --untrained --plan plan.toml --labels 100 --out fast/

    Example: mdp-partition export --run photos.run --out bundle/
    """
    named = bundle_name(name, out)
    of_plan = (("--plan", plan), ("--labels", labels), ("--data", data))
    unused = next((option for option, value in of_plan if value is not None), None)
    if not untrained and run is None:
        raise InputError("expected --run, or --untrained with --plan; got neither")
    if not untrained and unused:
        raise InputError(f"{unused}: expected only with --untrained; a run has its own")
    if untrained and run is not None:
        raise InputError("--untrained: expected --plan instead of --run")
    if untrained and plan is None:
        raise InputError("--untrained: expected --plan with the plan to export")
    if untrained and (labels is None) == (data is None):
        raise InputError("--untrained: expected either --labels or --data, to know the classes")
    with interruptible(f"{out} is as it was"):
        if run is not None:
            errors = api.export(run, out, name=named, progress=Progress())
        else:
            assert plan is not None
            chosen = read_plan(plan)
            classes = open_dataset(data).labels if data else [str(n) for n in range(labels or 0)]
            prepare(0)
            from partitioner.export.write import export_untrained
            from partitioner.run.target import check_target

            check_target(out)
            errors = export_untrained(chosen, list(classes), out, named, Progress())
    value = {
        "bundle": str(out),
        "digest": Bundle.open(out).digest,
        "trained": not untrained,
        "max_abs_error": [{"k": k, "error": error} for k, error in errors.items()],
    }
    worst = max(errors.values())
    what = "exported untrained" if untrained else "exported"
    say(json, value, f"{what}: {out} (at most {worst:.1e} from torch)")
