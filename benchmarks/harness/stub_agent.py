"""Real agents whose models cost nothing but the time they are told to take.

    python -m benchmarks.harness.stub_agent --bundle bundle/ --device device-0 [--beside device-1]

Each device named has a `devices.agent.server.Agent` and a ROUTER of its own, as `mdp-agent run`
has; only the runtime is another. Events are those of `mdp-agent run --json`. Ends on SIGTERM.
"""

import argparse
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np

from devices.access.watch import agent_keys
from devices.agent.bundles import LoadableBundle
from devices.agent.server import Agent
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.transport import Router


class StubRuntime:
    """Gives other logits every time, as pictures do, after `take_s()` seconds."""

    provider = "StubExecutionProvider"
    fallback = False

    def __init__(self, num_classes: int, take_s: Callable[[], float]) -> None:
        ready = [np.full((1, num_classes), shift, dtype=np.float32) for shift in range(8)]
        self._contributions = cycle([Contribution(logits, logits) for logits in ready])
        self._take_s = take_s

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[1, num_classes]`."""
        take_s = self._take_s()
        if take_s:
            time.sleep(take_s)
        return next(self._contributions)


def durations(options: argparse.Namespace, device: str) -> Callable[[], float]:
    """Seconds of one computation after the other, of each device others: now and then one is late.

    With a `sigma` they are log-normal around the usual ones.
    """
    random = Random(device)
    usual_s, late_s = options.compute_ms / 1e3, options.late_ms / 1e3

    def take_s() -> float:
        if options.late_share and random.random() < options.late_share:
            return float(late_s)
        return float(usual_s * math.exp(random.gauss(0.0, options.sigma)))

    return take_s if usual_s or options.late_share else lambda: 0.0


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Agents with a stub for a model.")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--beside", nargs="*", default=[], help="More devices in this process.")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--clients", type=Path)
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=0.0, help="Of the logarithm of that time.")
    parser.add_argument("--late-share", type=float, default=0.0)
    parser.add_argument("--late-ms", type=float, default=0.0)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    access = agent_keys(options.bind, options.key, options.clients, insecure=False)
    agents: list[Agent] = []

    def stop(*_: object) -> None:
        for agent in agents:
            agent.stop()

    signal.signal(signal.SIGTERM, stop)
    with ExitStack() as stack:
        for device in (options.device, *options.beside):
            router = stack.enter_context(Router(options.bind, keys=access and access[0]))
            take_s = durations(options, device)
            agents.append(_agent(bundle, device, router, take_s))
        threads = [threading.Thread(target=agent.serve) for agent in agents[1:]]
        for thread in threads:
            thread.start()
        agents[0].serve()
        for thread in threads:
            thread.join()


def _agent(bundle: Bundle, device: str, router: Router, take_s: Callable[[], float]) -> Agent:
    def report(event: str) -> None:
        said = {"event": event, "device": device, "address": router.address}
        print(json.dumps(said), flush=True)

    runtime = StubRuntime(len(bundle.manifest.labels), take_s)
    report("LISTENING")
    assignment = bundle.assignment(device)
    source = LoadableBundle(
        bundle=bundle, assignment=assignment, load=lambda: runtime, batch=assignment.batch
    )
    return Agent(source, router, report=report)


if __name__ == "__main__":
    main()
