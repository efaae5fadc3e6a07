"""`mdp-agent`: serve one device's sub-model of a bundle, or measure what the device can do."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer

from devices.agent.lifecycle import Report
from devices.agent.options import ServeOptions
from devices.agent.server import Agent
from devices.build import build_agent, build_bundleless_agent
from devices.cli import camera, install, probe
from devices.cli.options import add_serve_options, serve_options
from devices.events import Events, for_events_alone
from devices.health import PORT, LifeSigns, report_health, serve_health
from devices.notify import Notifier
from mdp import console
from mdp.formats.fleet import PLAIN_TEXT
from mdp.formats.keys import is_loopback
from mdp.logs import BackgroundWriter, quiet_libraries
from mdp.tracing import set_up

app = console.new_app("Run one device's part of a bundle, or measure the device.", "mdp-agent")
probe.add_to(app)
camera.add_to(app)


@app.command("run")
@add_serve_options
def run_agent(*, given: Mapping[str, Any]) -> None:
    """Serve one sub-model until SIGTERM or Ctrl-C; accepted requests are answered first.

    SIGHUP reloads --bundle: another bundle there is loaded beside the served one, and replaces it
    if it can be served. Other machines reach the agent only with keys: its own is --key, those of
    its clients are in --clients, which is read again when it changes.

    Example: mdp-agent run --bundle bundle/ --device raspberry-pi-5 --bind tcp://0.0.0.0:7500
    --key keys/raspberry-pi-5.secret --clients clients/

    Exit codes: 0 stopped by a signal, 2 bad input (bundle, device, provider, address, key, cores),
    5 the address is taken or not there yet, 1 unforeseen.
    """
    device, json = given["device"], given["json"]
    quiet_libraries()
    set_up("mdp-agent", **{"service.instance.id": device})
    stream = for_events_alone(sys.stdout) if json else sys.stderr
    options = serve_options(given)
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


install.add_to(app)


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

        def notify(*, reload_begins: bool = False) -> None:
            if alive := agent.is_alive():
                signs.give()
            if notifier is not None:
                notifier.send_due(
                    agent.state,
                    reloading=reload_begins or agent.is_reloading,
                    alive=alive,
                    now_us=time.monotonic_ns() // 1000,
                )

        def periodic() -> None:
            if reload_requests:
                reload_requests.clear()
                # Before it begins, as it may have ended by the next look: systemd waits for both.
                notify(reload_begins=True)
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
