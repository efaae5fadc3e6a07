"""The real fleets of three agents that the simulator is held against, and what they are asked.

All are on loopback of one machine. Agents that compute take its cores from each other and from the
client: how long one of them takes depends on what the others do. Agents that wait take next to none
of it, as devices with processors of their own: each waits as long as it was told, and everything
else about it is real. Where there are cores enough, agents compute on cores of their own.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec.structs import replace

from benchmarks.serving_fleet import ServedFleet, colour_bundle, running, served
from mdp.bench import noise_picture
from mdp.bundle import Bundle
from mdp.crop import Picture
from mdp.errors import InputError
from mdp.plan import SubModelSpec
from partitioner.simulation.models import Load

COMPUTING, WAITING, OWN_CORES = "computing", "waiting", "own-cores"
BUNDLE = Path(__file__).resolve().parent.parent / "examples" / "bundles" / "cifar10"
#: What the agents that wait take, drawn anew for each request: log-normal around these medians.
MEDIANS_MS = (12.0, 18.0, 25.0)
SIGMA = 0.15
#: Pixels of a side of what they are sent.
SIDE = 64
#: What agents on cores of their own compute: 4 to 7 ms on one core of a Xeon of 2023. The pictures
#: have the size of their crops.
OWN_SIDE = 192
SUB_MODELS = tuple(
    SubModelSpec(
        image_size=OWN_SIDE, patch_size=16, embed_dim=192, depth=depth, num_heads=3, mlp_ratio=4.0
    )
    for depth in (3, 4, 5)
)
#: Cores of each of them, and of the client at least.
CORES = 2


def loads(agents: str, requests: int) -> dict[str, Load]:
    """What a fleet is asked, by name: a caller, three, and at random at two rates.

    The slowest of the agents that wait, or that compute 7 ms, is 40 and 80 % busy at theirs.
    """
    rates = {COMPUTING: (50, 150), WAITING: (16, 32), OWN_CORES: (55, 110)}[agents]
    return {
        "one caller": Load(requests=requests),
        "three callers": Load(requests=requests, clients=3),
        **{f"{rate} a second": Load(requests=requests, rate_per_s=rate) for rate in rates},
    }


def picture_of(agents: str) -> Picture:
    """What a fleet is shown."""
    return noise_picture(OWN_SIDE if agents == OWN_CORES else SIDE)


def fleet_of(agents: str, folder: Path) -> AbstractContextManager[ServedFleet]:
    """Three running agents that compute or wait; their files are put into `folder`.

    Raises InputError if there are too few cores for agents that want their own.
    """
    make: dict[str, Callable[[Path], AbstractContextManager[ServedFleet]]] = {
        COMPUTING: lambda folder: served(Bundle.open(BUNDLE), folder, "--threads", 1),
        WAITING: waiting,
        OWN_CORES: on_own_cores,
    }
    return make[agents](folder)


@contextmanager
def on_own_cores(folder: Path) -> Iterator[ServedFleet]:
    """An `mdp-agent` for each of `SUB_MODELS`, with random weights; this process takes the rest."""
    from partitioner.export import export_untrained
    from partitioner.progress import Progress

    here = sorted(os.sched_getaffinity(0))
    if len(here) < CORES * (len(SUB_MODELS) + 1):
        raise InputError(f"{OWN_CORES}: expected 8 cores, found {len(here)}")
    plan = Bundle.open(BUNDLE).manifest.plan
    assignments = [
        replace(a, submodel=spec) for a, spec in zip(plan.assignments, SUB_MODELS, strict=True)
    ]
    labels = [f"class-{number}" for number in range(100)]
    export_untrained(
        replace(plan, assignments=assignments), labels, folder / "bundle", OWN_CORES, Progress()
    )
    cores = {
        a.device: f"{here[k * CORES]}-{here[(k + 1) * CORES - 1]}"
        for k, a in enumerate(assignments)
    }
    os.sched_setaffinity(0, here[len(cores) * CORES :])
    try:
        with served(Bundle.open(folder / "bundle"), folder, "--threads", 1, cores=cores) as fleet:
            yield fleet
    finally:
        os.sched_setaffinity(0, here)


@contextmanager
def waiting(folder: Path) -> Iterator[ServedFleet]:
    """A stub agent, in a process of its own, for each of `MEDIANS_MS`."""
    bundle = colour_bundle(folder, len(MEDIANS_MS), SIDE)
    module = [sys.executable, "-m", "benchmarks.stub_agent", "--bundle", str(bundle.path)]
    commands = {
        (a.device,): [
            *module, "--device", a.device, "--compute-ms", str(median_ms), "--sigma", str(SIGMA)
        ]
        for a, median_ms in zip(bundle.manifest.plan.assignments, MEDIANS_MS, strict=True)
    }  # fmt: skip
    with running(bundle, folder, commands) as fleet:
        yield fleet
