"""`mdp-agent`: serve one device's sub-model of a bundle, or measure what the device can do."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from devices.agent import Agent
from devices.door import agent_keys, allow_anew, make_room, warn_of_plain_text
from devices.probe_command import add_to
from devices.runtime import Runtime
from devices.runtimes import open_runtime
from mdp import console
from mdp.bundle import Bundle, model_path
from mdp.transport import Router
from mdp.wire import request_frame_bytes

app = console.new_app("Run one device's part of a bundle, or measure the device.")
add_to(app)


@app.command("run")
def run_agent(
    bundle: Annotated[Path, typer.Option(help="Bundle folder made by mdp-partition.")],
    device: Annotated[str, typer.Option(help="This device's name in the bundle's plan.")],
    bind: Annotated[
        str, typer.Option(help="Address to listen on; port 0 takes any free one.")
    ] = "tcp://127.0.0.1:7500",
    key: Annotated[
        Path | None, typer.Option(help="This agent's secret key file, made by `mdp keys new`.")
    ] = None,
    clients: Annotated[
        Path | None,
        typer.Option(help="Public key file of the client to let in, or a folder of them."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plain text to other machines.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Instead of the plan's number of threads.")
    ] = None,
    allow_fallback: Annotated[
        bool, typer.Option(help="Accept another provider, runtime or precision than planned.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event on stdout.")
    ] = False,
) -> None:
    """Serve one sub-model until SIGTERM or Ctrl-C; what was accepted is finished first.

    Other machines reach it only with keys: --key says who it is, --clients whom it lets in; the
    latter is read again on SIGHUP.

    Example: mdp-agent run --bundle bundle/ --device raspberry-pi-5 --bind tcp://0.0.0.0:7500
    --key keys/raspberry-pi-5.secret --clients clients/

    Exit codes: 0 stopped as asked, 2 bad input (bundle, device, provider, address, key),
    1 unforeseen.
    """
    keys = agent_keys(bind, key, clients, insecure=insecure)
    opened = Bundle.open(bundle)
    assignment = opened.assignment(device)

    def load() -> Runtime:
        return open_runtime(
            opened.verified(model_path(assignment.k)),
            assignment,
            num_classes=len(opened.manifest.labels),
            threads=threads,
            allow_fallback=allow_fallback,
        )

    make_room()
    max_frame_bytes = request_frame_bytes(assignment.submodel.image_size)
    with Router(bind, keys=keys, max_frame_bytes=max_frame_bytes) as router:
        address = router.address

        def report(event: str) -> None:
            try:
                if json:
                    console.print_json({"event": event, "device": device, "address": address})
                else:
                    print(f"mdp-agent {device}: {event}", file=sys.stderr, flush=True)
            except OSError:
                # Whoever was reading has gone. Serving goes on, and what is still buffered must not
                # fail once more at exit.
                stream = sys.stdout if json else sys.stderr
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

        report(f"listening on {address}" if not json else "LISTENING")
        warn_of_plain_text(device, address, keys)
        agent = Agent(opened, assignment, load, router, report=report)
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop_signal, lambda *_: agent.stop())
        if clients is not None:
            signal.signal(signal.SIGHUP, lambda *_: report(allow_anew(router, clients)))
        agent.serve()


def main() -> None:
    """Entry point of `mdp-agent`."""
    console.run(app, "mdp-agent")
