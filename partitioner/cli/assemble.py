"""`mdp-partition assemble`: existing networks, one per device, as a bundle without training."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from mdp import console
from mdp.errors import InputError
from mdp.files import replacing_folder
from mdp.formats.bundle import Bundle
from mdp.formats.profile import read_profiles
from partitioner.assembly.members import Models, read_map, read_models, read_names, rows_of
from partitioner.cli.common import JsonOption, NameOption, OutOption, interruptible, prepare
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.scenes import remark_on
from partitioner.run.folder import bundle_name
from partitioner.run.progress import Progress

if TYPE_CHECKING:
    # Brings torch.
    from partitioner.export.evaluate import Report


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command(cls=console.list_options("--profiles", "--rungs"))(assemble)


def assemble(
    *,
    data: Annotated[str, typer.Option(help="`digits` or a folder of pictures, one per class.")],
    out: OutOption,
    models: Annotated[
        Path | None, typer.Option(help="models.toml: which model runs on which device.")
    ] = None,
    profiles: Annotated[
        list[str] | None, typer.Option(help="With --models: profiles of the devices.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Or a bundle, whose members get --rungs.")
    ] = None,
    rungs: Annotated[
        list[str] | None,
        typer.Option(
            help="With --bundle: int8, int8-static or fp16 below each member in fp32; or "
            "DEVICE=K,K,..: the first, the first two, .. of these equal members for one device."
        ),
    ] = None,
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

    With --bundle its members get rungs, by which devices answer bursts: quicker and less accurate
    forms, made of models that the bundle has.

    Example: mdp-partition assemble --bundle bundle/ --data photos/ --rungs int8 --out ladder/
    """
    if bundle is not None:
        _require(bundle, models, profiles)
        _ladder(bundle, data, rungs or [], out, limit, limit_test, json=json)
        return
    if models is None or profiles is None:
        raise InputError("expected --models and --profiles, or --bundle and --rungs")
    if rungs:
        raise InputError("--rungs: expected --bundle beside it")
    known = {profile.name: profile for profile in read_profiles(profiles)}
    named = bundle_name(name, out)
    progress = Progress()
    with interruptible(f"{out} is as it was"), progress.step("assemble"), ExitStack() as stack:
        listed = _read_known_models(models, known)
        pictures = open_dataset(data, limit_test=limit_test, cameras=listed.cameras)
        rows = _rows(listed, models.parent, pictures)
        prepare(1)
        from partitioner.assembly.write import Assembly
        from partitioner.export.evaluate import evaluate, write_report
        from partitioner.run.target import check_target

        check_target(out)
        if remark := remark_on(pictures):
            progress.note(remark)
        cache = Path(stack.enter_context(TemporaryDirectory(prefix="mdp-views-")))
        assembly = Assembly(models.parent, pictures, limit, cache, progress)
        # A bundle that was there stays until this one is measured.
        with replacing_folder(out) as folder:
            assembly.write(listed.models, rows, known, folder, named)
            made = Bundle.open(folder)
            report = evaluate(made, pictures, None, cache, progress)
            write_report(made, report)
    written = Bundle.open(out)
    _say(report, written, f"{out}: {len(listed.models)} sub-models, ", json=json)
    if not json:
        print("latencies in its plan are estimates")


def _require(bundle: Path, models: Path | None, profiles: Sequence[str] | None) -> None:
    """Raise InputError for options that do not go with --bundle."""
    for option, given in (("--models", models), ("--profiles", profiles)):
        if given:
            raise InputError(f"--bundle {bundle}: expected no {option} beside it")


def _ladder(
    bundle: Path,
    data: str,
    rungs: Sequence[str],
    out: Path,
    limit: int,
    limit_test: int | None,
    *,
    json: bool,
) -> None:
    """Write a bundle with rungs."""
    opened = Bundle.open(bundle)
    opened.require_one_label("assemble --rungs")
    progress = Progress()
    with (
        interruptible(f"{out} is as it was"),
        progress.step("assemble"),
        TemporaryDirectory(prefix="mdp-views-") as cache,
    ):
        cameras = opened.manifest.plan.cameras
        pictures = open_dataset(data, limit_test=limit_test, cameras=cameras)
        prepare(1)
        from partitioner.assembly.ladder import add_rungs, parse_rungs
        from partitioner.run.target import check_target

        check_target(out)
        wanted = parse_rungs(rungs, opened)
        report = add_rungs(opened, pictures, wanted, out, limit, Path(cache), progress)
    written = Bundle.open(out)
    _say(report, written, f"{out}: ", json=json)


def _say(report: "Report", written: Bundle, what: str, *, json: bool) -> None:
    """Print what a bundle that was written is worth, and `what` it is with its digest."""
    if json:
        value = {"bundle": str(written.path), "digest": written.digest}
        console.print_json({**value, **report.as_json(written)})
        return
    from partitioner.cli import tables

    tables.print_report(report, written.manifest.plan)
    print(f"{what}digest {written.digest}")


def _read_known_models(path: Path, known: Collection[str]) -> Models:
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
