"""`mdp demo`: several devices on one machine, in the browser or in text."""

import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from mdp.client.sync import Client
from mdp.demo.ending import exit_by_sigterm
from mdp.demo.scenes import DemoFailed, Scenes
from mdp.demo.walk import (
    DEADLINE_MS,
    FRAMES_A_SECOND,
    READY_TIMEOUT_S,
    agent_options,
    start_agents,
    walk,
)
from mdp.errors import InputError
from mdp.extras import DEMO, install, missing
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.packaged import bundle_in_package, unpack_bundle
from mdp.logs import quiet_libraries
from mdp.testing.agents import AgentFleet
from mdp.testing.folder_cameras import FolderCameras

#: The bundle of four cameras.
PARTS = "parts"
#: In a folder whose files are of a demo.
_MARK = ".mdp-demo"


def demo(
    text: Annotated[
        bool,
        typer.Option(
            "--text", help="In text: every step as a command, each claim checked; then it ends."
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Port of the page on this machine.", min=1, max=65535)
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    bundle: Annotated[
        str, typer.Option(help="The bundle to serve: a folder, or the name of one of MDP's own.")
    ] = PARTS,
    pictures: Annotated[
        Path | None,
        typer.Option(
            help="Of a bundle of cameras: scenes, CLASS/SCENE/CAMERA.jpg; else those beside it. Of "
            "others: pictures, or a folder per class; else those beside it, or photographs."
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for the demo's files, which stay there.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="With --text: JSON file of the observations.")
    ] = None,
    deadline_ms: Annotated[
        float, typer.Option(help="Of every call; a machine that is busy needs more.", min=1)
    ] = DEADLINE_MS,
) -> None:
    """Show four cameras round an item: cover one, unplug a board, put something else there.

    Agents, cameras and client are processes of this machine; folders of pictures play the cameras.
    The page is for this machine alone, and Ctrl-C ends everything.

    Example: mdp demo --text

    Exit codes: 0 told to end, or every claim held, 2 bad input, 3 a claim or a step failed,
    130 interrupted, 143 told to end before the page, or in text, 1 unforeseen.
    """
    quiet_libraries()
    if module := missing(DEMO):
        raise InputError(f"{module} is not installed; the demo needs it: {install('demo')}")
    with _ended_by_sigterm(), _work(work) as folder:
        path, scenes_at = _bundle(bundle, folder), pictures
        if text:
            held = walk(
                folder, bundle=path, pictures=scenes_at, report=report, deadline_ms=deadline_ms
            )
            if not held:
                raise typer.Exit(DemoFailed.exit_code)
            return
        if not Bundle.open(path).manifest.plan.cameras:
            raise InputError(f"{bundle}: expected a bundle of cameras for the page, or --text")
        _show_live(
            folder, path, Scenes.of(Bundle.open(path), scenes_at), port, browser, deadline_ms
        )


def _show_live(
    folder: Path, bundle: Path, scenes: Scenes, port: int | None, browser: bool, deadline_ms: float
) -> None:
    # Loading starlette and uvicorn takes a third of a second.
    from mdp.demo.live import LiveDemo
    from mdp.demo.server import place_of_page, serve_live

    def say(line: str) -> None:
        print(line, flush=True)

    # A port that is taken is said before agents are started.
    with (
        place_of_page(port) as place,
        AgentFleet(folder, bundle, patience_s=READY_TIMEOUT_S) as fleet,
    ):
        cameras = FolderCameras(folder, scenes.cameras, fps=FRAMES_A_SECOND)
        cameras.put(scenes.contents(scenes.known[0][1]))
        say(f"starting {len(scenes.cameras)} agents with a camera each ...")
        start_agents(fleet, cameras, lambda agent: None)
        with Client.connect(fleet.write(), opinions=True) as client:
            live = LiveDemo(
                scenes,
                cameras,
                fleet,
                client,
                lambda device: agent_options(device, cameras),
                deadline_ms=deadline_ms,
                said=say,
            )

            def on_start(url: str) -> None:
                say(f"{url} shows them; Ctrl-C ends everything")
                # A machine without a browser, or one that is only a terminal's.
                if browser and sys.stdout.isatty():
                    with suppress(webbrowser.Error):
                        webbrowser.open(url)

            serve_live(live, frozenset(scenes.cameras), place, on_start)


def _bundle(named: str, work: Path) -> Path:
    """The bundle's folder; raises InputError."""
    # A folder of another kind may have the name of a bundle of MDP's.
    if (Path(named) / MANIFEST).exists():
        return Path(named)
    return unpack_bundle(bundle_in_package(named), work / "bundle")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block in order, so that neither agents nor the folder stay behind."""
    # Only the main thread is told of signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = exit_by_sigterm(128 + signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _work(wanted: Path | None) -> Iterator[Path]:
    """The folder `wanted`, or one that goes in the end; raises InputError."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="mdp-demo-") as made:
            yield Path(made)
        return
    mark = wanted / _MARK
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(wanted.iterdir()):
            # Files of these names would be replaced.
            raise InputError(f"--work {wanted}: expected an empty folder, or one with {_MARK}")
        mark.touch()
    except OSError as error:
        raise InputError(f"{wanted}: cannot be made: {error.strerror or error}") from error
    yield wanted
