"""A real agent whose model only waits.

    python -m benchmarks.harness.stub_agent --bundle bundle/ --device device-0 --compute-ms 12

A `devices.agent.server.Agent` with a ROUTER, as in `mdp-agent run`; only the runtime differs.
Events are those of `mdp-agent run --json`. Ends on SIGTERM.
"""

import json
import math
import signal
import time
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.harness.options import arguments
from devices.access.watch import agent_keys
from devices.agent.bundles import LoadableBundle
from devices.agent.server import Agent
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.transport import Router


class StubRuntime:
    """Waits for a log-normal time of this median and sigma; its logits vary as with pictures."""

    provider = "StubExecutionProvider"
    fallback = False

    def __init__(self, num_classes: int, median_s: float, random: Random, sigma: float) -> None:
        ready = [np.full((1, num_classes), shift, dtype=np.float32) for shift in range(8)]
        self._contributions = cycle([Contribution(logits, logits) for logits in ready])
        self._median_s, self._random, self._sigma = median_s, random, sigma

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[1, num_classes]`."""
        if self._median_s:
            time.sleep(self._median_s * math.exp(self._random.gauss(0.0, self._sigma)))
        return next(self._contributions)


def main() -> None:
    """Serve until SIGTERM."""
    asked = arguments(
        __doc__, bundle=Path, device=str, bind="tcp://127.0.0.1:0", key="", clients="",
        compute_ms=0.0, sigma=0.0,
    )  # fmt: skip
    bundle = Bundle.open(asked.bundle)
    files = (Path(file) if file else None for file in (asked.key, asked.clients))
    access = agent_keys(asked.bind, *files, insecure=False)
    # Each device draws its own times.
    runtime = StubRuntime(
        len(bundle.manifest.labels), asked.compute_ms / 1e3, Random(asked.device), asked.sigma
    )
    with Router(asked.bind, keys=access and access[0]) as router:

        def report(event: str) -> None:
            line = {"event": event, "device": asked.device, "address": router.address}
            print(json.dumps(line), flush=True)

        report("LISTENING")
        assignment = bundle.assignment(asked.device)
        source = LoadableBundle(
            bundle=bundle, assignment=assignment, load=lambda: runtime, batch=assignment.batch
        )
        agent = Agent(source, router, report=report)
        signal.signal(signal.SIGTERM, lambda *_: agent.stop())
        agent.serve()


if __name__ == "__main__":
    main()
