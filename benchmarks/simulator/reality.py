"""Three real agents under a load and a deadline, against their simulation.

Fleets are on loopback of one machine. Agents that compute share its cores with each other and with
the client, so that their times depend on each other. Agents that wait take next to none of them, as
devices with processors of their own; all else about them is real.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.serving_fleet import served, stub_fleet
from benchmarks.simulator.page import reality_table
from mdp import AsyncClient
from mdp.cli.bench import noise_picture
from mdp.errors import InferenceError
from mdp.formats.bundle import Bundle
from mdp.requests.deadline import reserve_s
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import (
    DeviceModel,
    Load,
    Measured,
    RandomStreams,
    SampleStream,
    Scenario,
    exponential,
)
from partitioner.simulation.setup import LATE_S

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

COMPUTING, WAITING = "computing", "waiting"
BUNDLE = Path(__file__).resolve().parents[2] / "examples" / "bundles" / "cifar10"
#: Times of the agents that wait: log-normal around these medians, drawn for each request.
MEDIANS_MS = (12.0, 18.0, 25.0)
SIGMA = 0.15
#: Pixels of a side of their crops.
SIDE = 64
#: Equally likely values that represent a distribution.
_VALUES = 1000
PLENTY_MS = 1000.0
#: An agent encodes and sends a reply before the next request (docs/lab-log.md).
TURNAROUND_S = 0.0001
#: Percentiles of the usual latency at which tight deadlines decide. The first one's calls measure
#: how late the client is woken; the others are simulated.
CALIBRATED, COMPARED = 75, (60, 90)
#: Simulated requests of callers that wait for each other; random ones are as many as really.
SIMULATED = 50_000


def loads(agents: str, requests: int) -> dict[str, Load]:
    """Loads by name: a caller, three, and two random rates.

    The slowest of the agents that wait is 40 and 81 % busy at these.
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


class End(NamedTuple):
    """A call's latency, and whether its deadline cut it."""

    latency_ms: float
    cut: bool


def woken_late_s(ends: Sequence[End], deadline_ms: float) -> tuple[float, ...]:
    """Distribution of the client's wake-up after the moment to decide; empty if no call was cut.

    A call that was cut shows it by its latency. One that the last reply ended after that moment
    censors it: the wake-up would have come later still. Hence the product-limit estimate of Kaplan
    and Meier (1958).
    """
    decided_ms = deadline_ms - reserve_s(deadline_ms) * 1e3 + CLIENT_FUSE_MS
    after = sorted(
        (max(0.0, end.latency_ms - decided_ms), not end.cut)
        for end in ends
        if end.cut or end.latency_ms > decided_ms
    )
    late_ms, upto, left = [], [], 1.0
    for place, (ms, by_itself) in enumerate(after):
        if not by_itself:
            left -= left / (len(after) - place)
            late_ms.append(ms)
            upto.append(1.0 - left)
    if not late_ms:
        return ()
    # The latest counts as the maximum.
    upto[-1] = 1.0
    quantiles = (np.arange(_VALUES) + 0.5) / _VALUES
    return tuple((np.array(late_ms)[np.searchsorted(upto, quantiles)] / 1e3).tolist())


class Seen(list[tuple[Prediction | InferenceError, float]]):
    """Outcomes of calls, with their milliseconds by the caller's clock."""

    @property
    def answers(self) -> list[Prediction]:
        return [outcome for outcome, _ in self if isinstance(outcome, Prediction)]

    @property
    def ends(self) -> list[End]:
        return [
            End(outcome.latency_ms, "late" in outcome.missing.values())
            if isinstance(outcome, Prediction)
            else End(took_ms, "late" in outcome.outcomes.values())
            for outcome, took_ms in self
        ]


async def ask(client: AsyncClient, picture: Any, deadline_ms: float, seen: Seen) -> None:
    outcome: Prediction | InferenceError
    started_s = time.monotonic()
    try:
        outcome = await client.classify(picture, deadline_ms=deadline_ms)
    except InferenceError as error:
        outcome = error
    seen.append((outcome, (time.monotonic() - started_s) * 1e3))


def gaps(seed: int) -> SampleStream:
    """Between requests that come at random, of mean 1: those that a simulation of this seed has."""
    return SampleStream(RandomStreams(seed), "", "arrivals", exponential)


async def at_random(
    client: AsyncClient, rate_per_s: float, requests: int, deadline_ms: float, seed: int, seen: Seen
) -> None:
    """Requests as a Poisson process (open loop)."""
    picture, gap = noise_picture(64), gaps(seed)
    calls, due_s = set(), time.monotonic()
    for _ in range(requests):
        due_s += gap.next() / rate_per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        call = asyncio.create_task(ask(client, picture, deadline_ms, seen))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await asyncio.gather(*calls)


async def one_by_one(
    client: AsyncClient, requests: int, deadline_ms: float, clients: int, seen: Seen
) -> None:
    """Callers that each wait for an answer before the next request (closed loop)."""
    picture = noise_picture(64)
    left = iter(range(requests))

    async def caller() -> None:
        for _ in left:
            await ask(client, picture, deadline_ms, seen)

    await asyncio.gather(*(caller() for _ in range(clients)))


async def measure(
    fleet: Path, load: Load, deadlines_ms: Sequence[float], blocks: int
) -> dict[float, Seen]:
    """One load under each deadline, in turns; the first block warms up."""
    seen: dict[float, Seen] = defaultdict(Seen)
    per_block = load.requests // blocks
    async with AsyncClient.connect(fleet, timeout_s=10.0) as client:
        for block in range(blocks + 1):
            for deadline_ms in deadlines_ms:
                into = seen[deadline_ms] if block else Seen()
                count = per_block if block else min(50, per_block)
                if load.rate_per_s is None:
                    await one_by_one(client, count, deadline_ms, load.clients, into)
                else:
                    rate = load.rate_per_s
                    await at_random(client, rate, count, deadline_ms, block, into)
    return dict(seen)


