"""`mdp`: classify pictures with a fleet, and manage the fleet."""

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mdp import console
from mdp.arguments import seconds
from mdp.cli import bundle as bundle_command
from mdp.cli import classify as classify_command
from mdp.cli import fleet as fleet_command
from mdp.cli import gateway as gateway_command
from mdp.cli import keys as keys_command
from mdp.cli import mqtt as mqtt_command
from mdp.cli import watch as watch_command
from mdp.cli.answers import (
    Cascade,
    DeadlineMs,
    FleetFile,
    FusionChoice,
    Insecure,
    Json,
    KeyFile,
    connected,
    describe,
    failure,
    measured_on,
    picture_files,
    utc_now,
)
from mdp.cli.bench import noise_picture, run_bench
from mdp.cli.doctor import examine
from mdp.client.base import DEFAULT_DEADLINE_MS, Options
from mdp.client.cameras import FleetCameras
from mdp.client.scenes import LEAST_CAMERAS, Scene, SceneFolder, Suspicions, Tally
from mdp.client.status import DeviceStatus
from mdp.errors import InferenceError, InputError
from mdp.formats.fleet import absent_devices, read_devices
from mdp.pictures.crop import Picture
from mdp.protocol.recording import PICTURES_PER_S
from mdp.requests.capture import DEFAULT_EVERY_MS, DEFAULT_WITHIN_MS, Moment, checked_every_ms
from mdp.requests.deadline import checked_deadline_ms

NOT_ANSWERED = InferenceError.exit_code

app = console.new_app(
    "Classify a scene that several devices' cameras see, or pictures, on all devices at once.",
    "mdp",
)
keys_command.add_to(app)
bundle_command.add_to(app)
fleet_command.add_to(app)

app.command()(classify_command.classify)


@app.command()
def look(
    fleet: FleetFile,
    deadline_ms: DeadlineMs = DEFAULT_DEADLINE_MS,
    ago_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Age of the frames; 0 for the newest.")
    ] = 0.0,
    within_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Largest difference of a frame from that age.")
    ] = DEFAULT_WITHIN_MS,
    count: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Number of calls.")] = 1,
    every_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="With --count: from one call to the next.")
    ] = DEFAULT_EVERY_MS,
    fusion: FusionChoice = "stacked",
    cascade: Cascade = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Classify what the devices' own cameras see (`mdp-agent run --source`); no picture is sent.

    Example: mdp look --fleet fleet.toml --deadline-ms 80

    Exit codes: 0 fine, 2 bad input, 3 the fleet could not answer, 1 unforeseen.
    """
    checked_deadline_ms(deadline_ms)
    checked_every_ms(every_ms)
    exit_code = 0
    with connected(fleet, key, insecure, fusion, cascade) as client, console.until_reader_leaves():
        for number in range(count):
            started_s = time.monotonic()
            at: Moment = started_s - ago_ms / 1e3 if ago_ms else "latest"
            try:
                prediction = client.look(deadline_ms=deadline_ms, at=at, within_ms=within_ms)
            except InferenceError as error:
                print(f"mdp: {console.one_line(error)}", file=sys.stderr)
                if json:
                    console.print_json({"path": None, **failure(error)})
                exit_code = exit_code or error.exit_code
            else:
                if json:
                    console.print_json({"path": None, **prediction.to_dict()})
                else:
                    print(describe("look", prediction, measured_on(client.bundle)), flush=True)
            if number + 1 < count:
                time.sleep(max(0.0, started_s + every_ms / 1e3 - time.monotonic()))
    raise typer.Exit(exit_code)


app.command()(watch_command.watch)


@app.command()
def record(
    fleet: FleetFile,
    label: Annotated[str, typer.Option(help="The class of what the cameras see.")],
    out: Annotated[Path, typer.Option(help="Folder for the scenes; more are added to it.")],
    every: Annotated[str, typer.Option(help="From one scene to the next: 1s, 500ms.")] = "1s",
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many moments, instead of at Ctrl-C.")
    ] = None,
    key: KeyFile = None,
    json: Json = False,
) -> None:
    """Record what the devices' own cameras see, as pictures of scenes to train on.

    Each moment becomes OUT/LABEL/TIME with DEVICE.jpg of every camera. Only agents that run with
    `--allow-record` give pictures, and only to keys with `record = true`.

    Example: mdp record --fleet fleet.toml --label part-a --out scenes/

    Exit codes: 0 fine, 2 bad input or a full disk, 3 no scene was recorded, 130 interrupted,
    1 unforeseen.
    """
    if (every_s := seconds("every", every)) < 1 / PICTURES_PER_S:
        raise InputError(f"every: expected at least {1 / PICTURES_PER_S:g}s, got {every!r}")
    folder = SceneFolder(out, label)
    known = read_devices(fleet)
    suspicions, tally = Suspicions(), Tally()
    cameras = FleetCameras(known, Options(fleet=fleet, key=key))
    with cameras, console.until_reader_leaves():
        due_s = time.monotonic()
        try:
            while count is None or tally.moments < count:
                cameras.wait(due_s)
                # Missed moments are not caught up.
                due_s = max(due_s + every_s, time.monotonic())
                at, scene = datetime.fromisoformat(utc_now()), cameras.take()
                path = None
                if len(scene.pictures) >= LEAST_CAMERAS:
                    path = folder.write(at, scene.pictures)
                tally.add(scene)
                for text in suspicions.of(scene.pictures):
                    print(f"mdp: {text}", file=sys.stderr, flush=True)
                _show_scene(path, scene, json)
        except KeyboardInterrupt:
            print(f"mdp: {folder.path}: {tally}", file=sys.stderr)
            raise
    print(f"mdp: {folder.path}: {tally}", file=sys.stderr)
    raise typer.Exit(0 if tally.kept else InferenceError.exit_code)


def _show_scene(path: Path | None, scene: Scene, json: bool) -> None:
    if json:
        name = None if path is None else str(path)
        console.print_json(
            {"path": name, "cameras": sorted(scene.pictures), "missing": scene.missing}
        )
        return
    kept = path or f"not kept, with fewer than {LEAST_CAMERAS} cameras"
    print(f"{kept}: {', '.join(sorted(scene.pictures)) or 'no picture'}", flush=True)
    for device, reason in scene.missing.items():
        print(f"  without {device}: {console.printable(reason)}", flush=True)


@app.command()
def status(
    fleet: FleetFile,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Exit with 0 if any device can answer.")
    ] = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Show the status of every device of a fleet.

    Example: mdp status --fleet fleet.toml

    Exit codes: 0 every device of the bundle and the fleet can answer, 2 bad input, 3 one cannot
    (with --allow-partial: none can), 1 unforeseen.
    """
    with connected(fleet, key, insecure) as client:
        statuses = client.status()
        absent = absent_devices(client.bundle, client.fleet)
    if json:
        console.print_json({"devices": statuses, "absent": absent})
    else:
        # No markup: an address or an agent's text may contain square brackets.
        Console(markup=False).print(status_table(statuses))
        for status in statuses:
            if status.source:
                print(f"{status.device} looks at {status.source}")
        if absent:
            print(f"not in {fleet}: {', '.join(absent)}")
    usable = [status.usable for status in statuses]
    fine = any(usable) if allow_partial else all(usable) and not absent
    raise typer.Exit(0 if fine else NOT_ANSWERED)


