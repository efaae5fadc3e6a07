"""`mdp-agent camera`: the camera of a device that computes nothing."""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from devices.agent.options import DEFAULT_BIND, AllowMask, MaskFile, ServeOptions
from devices.build import build_bundleless_agent
from devices.camera.capture import DEFAULT_FPS
from devices.events import Events, for_events_alone
from devices.health import LifeSigns, serve_health
from mdp.errors import InputError
from mdp.logs import BackgroundWriter, quiet_libraries


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("camera")(camera)


def camera(
    device: Annotated[str, typer.Option(help="This device's name.")],
    source: Annotated[
        str,
        typer.Option(
            envvar="MDP_SOURCE",
            help="folder:PATH, video:FILE, camera:NUMBER, rtsp://HOST/PATH or phone:PORT.",
        ),
    ],
    key: Annotated[
        Path, typer.Option(help="This agent's secret key file, made by `mdp keys new`.")
    ],
    clients: Annotated[
        Path,
        typer.Option(
            help="Public key file of the agent that computes, or a folder of such; `record = true` "
            "in NAME.limits lets it fetch pictures."
        ),
    ],
    bind: Annotated[
        str, typer.Option(help="Address to listen on; port 0 takes any free one.")
    ] = DEFAULT_BIND,
    source_fps: Annotated[
        float, typer.Option(min=0.01, max=240, help="Frames a second to take of --source.")
    ] = DEFAULT_FPS,
    mask: MaskFile = None,
    allow_mask: AllowMask = False,
    audit: Annotated[
        Path | None,
        typer.Option(help="Append connections, refusals, recordings, revoked keys: JSON lines."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event on stdout.")
    ] = False,
) -> None:
    """Give a camera's pictures to agents that compute for it, until SIGTERM or Ctrl-C.

    For a device too weak for a sub-model: another runs it with --source mdp://HOST:PORT. `mdp
    record` fetches its pictures as well.

    Example: mdp-agent camera --device doorbell --source camera:0 --bind tcp://0.0.0.0:7500
    --key keys/doorbell.secret --clients clients/

    Exit codes: 0 stopped by a signal, 2 bad input (source, address, key), 5 the address is taken
    or not there yet, 1 unforeseen.
    """
    quiet_libraries()
    if source.startswith("mdp:"):
        raise InputError(f"--source {source}: expected a camera of this device's own")
    events = Events(for_events_alone(sys.stdout) if json else sys.stderr, device, json=json)
    options = ServeOptions(
        device=device,
        bind=bind,
        key=key,
        clients=clients,
        source=source,
        source_fps=source_fps,
        allow_record=True,
        mask=mask,
        allow_mask=allow_mask,
        audit=audit,
    )
    with (
        BackgroundWriter(events.emit, "events") as writer,
        build_bundleless_agent(options, report=writer.put) as built,
        ExitStack() as stack,
    ):
        signs = LifeSigns(device)
        serve_health(built.address, lambda: signs.line(built.agent.state), writer.put, stack)
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop_signal, lambda *_: built.agent.stop())
        # Its clients' files are read again without it.
        signal.signal(signal.SIGHUP, lambda *_: None)
        events.listen(built.address)
        built.serve(signs.give)
