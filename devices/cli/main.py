"""`mdp-agent`: serve one device's sub-model of a bundle, or measure what the device can do."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from devices.agent.bundles import GRACE_S
from devices.agent.lifecycle import Report
from devices.agent.options import MAX_PUSH_MB, ServeOptions
from devices.agent.server import Agent
from devices.build import build_agent, build_bundleless_agent
from devices.camera.capture import DEFAULT_FPS
from devices.cli import camera, install, probe
from devices.cli.camera import AllowMask, MaskFile
from devices.cores import pin_to_cores
from devices.events import Events, for_events_alone
from devices.health import PORT, LifeSigns, report_health, serve_health
from devices.notify import Notifier
from mdp import console
from mdp.formats.fleet import PLAIN_TEXT
from mdp.formats.keys import is_loopback
from mdp.formats.packaged import bundle_by_name
from mdp.formats.profile import MAX_THREADS
from mdp.formats.signing import load_bundle_key
from mdp.logs import BackgroundWriter, quiet_libraries
from mdp.tracing import set_up

app = console.new_app("Run one device's part of a bundle, or measure the device.", "mdp-agent")
probe.add_to(app)
camera.add_to(app)


@app.command("run")
def run_agent(
    device: Annotated[str, typer.Option(help="This device's name in the bundle's plan.")],
    bundle: Annotated[
        Path | None,
        typer.Option(
            callback=bundle_by_name,
            help="Bundle folder made by mdp-partition, or the name of one of MDP's; without it, "
            "with --allow-push, the agent waits for a first one, and can be recorded meanwhile.",
        ),
    ] = None,
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
        bool, typer.Option("--insecure", help="Serve other machines in plain text.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Instead of the plan's number of threads."),
    ] = None,
    spin: Annotated[
        bool | None,
        typer.Option(
            help="Whether threads spin while they wait for each other, instead of as planned: "
            "for cores that nothing else uses."
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
            min=0,
            max=86_400,
            help="How long a replaced bundle is served after its last request; after it was "
            "replaced, if a further one is to take its place.",
        ),
    ] = GRACE_S,
    allow_fallback: Annotated[
        bool, typer.Option(help="Accept another provider, runtime or precision than planned.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            envvar="MDP_SOURCE",
            help="The agent's own camera: folder:PATH, video:FILE, camera:NUMBER or "
            "rtsp://HOST/PATH; a phone's, which opens a page on this port: phone:PORT; or that of "
            "the agent at mdp://HOST:PORT.",
        ),
    ] = None,
    source_fps: Annotated[
        float, typer.Option(min=0.01, max=240, help="Frames a second to take of --source.")
    ] = DEFAULT_FPS,
    source_key: Annotated[
        Path | None, typer.Option(help="With mdp://HOST:PORT: the public key file of that agent.")
    ] = None,
    allow_record: Annotated[
        bool,
        typer.Option(
            "--allow-record",
            help="Let clients fetch pictures of --source (`mdp record`), whose keys may: "
            "`record = true` in NAME.limits.",
        ),
    ] = False,
    mask: MaskFile = None,
    allow_mask: AllowMask = False,
    audit: Annotated[
        Path | None,
        typer.Option(
            help="Append connections, refusals, pushes, recordings, masks, lost keys: JSON lines."
        ),
    ] = None,
    announce: Annotated[
        bool,
        typer.Option("--announce", help="Announce it on the local network (`mdp fleet discover`)."),
    ] = False,
    allow_push: Annotated[
        Path | None,
        typer.Option(
            help="Folder for bundles that clients push (`mdp bundle push`), whose keys may: "
            "`push = true` in NAME.limits. The last one is served instead of --bundle."
        ),
    ] = None,
    max_push_mb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Largest pushed bundle, in MB.")
    ] = MAX_PUSH_MB,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event on stdout.")
    ] = False,
) -> None:
    """Serve one sub-model until SIGTERM or Ctrl-C; accepted requests are answered first.

    SIGHUP reloads --bundle: another bundle there is loaded beside the served one, and replaces it
    if it can be served. Other machines reach the agent only with keys: its own is --key, those of
    its clients are in --clients, which is read again when it changes.

    Example: mdp-agent run --bundle bundle/ --device raspberry-pi-5 --bind tcp://0.0.0.0:7500
    --key keys/raspberry-pi-5.secret --clients clients/

    Exit codes: 0 stopped by a signal, 2 bad input (bundle, device, provider, address, key, cores),
    5 the address is taken or not there yet, 1 unforeseen.
    """
    quiet_libraries()
    set_up("mdp-agent", **{"service.instance.id": device})
    stream = for_events_alone(sys.stdout) if json else sys.stderr
    options = ServeOptions(
        bundle=bundle,
        device=device,
        bundle_key=None if bundle_key is None else load_bundle_key(bundle_key),
        bind=bind,
        key=key,
        clients=clients,
        insecure=insecure,
        threads=threads,
        spin=spin,
        # Before any thread is started: threads inherit it.
        cores=None if cpus is None else pin_to_cores(cpus),
        batch=batch,
        grace_s=grace_s,
        allow_fallback=allow_fallback,
        source=source,
        source_fps=source_fps,
        source_key=source_key,
        allow_record=allow_record,
        mask=mask,
        allow_mask=allow_mask,
        audit=audit,
        announce=announce,
        allow_push=allow_push,
        max_push_mb=max_push_mb,
    )
    events = Events(stream, device, json=json)
    notifier, stopped = Notifier.of(), list[bool]()
    with BackgroundWriter(events.emit, "events") as writer:
        if options.awaits_bundle():
            address = _await_bundle(options, events, writer.put, notifier, stopped)
            if stopped:
                return
            options = replace(options, bind=address)
        left_behind = _serve(options, events, writer.put, notifier, stopped)
    if left_behind:
        # Ended without Python's clean-up, which would stop the thread inside onnxruntime, whose
        # library then aborts.
        os._exit(0)


install.add_to(app, run_agent)


@app.command("health")
def health(
    port: Annotated[
        int, typer.Option(min=1, max=2**16 - 1, help="The port that the agent listens on.")
    ] = PORT,
    live: Annotated[
        bool, typer.Option("--live", help="Be content with any state of an agent that is alive.")
    ] = False,
) -> None:
    """Ask an agent of this machine, or of this container, for its state; no key is needed.

    For health checks: prints `READY DEVICE`, or says what it is instead. HANGS is an agent that has
    given no sign of life for 10 s. Any user of the machine may ask, and one could answer in the
    place of an agent that is not there.

    Example: mdp-agent health --port 7500

    Exit codes: 0 READY, 3 in another state, or not there, 2 usage, 1 unforeseen.
    """
    raise typer.Exit(report_health(port, live=live))


def _await_bundle(
    options: ServeOptions,
    events: Events,
    report: Report,
    notifier: Notifier | None,
    stopped: list[bool],
) -> str:
    """Serve without a bundle until one is pushed, or a signal has `stopped` it; the address."""
    with build_bundleless_agent(options, report=report) as built, ExitStack() as stack:
        signs = LifeSigns(options.device)
        serve_health(built.address, lambda: signs.line(built.agent.state), report, stack)

        def stop(*_: object) -> None:
            stopped.append(True)
            built.agent.stop()

        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop_signal, stop)
        # Changed files of the clients are noticed without it.
        signal.signal(signal.SIGHUP, lambda *_: None)
        events.listen(built.address)

        def periodic() -> None:
            signs.give()
            if notifier is not None:
                now_us = time.monotonic_ns() // 1000
                notifier.send_due(built.agent.state, reloading=False, alive=True, now_us=now_us)

        built.serve(periodic)
    return built.address


def _serve(
    options: ServeOptions,
    events: Events,
    report: Report,
    notifier: Notifier | None,
    stopped: list[bool],
) -> bool:
    """Serve a bundle until a signal; whether a thread was left behind that computes or loads.

    `stopped` has an entry where a signal came before.
    """
    with build_agent(options, report=report) as built, ExitStack() as stack:
        events.ready = lambda: built.agent.lifecycle.description
        reload_requests = _handle_signals(built.agent)
        if stopped:
            built.agent.stop()
        # Signals may be sent from here on.
        events.listen(built.address)
        if built.public_key is None and not is_loopback(built.address):
            text = f"WARNING: {built.address} is {PLAIN_TEXT}"
            Events(sys.stderr, options.device, built.address).emit(text)
        agent, signs = built.agent, LifeSigns(options.device)
        serve_health(built.address, lambda: signs.line(agent.state), report, stack)

        def notify() -> None:
            if alive := agent.is_alive():
                signs.give()
            if notifier is not None:
                notifier.send_due(
                    agent.state,
                    reloading=agent.is_reloading,
                    alive=alive,
                    now_us=time.monotonic_ns() // 1000,
                )

        def periodic() -> None:
            if reload_requests:
                reload_requests.clear()
                built.reload()
            notify()

        built.serve(periodic)
        # A short draining ends between two periodic calls.
        notify()
    return agent.left_behind


def _handle_signals(agent: Agent) -> list[bool]:
    """SIGTERM and SIGINT stop the agent; SIGHUP adds to the returned list.

    Handlers do nothing else: they interrupt the main thread at any point.
    """
    reload_requests: list[bool] = []
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, lambda *_: agent.stop())

    def request_reload(*_: object) -> None:
        reload_requests.append(True)
        agent.main_loop.wake()

    signal.signal(signal.SIGHUP, request_reload)
    return reload_requests


def main() -> None:
    """Entry point of `mdp-agent`."""
    console.run(app, "mdp-agent")