def status_table(statuses: Sequence[DeviceStatus]) -> Table:
    """Devices with their states and errors."""
    table = Table()
    warm = any(status.temperature_c is not None for status in statuses)
    columns = ("device", "address", "state", "bundle", "provider", "answered", "reason")
    for column in columns + ("°C",) * warm:
        # Folded, as a truncated address is useless.
        table.add_column(column, overflow="fold")
    for status in statuses:
        table.add_row(
            status.device,
            status.address,
            status.state,
            status.bundle or "",
            status.provider or "",
            str(status.counts.get("answered", "")),
            status.reason,
            *(["" if status.temperature_c is None else f"{status.temperature_c:.0f}"] * warm),
        )
    return table


@app.command()
def doctor(
    fleet: FleetFile, key: KeyFile = None, insecure: Insecure = False, json: Json = False
) -> None:
    """Check files, connections, bundles and providers of a fleet.

    Example: mdp doctor --fleet fleet.toml

    Exit codes: 0 all well, 2 bad input, 3 something is wrong, 1 unforeseen.
    """
    with connected(fleet, key, insecure) as client:
        findings = list(examine(client))
    if json:
        console.print_json({"findings": findings})
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.ok else 'PROBLEM'} {finding.subject}: {finding.text}")
    raise typer.Exit(0 if all(finding.ok for finding in findings) else NOT_ANSWERED)


@app.command()
def bench(
    fleet: FleetFile,
    pictures: Annotated[list[Path] | None, typer.Argument(help="Noise if none is given.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Calls to measure.")] = 200,
    in_flight: Annotated[int, typer.Option(min=1, max=64, help="Pictures at a time.")] = 1,
    deadline_ms: DeadlineMs = DEFAULT_DEADLINE_MS,
    fusion: FusionChoice = "stacked",
    cascade: Cascade = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Measure latency, overhead and throughput of a running fleet.

    Example: mdp bench --fleet fleet.toml --requests 500 --in-flight 2

    Exit codes: 0 fine, 2 bad input, 3 the fleet could not answer, 1 unforeseen.
    """
    checked_deadline_ms(deadline_ms)
    files = []
    for path, unusable in picture_files(pictures or []):
        if unusable is not None:
            raise unusable
        files.append(path)
    with connected(fleet, key, insecure, fusion, cascade) as client:
        side = client.bundle.manifest.plan.finest_px
        chosen: list[Picture] = list(files) or [noise_picture(side)]
        outcome = run_bench(
            client, chosen, requests=requests, deadline_ms=deadline_ms, in_flight=in_flight
        )
    if json:
        console.print_json(outcome)
    else:
        for line in _flat(outcome):
            print(line)
    raise typer.Exit(0 if outcome["answered"] else NOT_ANSWERED)


def _flat(outcome: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in outcome.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            shown = f"{value:.2f}" if isinstance(value, float) else f"{value}"
            yield f"{prefix + key:<16} {shown}"


app.command()(gateway_command.gateway)
app.command()(mqtt_command.mqtt)


def main() -> None:
    """Entry point of `mdp`."""
    console.run(app, "mdp")
