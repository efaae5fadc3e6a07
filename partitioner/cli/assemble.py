"""`mdp-partition assemble`: existing models, one per device, as a bundle without training."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from mdp import console
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.profile import read_profiles
from partitioner.assembly.members import Model, read_map, read_models, read_names, rows_of
from partitioner.cli.common import JsonOption, NameOption, OutOption, interruptible, prepare
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.scenes import remark_on
from partitioner.run.folder import bundle_name
from partitioner.run.progress import Progress


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command(cls=console.list_options("--profiles"))(assemble)


def assemble(
    *,
    models: Annotated[Path, typer.Option(help="models.toml: which model runs on which device.")],
    data: Annotated[str, typer.Option(help="`digits` or a folder of pictures, one per class.")],
    profiles: Annotated[list[str], typer.Option(help="Profiles of the devices.")],
    out: OutOption,
    limit: Annotated[
        int, typer.Option(help="Fit fusion on at most so many calibration pictures.", min=32)
    ] = 5000,
    limit_test: Annotated[
        int | None, typer.Option(help="Use only so many test pictures.", min=1)
    ] = None,
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Serve existing models as one bundle; only their fusion is fitted.

    Fusion is fitted on the calibration split and every subset is measured on the test split.
    Latencies are measured here on one thread and scaled to each device by its profile: estimates.

    Example: mdp-partition assemble --models models.toml --data photos/ --profiles n100
    raspberry-pi-5 --out bundle/
    """
    listed = read_models(models)
    asked = listed.models
    known = {profile.name: profile for profile in read_profiles(profiles)}
    for model in asked:
        if model.device not in known:
            there = ", ".join(known)
            raise InputError(
                f"{models}: device {model.device!r} has no profile in --profiles (these: {there})"
            )
    named = bundle_name(name, out)
    with interruptible(f"{out} is as it was"):
        pictures = open_dataset(data, limit_test=limit_test, cameras=listed.cameras)
        rows = _rows(asked, models.parent, pictures)
        prepare(1)
        from partitioner.assembly.write import Assembly
        from partitioner.export.evaluate import evaluate, write_report
        from partitioner.pipeline import check_target

        check_target(out)
        progress = Progress()
        if remark := remark_on(pictures):
            progress.note(remark)
        with TemporaryDirectory(prefix="mdp-views-") as cache:
            assembly = Assembly(models.parent, pictures, limit, Path(cache), progress)
            assembly.write(asked, rows, known, out, named)
            bundle = Bundle.open(out)
            report = evaluate(bundle, pictures, None, Path(cache), progress)
            written = write_report(bundle, report)
    if json:
        value: Mapping[str, Any] = {"bundle": str(out), "digest": written.digest}
        console.print_json({**value, **report.as_json(written)})
        return
    from partitioner.cli import tables

    tables.print_report(report, written.manifest.plan)
    print(f"{out}: {len(asked)} sub-models, digest {written.digest}")
    print(
        "latencies in its plan are estimates: measured here on one thread, scaled by the profiles"
    )


def _rows(models: list[Model], folder: Path, pictures: Dataset) -> list[tuple[int, list[int]]]:
    """Of each model the number of its classes, and the rows of the data's classes."""
    found = []
    for model in models:
        path = folder / model.labels
        names = read_names(path)
        mapped = read_map(folder / model.map) if model.map else {}
        found.append((len(names), rows_of(names, pictures.labels, mapped, str(path))))
    return found
