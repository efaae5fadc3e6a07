"""A real agent whose model computes nothing, or waits instead.

    python -m benchmarks.harness.stub_agent --bundle bundle/ --device device-0 --work-ms 5

A `devices.agent.server.Agent` with a ROUTER, as in `mdp-agent run`; only the runtimes differ. With
`--rungs 8:0.78,4:0.765,2:0.74` it has three: milliseconds, and the share of pictures that each is
right on, by `played_label`; of a batch of n pictures half of the time is fixed.
Events are those of `mdp-agent run --json`. Ends on SIGTERM.
"""

import json
import signal
import time
from functools import partial
from itertools import cycle, repeat
from pathlib import Path

import numpy as np

from benchmarks.harness.options import arguments
from devices.access.watch import agent_keys
from devices.agent.bundles import LoadableBundle
from devices.agent.server import Agent
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import Runtime
from mdp.transport import Router

#: Share of a picture's time that a batch takes once, where there are rungs.
FIXED = 0.5


def played_picture(label: int, place: float, side: int) -> Pixels:
    """A picture `[side, side, 3]` of class `label`; the higher its `place`, 0 to 1, the harder."""
    pixels = np.zeros((side, side, 3), dtype=np.uint8)
    pixels[...] = label, round(255 * place), 0
    return pixels


class PlayedRung:
    """Waits as long as a rung would compute, and is right on its share of `played_picture`."""

    provider = "StubExecutionProvider"
    fallback = False

    def __init__(self, num_classes: int, work_s: float, right: float) -> None:
        self._classes, self._work_s, self._right = num_classes, work_s, right
        self._runs = 0

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, num_classes]`."""
        time.sleep(self._work_s * (FIXED + (1 - FIXED) * len(pixels)))
        labels, places = pixels[:, 0, 0, 0].astype(int), pixels[:, 0, 0, 1] / 255
        labels = (labels + (places > self._right)) % self._classes
        # A shift of all changes no answer, and a stuck output has none.
        self._runs += 1
        logits = np.full((len(pixels), self._classes), 1e-3 * (self._runs % 8), dtype=np.float32)
        logits[np.arange(len(pixels)), labels] += 4
        return Contribution(logits, logits)


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
        __doc__, bundle=Path, device=str, bind="tcp://127.0.0.1:0", key="", clients="", work_ms=0.0,
        rungs="",
    )  # fmt: skip
    bundle = Bundle.open(asked.bundle)
    files = (Path(file) if file else None for file in (asked.key, asked.clients))
    access = agent_keys(asked.bind, *files, insecure=False)
    classes = len(bundle.manifest.labels)
    runtimes: list[Runtime] = [StubRuntime(classes, asked.work_ms / 1e3)]
    if asked.rungs:
        told = [rung.split(":") for rung in asked.rungs.split(",")]
        runtimes = [PlayedRung(classes, float(ms) / 1e3, float(right)) for ms, right in told]
    top, *lower = [partial(next, repeat(runtime)) for runtime in runtimes]
    with Router(asked.bind, keys=access and access[0]) as router:

        def report(event: str) -> None:
            line = {"event": event, "device": asked.device, "address": router.address}
            print(json.dumps(line), flush=True)

        report("LISTENING")
        assignment = bundle.assignment(asked.device)
        # An agent of before that, in turns with this one, takes no rungs.
        rungs = {"load_lower": lower} if lower else {}
        source = LoadableBundle(
            bundle=bundle, assignment=assignment, load=top, batch=assignment.batch, **rungs
        )
        agent = Agent(source, router, report=report)
        signal.signal(signal.SIGTERM, lambda *_: agent.stop())
        agent.serve()


if __name__ == "__main__":
    main()
