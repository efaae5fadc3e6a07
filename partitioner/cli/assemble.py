"""`mdp-partition assemble`: existing networks, one per device, as a bundle without training."""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from mdp import console
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.profile import read_profiles
from partitioner.assembly.members import Models, read_map, read_models, read_names, rows_of
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
    """Serve existing models as one bundle, without training.

    Only their fusion is fitted, on the calibration split, and every subset is measured on the test
    split. Networks that do not know the classes yet are taught by `mdp-partition build`.

    Example: mdp-partition assemble --models models.toml --data photos/ --profiles n100
    raspberry-pi-5 --out bundle/
    """
    known = {profile.name: profile for profile in read_profiles(profiles)}
    named = bundle_name(name, out)
    with interruptible(f"{out} is as it was"), ExitStack() as stack:
        listed = _listed(models, known)
        pictures = open_dataset(data, limit_test=limit_test, cameras=listed.cameras)
        rows = _rows(listed, models.parent, pictures)
        prepare(1)
        from partitioner.assembly.write import Assembly
        from partitioner.build.steps import check_target
        from partitioner.export.evaluate import evaluate, write_report

        check_target(out)
        progress = Progress()
        if remark := remark_on(pictures):
            progress.note(remark)
        cache = Path(stack.enter_context(TemporaryDirectory(prefix="mdp-views-")))
        assembly = Assembly(models.parent, pictures, limit, cache, progress)
        assembly.write(listed.models, rows, known, out, named)
        bundle = Bundle.open(out)
        report = evaluate(bundle, pictures, None, cache, progress)
        written = write_report(bundle, report)
    if json:
        value = {"bundle": str(out), "digest": written.digest}
        console.print_json({**value, **report.as_json(written)})
        return
    from partitioner.cli import tables

    tables.print_report(report, written.manifest.plan)
    print(f"{out}: {len(listed.models)} sub-models, digest {written.digest}")
    print(
        "latencies in its plan are estimates: measured here on one thread, scaled by the profiles"
    )


def _listed(path: Path, known: Collection[str]) -> Models:
    """The content of models.toml; raises ConfigError, and InputError without a profile."""
    listed = read_models(path)
    for model in listed.models:
        if model.device not in known:
            raise InputError(
                f"{path}: device {model.device!r} has no profile in --profiles (these: "
                f"{', '.join(known)})"
            )
    return listed


def _rows(listed: Models, folder: Path, pictures: Dataset) -> list[tuple[int, list[int]]]:
    """Of each model the number of its classes, and the rows of the data's classes."""
    found = []
    for model in listed.models:
        path = folder / model.labels
        names = read_names(path)
        mapped = read_map(folder / model.map) if model.map else {}
        found.append((len(names), rows_of(names, pictures.labels, mapped, str(path))))
    return found
