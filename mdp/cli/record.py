"""`mdp record`: pictures of the devices' own cameras, to train on."""

import sys
import termios
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.arguments import seconds
from mdp.cli.answers import FleetFile, Json, KeyFile, printable_path, utc_now
from mdp.client.base import Options
from mdp.client.cameras import WITHIN_MS, FleetCameras
from mdp.client.scenes import LEAST_CAMERAS, Scene, SceneFolder, Suspicions, Tally
from mdp.errors import InferenceError, InputError
from mdp.formats.fleet import read_devices
from mdp.logs import quiet_libraries
from mdp.protocol.recording import PICTURES_PER_S

record_app = console.new_app("")


@record_app.command("record", cls=console.list_options("--label"))
def record(
    fleet: FleetFile,
    label: Annotated[
        list[str],
        typer.Option(
            help="The class of what the cameras see, one or more: before each further one it waits "
            "for Enter."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the scenes; more are added to it.")],
    every: Annotated[str, typer.Option(help="From one scene to the next: 1s, 500ms.")] = "1s",
    count: Annotated[
        int | None,
        typer.Option(min=1, help="So many moments of each class, instead of until Ctrl-C."),
    ] = None,
    key: KeyFile = None,
    json: Json = False,
) -> None:
    """Record what the devices' own cameras see, as pictures of scenes to train on.

    Each moment becomes OUT/LABEL/TIME with DEVICE.jpg of every camera. Only agents that run with
    `--allow-record` give pictures, and only to keys with `record = true`.

    Example: mdp record --fleet fleet.toml --label part-a part-b --count 100 --out scenes/

    Exit codes: 0 fine, 2 bad input or a full disk, 3 no scene of a class was recorded,
    130 interrupted, 1 unforeseen.
    """
    quiet_libraries()
    if (every_s := seconds("--every", every)) < 1 / PICTURES_PER_S:
        raise InputError(f"--every: expected at least {1 / PICTURES_PER_S:g}s, got {every!r}")
    folders = [SceneFolder(out, one) for one in dict.fromkeys(label)]
    if count is None and len(folders) > 1:
        raise InputError(f"--label {' '.join(label)}: expected --count, as there are several")
    known = read_devices(fleet)
    suspicions, empty = Suspicions(), False
    cameras = FleetCameras(known, Options(fleet=fleet, key=key))
    with cameras, console.until_reader_leaves():
        for place, folder in enumerate(folders):
            due_s = time.monotonic()
            if place:
                # Pictures are as old as this at most: none shows the items before.
                due_s = await_enter(folder.path.name) + WITHIN_MS / 1e3
            tally = Tally()
            try:
                for path, scene in cameras.record(
                    folder, tally, _moment, every_s=every_s, count=count, due_s=due_s
                ):
                    for text in suspicions.of(scene.pictures):
                        print(f"mdp: {text}", file=sys.stderr, flush=True)
                    _show_scene(path, scene, json)
            except KeyboardInterrupt:
                print(f"mdp: {folder.path}: {tally}", file=sys.stderr)
                raise
            print(f"mdp: {folder.path}: {tally}", file=sys.stderr, flush=True)
            empty = empty or not tally.kept
    raise typer.Exit(InferenceError.exit_code if empty else 0)


def _moment() -> datetime:
    return datetime.fromisoformat(utc_now())


def await_enter(label: str) -> float:
    """Moment at which Enter says that the items of `label` lie there; raises InputError.

    What was typed before the question does not answer it.
    """
    if sys.stdin and sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    print(f"mdp: put {label} before the cameras, then press Enter", file=sys.stderr, flush=True)
    if not sys.stdin or not sys.stdin.readline():
        raise InputError(f"--label {label}: expected a line on standard input, which has ended")
    return time.monotonic()


def _show_scene(path: Path | None, scene: Scene, json: bool) -> None:
    if json:
        name = None if path is None else printable_path(path)
        console.print_json(
            {"path": name, "cameras": sorted(scene.pictures), "missing": scene.missing}
        )
        return
    kept = f"not kept, with fewer than {LEAST_CAMERAS} cameras"
    if path is not None:
        kept = printable_path(path)
    print(f"{kept}: {', '.join(sorted(scene.pictures)) or 'no picture'}", flush=True)
    for device, reason in scene.missing.items():
        print(f"  without {device}: {console.printable(reason)}", flush=True)