def scenario_of(bundle: Bundle, answers: Sequence[Prediction], late_s: Sequence[float]) -> Scenario:
    """A fleet with the computing times and round trips of these answers, and such wake-ups.

    Times are drawn independently, as those of real devices are.
    """
    whole = [answer for answer in answers if not answer.partial]
    assert whole, f"no answer of all members within {PLENTY_MS:g} ms: the machine is too busy"
    compute_s: dict[str, list[float]] = defaultdict(list)
    trips_s: dict[str, list[float]] = defaultdict(list)
    before_s = []
    for answer in whole:
        longest_ms = 0.0
        for member in answer.members:
            compute_s[member.device].append(member.compute_ms / 1e3)
            trips_s[member.device].append(member.network_ms / 1e3)
            longest_ms = max(longest_ms, member.queue_ms + member.compute_ms + member.network_ms)
        before_s.append(max(0.0, answer.latency_ms - longest_ms - CLIENT_FUSE_MS) / 1e3)
    return Scenario(
        devices=tuple(
            DeviceModel(
                name=a.device,
                k=a.k,
                turnaround_s=TURNAROUND_S,
                compute=Measured(values_s=tuple(compute_s[a.device])),
                delay=Measured(values_s=tuple(trips_s[a.device])),
            )
            for a in bundle.manifest.plan.assignments
        ),
        load=Load(requests=1),
        deadline_ms=PLENTY_MS,
        before=Measured(values_s=tuple(before_s)),
        after_s=CLIENT_FUSE_MS / 1e3,
        late_s=Measured(values_s=tuple(late_s)),
    )


def played(scenario: Scenario, blocks: int) -> tuple[Floats, Flags, Flags]:
    """Latency in ms of each request, whether it was answered, and by all members.

    Random requests are simulated in the real blocks with the real arrivals: the 99th percentile of
    2,000 requests to a device that is 81 % busy differs by a sixth between Poisson processes, and
    by 7 % between two runs of one. Callers that wait have `SIMULATED` requests.
    """
    load = scenario.load
    if load.rate_per_s is None:
        runs = [replace(scenario, load=replace(load, requests=SIMULATED))]
    else:
        block = replace(load, requests=load.requests // blocks)
        runs = [replace(scenario, seed=1 + number, load=block) for number in range(blocks)]
    parts = []
    for run in runs:
        trace = simulate(run)
        answered = np.array(trace.subset) != trace.subsets.get((), -1)
        complete = answered & (np.array(trace.partial) == 0)
        parts.append((np.array(trace.latencies_s) * 1e3, answered, complete))
    latencies_ms, answered, complete = map(np.concatenate, zip(*parts, strict=True))
    return latencies_ms, answered, complete


def compared(scenario: Scenario, blocks: int, real: Seen) -> dict[str, Any]:
    """One deadline: measured and simulated values, and the error."""
    simulated_ms, answered, complete = played(scenario, blocks)
    row: dict[str, Any] = {"deadline_ms": scenario.deadline_ms, "requests": len(real)}
    answers = real.answers
    latencies_ms = [answer.latency_ms for answer in answers]
    for point in (50, 90, 99):
        row[f"p{point}"] = pair(
            percentile(latencies_ms, point), percentile(simulated_ms[answered], point)
        )
    row["answered"] = pair(len(answers) / len(real), float(answered.mean()))
    whole = sum(not answer.partial for answer in answers)
    row["complete"] = pair(whole / len(real), float(complete.mean()))
    return row


def percentile(values: Sequence[float] | Floats, point: float) -> float:
    return float(np.percentile(values, point)) if len(values) else 0.0


def pair(measured: float, simulated: float) -> dict[str, float]:
    """Both, and the simulated value's relative error."""
    error = simulated / measured - 1 if measured else 0.0
    return {"measured": measured, "simulated": simulated, "error": error}


def reality(
    agents: str, requests: int, blocks: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every load of such a fleet under every deadline, and each load's late wake-ups."""
    rows, late = [], []
    with fleet_of(agents) as fleet:
        path, bundle = fleet.folder / "fleet.toml", Bundle.open(fleet.bundle)
        for load_name, load in loads(agents, requests).items():
            first = asyncio.run(measure(path, replace(load, requests=200), [PLENTY_MS], 1))
            usual_ms = np.percentile(
                [answer.latency_ms for answer in first[PLENTY_MS].answers], [CALIBRATED, *COMPARED]
            )
            # The client decides 2 ms before a short deadline, or after half of a very short one.
            tight = [float(round(ms + min(2.0, ms), 2)) for ms in usual_ms]
            seen = asyncio.run(measure(path, load, [PLENTY_MS, *tight], blocks))
            ends = seen.pop(tight[0]).ends
            late_s = woken_late_s(ends, tight[0]) or (LATE_S,)
            cut = sum(end.cut for end in ends)
            points = {f"p{p}": float(np.percentile(late_s, p)) * 1e3 for p in (50, 90, 99)}
            late.append({"load": load_name, "deadline_ms": tight[0], "cut": cut, **points})
            base = scenario_of(bundle, seen[PLENTY_MS].answers, late_s)
            for deadline_ms, real in seen.items():
                scenario = replace(base, load=load, deadline_ms=deadline_ms)
                rows.append({"load": load_name, **compared(scenario, blocks, real)})
                print(reality_table(rows[-1:]).splitlines()[-1], flush=True)
    return rows, late
