"""The real fleets of three agents that the simulator is held against, and what they are asked.

Both are on loopback of one machine. Agents that compute take its cores from each other and from the
client: how long one of them takes depends on what the others do. Agents that wait take next to none
of it, as devices with processors of their own: each waits as long as it was told, and everything
else about it is real.
"""

import shutil
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks.harness.serving_fleet import served, stub_fleet
from mdp.testing.agents import AgentFleet
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


def fleet_of(agents: str) -> AbstractContextManager[AgentFleet]:
    """Three running agents that compute or wait."""
    if agents == COMPUTING:
        return served(partial(shutil.copytree, BUNDLE), "--threads", 1)
    each = {f"device-{k}": ("--compute-ms", ms) for k, ms in enumerate(MEDIANS_MS)}
    return stub_fleet(len(MEDIANS_MS), "--sigma", SIGMA, side=SIDE, each=each)
