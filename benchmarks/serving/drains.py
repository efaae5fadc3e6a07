"""Counts answers that an agent accepted and that its end, or its change of bundle, loses.

    python -m benchmarks.serving.drains --runs 500

Each run is a new agent process with a real socket, asked by one client for several pictures at
once;
the model waits until all of them have been accepted. Then, beside processes that keep every core
busy,

    sigterm   the agent is told to stop, and answers all of them while it drains
    bundle    the agent changes its bundle, and takes the former one down at once (`--grace-s 0`)
    slow      as sigterm, and the client reads nothing before the agent's process has ended

An answer counts as lost if its device is not in `used`. Ends with 1 if one is lost.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import zmq

import mdp
from benchmarks.harness.machine import describe_machine
from benchmarks.serving.rolling import another_bundle, point
from devices.agent.bundles import Candidate
from devices.agent.reload import Renewal
from devices.agent.server import Agent
from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Picture, Pixels
from mdp.requests.prediction import Prediction
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S
from mdp.transport import Router

RESULTS = Path(__file__).parents[1] / "results" / "drains.json"
DEVICE, CALLS, BUSY = "alpha", 8, 5
RED = colour_picture("red")
#: A deadline that is never meant to be reached.
PLENTY_MS = 20_000.0
Answer = Prediction | BaseException


class Held:
    """A runtime that computes nothing before it may."""

    provider, fallback = "HeldExecutionProvider", False

    def __init__(self, may_run: Path) -> None:
        self.may_run = may_run

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Logits `[N, 3]` for red."""
        self.may_run.with_name("running").touch()
        while not self.may_run.exists():
            time.sleep(0.001)
        logits = np.repeat(np.array([[0.0, 0.0, 3.0]], np.float32), len(pixels), axis=0)
        return Contribution(logits, logits)


def serve(bundle: Path, may_run: Path, said: Connection) -> None:
    """An agent's process: serves until SIGTERM, and looks at its bundle again on SIGHUP."""

    def candidate() -> Candidate:
        opened = Bundle.open(bundle.resolve())
        assignment = opened.assignment(DEVICE)
        return Candidate(bundle=opened, assignment=assignment, load=lambda: Held(may_run))

    first = candidate()
    with Router(ANY_PORT) as router:
        agent = Agent(
            first.bundle,
            first.assignment,
            first.load,
            router,
            batch=1,
            renewal=Renewal(candidate, clock=time.monotonic),
            grace_s=0.0,
            report=lambda line: said.send((line, router.address)),
        )
        signal.signal(signal.SIGTERM, lambda *_: agent.stop())
        signal.signal(signal.SIGHUP, lambda *_: agent.renew())
        agent.serve()


class Scene:
    """One agent and what it serves."""

    def __init__(self, folder: Path, context: "multiprocessing.context.ForkServerContext") -> None:
        self.folder, self.may_run = folder, folder / "may-run"
        #: Whether the first request was being computed at the last look.
        self.running = False
        write_bundle(folder / "old")
        another_bundle(folder / "old", folder / "new")
        (folder / "live").symlink_to("old")
        self._said, theirs = context.Pipe(duplex=False)
        arguments = (folder / "live", self.may_run, theirs)
        self.process: ForkServerProcess = context.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()
        address = self.wait_for("READY")
        new_fleet(Bundle.open(folder / "old"), [f"{DEVICE}={address}"], folder / "fleet.toml")

    def wait_for(self, start: str) -> str:
        """Wait until the agent says a line that begins with `start`; returns its address."""
        while self._said.poll(PATIENCE_S):
            line, address = self._said.recv()
            if line.startswith(start):
                return str(address)
        raise TimeoutError(f"the agent never said {start}")

    def signal(self, number: signal.Signals) -> None:
        """Send the agent a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Wait until the process has ended by itself."""
        self.process.join(PATIENCE_S)
        if self.process.exitcode != 0:
            raise RuntimeError(f"the agent ended with {self.process.exitcode}")

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._said.close()


