"""A real agent whose model misbehaves as told, in a process of its own.

Serves like `mdp-agent run --json`. `--hold load`, `warm_up` or `run` makes that step wait until a
file of that name appears in `--gate`, so that a test decides how long "slow" is.
"""

import argparse
import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from devices.agent import server as agent
from devices.agent.bundles import LoadableBundle
from devices.camera.capture import DEFAULT_FPS, open_frame_buffer
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.transport import Router

GIVE_UP_S = 60.0


class OddRuntime:
    """Favours the colour it sees, unless told otherwise."""

    provider = "OddExecutionProvider"
    fallback = False

    def __init__(self, options: argparse.Namespace, num_classes: int) -> None:
        self.options = options
        self.num_classes = num_classes
        self.runs = 0
        self.wait("load")

    def wait(self, step: str) -> None:
        """Wait for the test's permission, if this step is held."""
        until_s = time.monotonic() + GIVE_UP_S
        while step in self.options.hold and not (self.options.gate / step).exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"nobody opened the gate for {step}")
            time.sleep(0.002)

    def warm_up(self) -> None:
        """Nothing to warm up."""
        self.wait("warm_up")

    def run(self, pixels: Pixels) -> Contribution:
        """Logits `[N, num_classes]` by mean colour: blue, green, red."""
        self.runs += 1
        if self.options.gate is not None:
            (self.options.gate / f"run-{self.runs}").touch()
        self.wait("run")
        time.sleep(self.options.work_ms / 1e3)
        logits = (pixels.mean(axis=(1, 2))[:, ::-1] / 32).astype(np.float32)
        return Contribution(logits[:, : self.num_classes], logits[:, : self.num_classes])


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--gate", type=Path)
    # Above 1 ms the socket is answered meanwhile, however often this was quick before.
    parser.add_argument("--work-ms", type=float, default=0.0)
    parser.add_argument("--hold", nargs="*", default=[])
    parser.add_argument("--source")
    parser.add_argument("--drain-s", type=float, default=agent.DRAIN_S)
    options = parser.parse_args()
    agent.DRAIN_S = options.drain_s
    bundle = Bundle.open(options.bundle)
    with ExitStack() as stack:
        router = stack.enter_context(Router(options.bind))
        frames = None
        if options.source is not None:
            frames = stack.enter_context(open_frame_buffer(options.source, DEFAULT_FPS))

        def report(event: str) -> None:
            said = {"event": event, "device": options.device, "address": router.address}
            print(json.dumps(said), flush=True)

        source = LoadableBundle(
            bundle=bundle,
            assignment=bundle.assignment(options.device),
            load=lambda: OddRuntime(options, len(bundle.manifest.labels)),
        )
        odd = agent.Agent(source, router, frames=frames, report=report)
        signal.signal(signal.SIGTERM, lambda *_: odd.stop())
        report("LISTENING")
        odd.serve()


if __name__ == "__main__":
    main()
