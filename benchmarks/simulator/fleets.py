"""The real fleets of three agents that the simulator is held against, and what they are asked.

Both are on loopback of one machine. Agents that compute take its cores from each other and from the
client: how long one of them takes depends on what the others do. Agents that wait take next to none
of it, as devices with processors of their own: each waits as long as it was told, and everything
else about it is real.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.harness.serving_fleet import ServedFleet, colour_bundle, running, served
from mdp.formats.bundle import Bundle
from partitioner.simulation.models import Load

COMPUTING, WAITING = "computing", "waiting"
BUNDLE = Path(__file__).resolve().parents[2] / "examples" / "bundles" / "cifar10"
#: What the agents that wait take, drawn anew for each request: log-normal around these medians.
MEDIANS_MS = (12.0, 18.0, 25.0)
SIGMA = 0.15
#: Pixels of a side of what they are sent.
SIDE = 64


def loads(agents: str, requests: int) -> dict[str, Load]:
    """What a fleet is asked, by name: a caller, three, and at random at two rates.

    The slowest of the agents that wait is 40 and 81 % busy at theirs.
    """
    rates = {COMPUTING: (50, 150), WAITING: (16, 32)}[agents]
    return {
        "one caller": Load(requests=requests),
        "three callers": Load(requests=requests, clients=3),
        **{f"{rate} a second": Load(requests=requests, rate_per_s=rate) for rate in rates},
    }


def fleet_of(agents: str, folder: Path) -> AbstractContextManager[ServedFleet]:
    """Three running agents that compute or wait; their files are put into `folder`."""
    make: dict[str, Callable[[Path], AbstractContextManager[ServedFleet]]] = {
        COMPUTING: lambda folder: served(Bundle.open(BUNDLE), folder, "--threads", 1),
        WAITING: waiting,
    }
    return make[agents](folder)


@contextmanager
def waiting(folder: Path) -> Iterator[ServedFleet]:
    """A stub agent, in a process of its own, for each of `MEDIANS_MS`."""
    bundle = colour_bundle(folder, len(MEDIANS_MS), SIDE)
    module = [sys.executable, "-m", "benchmarks.harness.stub_agent", "--bundle", str(bundle.path)]
    commands: dict[tuple[str, ...], list[str]] = {
        (a.device,): [
            *module, "--device", a.device, "--compute-ms", str(median_ms), "--sigma", str(SIGMA)
        ]
        for a, median_ms in zip(bundle.manifest.plan.assignments, MEDIANS_MS, strict=True)
    }  # fmt: skip
    with running(bundle, folder, commands) as fleet:
        yield fleet
