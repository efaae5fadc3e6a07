"""`mdp-partition assemble`: existing networks, one per device, as a bundle without training."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdp import console
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.profile import DeviceProfile, read_profiles
from partitioner.assembly.members import Model, Models, read_map, read_models, read_names, rows_of
from partitioner.cli.common import JsonOption, NameOption, OutOption, interruptible, prepare
from partitioner.config import parse_cameras
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.scenes import remark_on
from partitioner.run.folder import bundle_name
from partitioner.run.progress import Progress
from partitioner.run.weights import weights_in

if TYPE_CHECKING:
    from partitioner.assembly.write import Assembly
    from partitioner.pilot.measure import Pilot


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command(cls=console.list_options("--profiles", "--camera"))(assemble)


def assemble(
    *,
    models: Annotated[
        Path | None, typer.Option(help="models.toml: which model runs on which device.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Instead: a folder of timm's weights, NAME.safetensors; what serves each device "
            "is chosen by measurement on --data."
        ),
    ] = None,
    latency_ms: Annotated[
        float | None,
        typer.Option(help="With --weights: milliseconds that an answer may take.", min=0.1),
    ] = None,
    camera: Annotated[
        list[str] | None,
        typer.Option(help="With --weights, where --data has scenes: DEVICE=NAME, one or more."),
    ] = None,
    data: Annotated[str, typer.Option(help="`digits` or a folder of pictures, one per class.")],
    profiles: Annotated[list[str], typer.Option(help="Profiles of the devices.")],
    out: OutOption,
    limit: Annotated[
        int,
        typer.Option(
            help="Fit fusion on at most so many calibration pictures, and classifiers on at most "
            "so many training pictures.",
            min=32,
        ),
    ] = 5000,
    limit_test: Annotated[
        int | None, typer.Option(help="Use only so many test pictures.", min=1)
    ] = None,
    name: NameOption = None,
    json: JsonOption = False,
) -> None:
    """Serve existing networks as one bundle, without training.

    With --models they are listed, and only their fusion is fitted, on the calibration split. With
    --weights every network of the folder, and every depth of a vision transformer, is measured on
    the training pictures with a linear classifier of their classes; those that are best together
    within --latency-ms are taken. Every subset is measured on the test split.

    Example: mdp-partition assemble --weights weights/ --data photos/ --profiles n100
    raspberry-pi-5 --latency-ms 40 --out bundle/
    """
    known = {profile.name: profile for profile in read_profiles(profiles)}
    cameras = parse_cameras(camera or [])
    _check_options(models, weights, latency_ms, cameras, known)
    named = bundle_name(name, out)
    with interruptible(f"{out} is as it was"), ExitStack() as stack:
        listed = None if models is None else _listed(models, known)
        wanted = list(cameras.values()) if listed is None else listed.cameras
        pictures = open_dataset(data, limit_test=limit_test, cameras=wanted)
        rows = [] if listed is None or models is None else _rows(listed, models.parent, pictures)
        prepare(1 if weights is None else 0)
        from partitioner.assembly.write import Assembly
        from partitioner.export.evaluate import evaluate, write_report
        from partitioner.pipeline import check_target

        check_target(out)
        progress = Progress()
        if remark := remark_on(pictures):
            progress.note(remark)
        cache = Path(stack.enter_context(TemporaryDirectory(prefix="mdp-views-")))
        if listed is not None and models is not None:
            assembly, pilot = Assembly(models.parent, pictures, limit, cache, progress), None
            asked = listed.models
        else:
            assert weights is not None
            assert latency_ms is not None
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="mdp-members-")))
            assembly = Assembly(folder, pictures, limit, cache, progress, latency_ms)
            pilot, asked = _chosen(assembly, weights, list(known.values()), cameras)
            rows = [(len(pictures.labels), list(range(len(pictures.labels))))] * len(asked)
            # What follows is timed on one thread.
            prepare(1)
        assembly.write(asked, rows, known, out, named)
        bundle = Bundle.open(out)
        report = evaluate(bundle, pictures, None, cache, progress)
        written = write_report(bundle, report)
    if json:
        value: dict[str, Any] = {"bundle": str(out), "digest": written.digest}
        if pilot is not None:
            value["pilot"] = pilot.to_json()
        console.print_json({**value, **report.as_json(written)})
        return
    from partitioner.cli import pilot_tables, tables

    if pilot is not None:
        pilot_tables.print_pilot(pilot)
    tables.print_report(report, written.manifest.plan)
    if pilot is not None:
        print(pilot_tables.predicted_and_measured(pilot, report))
    print(f"{out}: {len(asked)} sub-models, digest {written.digest}")
    if pilot is None:
        print(
            "latencies in its plan are estimates: measured here on one thread, scaled by the "
            "profiles"
        )


def _check_options(
    models: Path | None,
    weights: Path | None,
    latency_ms: float | None,
    cameras: Mapping[str, str],
    known: Collection[str],
) -> None:
    """Raise InputError for options that do not go together."""
    if (models is None) == (weights is None):
        found = "neither" if models is None else "both"
        raise InputError(f"expected either --models or --weights, got {found}")
    if models is not None and (latency_ms is not None or cameras):
        raise InputError("--latency-ms and --camera: expected --weights beside them, got --models")
    if weights is not None and latency_ms is None:
        raise InputError("--weights: expected --latency-ms beside it, got none")
    check_cameras_of(cameras, known)


def check_cameras_of(cameras: Mapping[str, str], devices: Collection[str]) -> None:
    """Raise InputError unless no device has a camera, or every one of `devices` has."""
    for device in cameras:
        if device not in devices:
            raise InputError(
                f"--camera: {device!r} has no profile in --profiles (these: {', '.join(devices)})"
            )
    without = [device for device in devices if device not in cameras]
    if cameras and without:
        raise InputError(f"--camera: expected one for every device, got none: {without[0]}")


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


def _chosen(
    assembly: "Assembly",
    weights: Path,
    profiles: Sequence[DeviceProfile],
    cameras: Mapping[str, str],
) -> "tuple[Pilot, list[Model]]":
    """Measure, choose and write models into the folder of `assembly`; raises InputError."""
    from partitioner.assembly.chosen import origin_of, write_models
    from partitioner.assembly.class_rows import rows_by_network
    from partitioner.pilot.candidates import DeviceLatency
    from partitioner.pilot.measure import run_pilot

    data, files = assembly.data, weights_in(weights)
    assert assembly.target_ms is not None
    devices = [
        DeviceLatency.of(profile, len(data.labels), sees=bool(cameras)) for profile in profiles
    ]
    pilot = run_pilot(
        data,
        files,
        devices,
        cameras,
        assembly.target_ms,
        assembly.cache,
        assembly.progress,
        rows_by_network(files, data.labels, weights),
    )
    assembly.origin = origin_of(pilot, files)
    return pilot, write_models(pilot, assembly, files, devices, cameras)


def _rows(listed: Models, folder: Path, pictures: Dataset) -> list[tuple[int, list[int]]]:
    """Of each model the number of its classes, and the rows of the data's classes."""
    found = []
    for model in listed.models:
        path = folder / model.labels
        names = read_names(path)
        mapped = read_map(folder / model.map) if model.map else {}
        found.append((len(names), rows_of(names, pictures.labels, mapped, str(path))))
    return found
