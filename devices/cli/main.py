"""`mdp-agent`: serve one device's sub-model of a bundle, or measure what the device can do."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from devices.access.audit import AuditLog
from devices.access.watch import ClientWatch, agent_keys, make_room, warn_of_plain_text
from devices.agent.bundles import GRACE_S
from devices.agent.options import Serving
from devices.agent.reload import Renewal
from devices.agent.server import Agent
from devices.camera.capture import DEFAULT_FPS, open_eyes
from devices.cli.announce import announced
from devices.cli.probe import add_to
from devices.cores import stay_on
from devices.events import Events, Reporter, for_events_alone, quiet_libraries
from mdp import console
from mdp.formats.profile import MAX_THREADS
from mdp.formats.signing import load_bundle_key
from mdp.protocol.messages import request_frame_bytes
from mdp.transport import Router, public_key_of

app = console.new_app("Run one device's part of a bundle, or measure the device.", "mdp-agent")
add_to(app)


@app.command("run")
def run_agent(
    bundle: Annotated[Path, typer.Option(help="Bundle folder made by mdp-partition.")],
    device: Annotated[str, typer.Option(help="This device's name in the bundle's plan.")],
    bundle_key: Annotated[
        Path | None,
        typer.Option(help="Serve only bundles signed with this public key (`mdp bundle sign`)."),
    ] = None,
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
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Instead of the plan's number of threads."),
    ] = None,
    spin: Annotated[
        bool | None,
        typer.Option(
            help="Whether threads wait for each other awake while they compute, instead of the "
            "plan's word: for cores that nobody else wants."
        ),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(help="Run on these cores only, as in 0,2-3, and on no more threads."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Most pictures to compute at once, instead of the plan's number."
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="How long a replaced bundle is served after its last request."
        ),
    ] = GRACE_S,
    allow_fallback: Annotated[
        bool, typer.Option(help="Accept another provider, runtime or precision than planned.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            envvar="MDP_SOURCE",
            help="Own eyes: folder:PATH, video:FILE, camera:NUMBER or rtsp://HOST/PATH.",
        ),
    ] = None,
    source_fps: Annotated[
        float, typer.Option(min=0.01, max=240, help="Frames a second to take of --source.")
    ] = DEFAULT_FPS,
    audit: Annotated[
        Path | None,
        typer.Option(help="Append who connected, was refused or lost its key: JSON lines."),
    ] = None,
    announce: Annotated[
        bool,
        typer.Option(
            "--announce", help="Tell the local network that it is here (`mdp fleet discover`)."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event on stdout.")
    ] = False,
) -> None:
    """Serve one sub-model until SIGTERM or Ctrl-C; what was accepted is finished first.

    On SIGHUP it looks at --bundle again: another bundle there is loaded beside the one that is
    served, and takes its place if it can be served. Other machines reach the agent only with keys:
    --key says who it is, --clients whom it lets in; the latter is read again on SIGHUP, too.

    Example: mdp-agent run --bundle bundle/ --device raspberry-pi-5 --bind tcp://0.0.0.0:7500
    --key keys/raspberry-pi-5.secret --clients clients/

    Exit codes: 0 stopped as asked, 2 bad input (bundle, device, provider, address, key, cores),
    1 unforeseen.
    """
    quiet_libraries()
    stream = for_events_alone(sys.stdout) if json else sys.stderr
    access = agent_keys(bind, key, clients, insecure=insecure)
    keys, let_in = access or (None, None)
    # Before any thread is started: those to come inherit it.
    cores = None if cpus is None else stay_on(cpus)
    options = Serving(
        device=device,
        threads=threads,
        spin=spin,
        cores=cores,
        batch=batch,
        allow_fallback=allow_fallback,
        bundle_key=None if bundle_key is None else load_bundle_key(bundle_key),
    )
    first = options.candidate(bundle)
    eyes = None if source is None else open_eyes(source, source_fps)
    make_room()
    max_frame_bytes = request_frame_bytes(first.assignment.spec.image_size)
    with ExitStack() as stack:
        log = None
        if audit is not None:
            log = stack.enter_context(AuditLog(audit, let_in.name if let_in else lambda key: ""))
        tell = (lambda *_: None) if log is None else log.tell
        router = stack.enter_context(
            Router(bind, keys=keys, max_frame_bytes=max_frame_bytes, audit=tell)
        )
        events = Events(stream, device, router.address, json=json)
        report = stack.enter_context(Reporter(events.tell)).tell
        agent = Agent(
            first.bundle,
            first.assignment,
            first.load,
            router,
            batch=first.batch,
            renewal=Renewal(
                lambda: options.candidate(bundle, max_frame_bytes), clock=time.monotonic
            ),
            eyes=eyes,
            grace_s=grace_s,
            report=report,
        )
        watch = None
        if access is not None:
            watch = ClientWatch(access[1], access[0].allowed, router, agent, report)
        asked = _take_signals(agent)
        # Whoever waits for this may send signals from here on.
        events.tell("LISTENING" if json else f"listening on {router.address}")
        warn_of_plain_text(device, router.address, keys)

        def look() -> None:
            if asked:
                asked.clear()
                if watch is not None:
                    watch.read_again()
                agent.renew()
            if watch is not None:
                watch.look()

        with ExitStack() as serving:
            if eyes is not None:
                eyes.report_to(report)
                serving.enter_context(eyes)
            if announce:
                public = None if keys is None else public_key_of(keys.secret)
                serving.enter_context(
                    announced(router.address, public, lambda: agent.served[0], report)
                )
            agent.serve(look)
    if agent.left_behind:
        # The thread ends with the process: Python's own end would pull it out of the middle of
        # onnxruntime, which then aborts.
        os._exit(0)


def _take_signals(agent: Agent) -> list[bool]:
    """SIGTERM and SIGINT end the agent in order; SIGHUP is put down in what is returned.

    Handlers do nothing else: they interrupt the main thread wherever it is.
    """
    asked: list[bool] = []
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, lambda *_: agent.stop())

    def look_again(*_: object) -> None:
        asked.append(True)
        agent.lookout.ask()

    signal.signal(signal.SIGHUP, look_again)
    return asked


def main() -> None:
    """Entry point of `mdp-agent`."""
    console.run(app, "mdp-agent")
