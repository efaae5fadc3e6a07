"""Real agents whose models cost nothing but the time they are told to take.

    python -m benchmarks.harness.stub_agent --bundle bundle/ --device device-0 device-1

Each device named has a `devices.agent.server.Agent` and a ROUTER of its own, as `mdp-agent run`
has; only the runtime is another. One line of JSON per device says where it listens. Ends on
SIGTERM.
"""

import argparse
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np

from devices.access.watch import agent_keys
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
    usual_s: float = options.compute_ms / 1e3
    late_s: float = options.late_ms / 1e3
    share = options.late_share if device in options.late else 0.0
    sigma = options.sigma

    def take_s() -> float:
        if share and random.random() < share:
            return late_s
        return usual_s * math.exp(random.gauss(0.0, sigma)) if sigma else usual_s

    return take_s


def _loaded(runtime: StubRuntime) -> StubRuntime:
    """What the agent loads."""
    return runtime


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Agents with a stub for a model.")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--device", nargs="+", required=True)
    parser.add_argument("--bind", default="tcp://127.0.0.1:0")
    parser.add_argument("--keys", type=Path, help="Folder with DEVICE.secret and client.public.")
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=0.0, help="Of the logarithm of that time.")
    parser.add_argument("--late", nargs="*", default=[], help="Devices that are late at times.")
    parser.add_argument("--late-share", type=float, default=0.0)
    parser.add_argument("--late-ms", type=float, default=0.0)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    classes = len(bundle.manifest.labels)
    with ExitStack() as stack:
        agents = []
        for device in options.device:
            keys = None
            if options.keys is not None:
                own, allowed = options.keys / f"{device}.secret", options.keys / "client.public"
                access = agent_keys(options.bind, own, allowed, insecure=False)
                keys = None if access is None else access[0]
            router = stack.enter_context(Router(options.bind, keys=keys))
            runtime = StubRuntime(classes, durations(options, device))
            agent = Agent(bundle, bundle.assignment(device), partial(_loaded, runtime), router)
            agents.append(agent)
            said = {"event": "LISTENING", "device": device, "address": router.address}
            print(json.dumps(said), flush=True)

        def stop(*_: object) -> None:
            for agent in agents:
                agent.stop()

        signal.signal(signal.SIGTERM, stop)
        threads = [threading.Thread(target=agent.serve) for agent in agents[1:]]
        for thread in threads:
            thread.start()
        agents[0].serve()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
