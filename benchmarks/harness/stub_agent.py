"""A real agent whose model computes nothing, or waits instead.

    python -m benchmarks.harness.stub_agent --bundle bundle/ --device device-0 --work-ms 5

A `devices.agent.server.Agent` with a ROUTER, as in `mdp-agent run`; only the runtime differs.
Events are those of `mdp-agent run --json`. Ends on SIGTERM.
"""

import json
import signal
import time
from itertools import cycle
from pathlib import Path

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
    """Waits `work_s` instead of computing; its logits vary as with pictures."""

    provider = "StubExecutionProvider"
    fallback = False

    def __init__(self, num_classes: int, work_s: float) -> None:
        self._work_s = work_s
        ready = [np.full((1, num_classes), shift, dtype=np.float32) for shift in range(8)]
        self._contributions = cycle([Contribution(logits, logits) for logits in ready])

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[1, num_classes]`."""
        if self._work_s:
            time.sleep(self._work_s)
        return next(self._contributions)


def main() -> None:
    """Serve until SIGTERM."""
    asked = arguments(
        __doc__, bundle=Path, device=str, bind="tcp://127.0.0.1:0", key="", clients="", work_ms=0.0
    )
    bundle = Bundle.open(asked.bundle)
    files = (Path(file) if file else None for file in (asked.key, asked.clients))
    access = agent_keys(asked.bind, *files, insecure=False)
    runtime = StubRuntime(len(bundle.manifest.labels), asked.work_ms / 1e3)
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
