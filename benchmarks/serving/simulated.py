"""Whole answers as the simulator predicts them, beside three real agents with the same arrivals.

    python -m benchmarks.serving --only simulated

Three stub agents wait 5 ms for each picture of 224 pixels. The simulator is given the computing
times, round trips and the client's own time of calls that come one by one and, from a loop of 16
callers, what an agent needs between two requests. It is told nothing of the loads that it predicts:
calls at random moments, at the same ones really and simulated, as a share of what fits.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.serving.load import (
    PLENTY_MS,
    SIDE,
    TIGHT_MS,
    WORK_MS,
    Tally,
    at_random,
    connect_clients,
    loop,
    waiting_agents,
)
from mdp import AsyncClient, Prediction
from mdp.cli.bench import noise_picture
from mdp.testing.agents import AgentFleet
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Load, MeasuredSeconds, Scenario
from partitioner.simulation.setup import LATE_S

#: Calls as a share of what fits.
SHARES = (0.7, 0.9, 1.2, 2.0)
CALLERS, SINGLE = 16, 300
BLOCKS, SECONDS = 5, 4.0


async def one_by_one(client: AsyncClient, calls: int) -> list[Prediction]:
    picture = noise_picture(SIDE)
    return [await client.classify(picture, deadline_ms=PLENTY_MS) for _ in range(calls)]


def scenario_of(answers: Sequence[Prediction], capacity: float) -> Scenario:
    """Devices with the times of these answers, of which so many a second fit."""
    compute_s: dict[int, list[float]] = defaultdict(list)
    trips_s: dict[int, list[float]] = defaultdict(list)
    before_s = []
    for answer in answers:
        for member in answer.members:
            compute_s[member.k].append(member.compute_ms / 1e3)
            trips_s[member.k].append(member.network_ms / 1e3)
        longest_ms = max(member.spent_ms for member in answer.members)
        before_s.append(max(0.0, answer.latency_ms - longest_ms - CLIENT_FUSE_MS) / 1e3)
    return Scenario(
        devices=tuple(
            DeviceModel(
                name=f"device-{k}",
                k=k,
                compute=MeasuredSeconds(values_s=tuple(compute_s[k])),
                delay=MeasuredSeconds(values_s=tuple(trips_s[k])),
                waiting_bytes=SIDE * SIDE * 3,
                turnaround_s=max(1e-4, 1 / capacity - float(np.mean(compute_s[k]))),
            )
            for k in sorted(compute_s)
        ),
        load=Load(requests=1),
        deadline_ms=TIGHT_MS,
        before=MeasuredSeconds(values_s=tuple(before_s)),
        after_s=CLIENT_FUSE_MS / 1e3,
        late_s=LATE_S,
    )


def whole_of(scenario: Scenario) -> int:
    """Simulated answers with every member."""
    trace = simulate(scenario)
    answered = np.array(trace.subset) != trace.subsets.get((), -1)
    return int((answered & (np.array(trace.partial) == 0)).sum())


async def measure(fleet: AgentFleet, *, quick: bool) -> list[dict[str, Any]]:
    single, blocks, seconds = (30, 1, 0.5) if quick else (SINGLE, BLOCKS, SECONDS)
    async with AsyncExitStack() as stack:
        clients = await connect_clients(stack, fleet, 1)
        answers: list[Prediction] = []
        real: dict[float, list[tuple[int, int, float]]] = defaultdict(list)
        rates: list[float] = []
        for block in range(blocks):
            # What the simulator is given drifts with the machine as the rest does.
            answers += await one_by_one(clients[0], single // blocks)
            tally = Tally()
            await loop(clients, CALLERS, seconds, PLENTY_MS, tally)
            rates.append(tally.row(1)["whole_per_s"])
            for share in SHARES:
                rate = share * float(np.median(rates))
                calls, tally = max(1, round(rate * seconds)), Tally()
                await at_random(clients, rate, calls, TIGHT_MS, block, tally)
                real[share].append((calls, sum(tally.whole.values()), rate))
    base = scenario_of([each for each in answers if not each.partial], float(np.median(rates)))
    rows = []
    for share, found in real.items():
        predicted = [
            whole_of(
                replace(base, seed=block, load=Load(requests=calls, clients=1, rate_per_s=rate))
            )
            for block, (calls, _, rate) in enumerate(found)
        ]
        whole = sum(each for _, each, _ in found)
        rows.append(
            {
                "share": share,
                "calls": sum(calls for calls, _, _ in found),
                "measured": whole,
                "simulated": sum(predicted),
                "error": sum(predicted) / whole - 1 if whole else 0.0,
            }
        )
    return rows


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    with waiting_agents((WORK_MS,) * 3) as fleet:
        yield from asyncio.run(measure(fleet, quick=quick))


COLUMNS = (
    ("calls, of what fits", "{share:.1f}"),
    ("calls", "{calls}"),
    ("whole answers, measured", "{measured}"),
    ("simulated", "{simulated}"),
    ("error", "{error:+.1%}"),
)


def main() -> None:
    from benchmarks.harness.options import arguments
    from benchmarks.harness.tables import table

    asked = arguments(__doc__, "quick")
    started_s = time.monotonic()
    print(table(list(run(quick=asked.quick)), *COLUMNS), f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