def accepted(client: mdp.AsyncClient | Client, scene: Scene) -> bool:
    """Whether the agent, when it last told, computed one request and all others waited."""
    # Taken out: what was told before the first was computed says nothing.
    status = client._exchange.statuses.pop(DEVICE, None)
    running, scene.running = scene.running, scene.may_run.with_name("running").exists()
    return running and status is not None and status.queued == CALLS - 1


async def _ask(scene: Scene, then: Callable[[], None]) -> list[Answer]:
    """Ask, and go on with `then`, in a thread, once all is accepted."""
    fleet = scene.folder / "fleet.toml"
    async with mdp.AsyncClient.connect(fleet, timeout_s=PATIENCE_S) as client:
        calls = [asyncio.create_task(client.classify(RED, deadline_ms=PLENTY_MS))
                 for _ in range(CALLS)]  # fmt: skip
        while not accepted(client, scene):
            await client.status(timeout_s=PATIENCE_S)
        await asyncio.to_thread(then)
        return list(await asyncio.gather(*calls, return_exceptions=True))


def sigterm(scene: Scene) -> list[Answer]:
    """Stop the agent while it computes."""

    def stop() -> None:
        scene.signal(signal.SIGTERM)
        scene.wait_for("DRAINING")
        scene.may_run.touch()

    return asyncio.run(_ask(scene, stop))


def bundle(scene: Scene) -> list[Answer]:
    """Give the agent another bundle while it computes."""

    def change() -> None:
        point(scene.folder / "live", scene.folder / "new")
        scene.signal(signal.SIGHUP)
        scene.wait_for("serves")
        scene.may_run.touch()

    answers = asyncio.run(_ask(scene, change))
    scene.signal(signal.SIGTERM)
    return answers


def slow(scene: Scene) -> list[Answer]:
    """Stop the agent while it computes, and read when it has gone."""
    with Client.connect(scene.folder / "fleet.toml", timeout_s=PATIENCE_S) as client:

        def pictures() -> Iterator[Picture]:
            for _ in range(CALLS):
                yield RED
            while not accepted(client, scene):
                client.status(timeout_s=PATIENCE_S)
            scene.signal(signal.SIGTERM)
            scene.wait_for("DRAINING")
            scene.may_run.touch()
            scene.end()

        stream = client.stream(
            pictures(), deadline_ms=PLENTY_MS, in_flight=CALLS + 1, errors="yield"
        )
        return list(stream)


CASES = {case.__name__: case for case in (sigterm, bundle, slow)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(case: str, runs: int) -> dict[str, object]:
    """Lost answers of so many runs, and what was said instead."""
    context = multiprocessing.get_context("forkserver")
    # An agent's process is a fork of one that has all modules already.
    context.set_forkserver_preload(
        ["benchmarks.serving.rolling", "devices.agent.server", "devices.agent.reload"]
    )
    instead: Counter[str] = Counter()
    answered, runs_with_loss, started_s = 0, 0, time.monotonic()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            scene = Scene(Path(folder), context)
            try:
                answers = CASES[case](scene)
                scene.end()
            finally:
                scene.close()
        lost = [answer for answer in answers if isinstance(answer, BaseException)]
        answered += len(answers) - len(lost)
        runs_with_loss += bool(lost)
        instead.update(getattr(a, "outcomes", {DEVICE: repr(a)})[DEVICE] for a in lost)
    return {
        "runs": runs,
        "answered": answered,
        "lost": sum(instead.values()),
        "runs_with_loss": runs_with_loss,
        "instead": dict(instead),
        "seconds": round(time.monotonic() - started_s, 1),
    }


def main() -> int:
    """Measure, print, and keep if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=60, help="drains of each case")
    parser.add_argument("--busy", type=int, default=BUSY, help="processes that make the load")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    result: dict[str, object] = {
        "machine": describe_machine(),
        "libzmq": zmq.zmq_version(),
        "busy": options.busy,
        "calls": CALLS,
    }
    with busy(options.busy):
        result["cases"] = cases = {case: measure(case, options.runs) for case in options.cases}
    print(json.dumps(result, indent=1))
    if options.keep:
        write_json(RESULTS, result)
    return 1 if any(case["lost"] for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
