"""Benchmarks with real agents run; their figures are not judged."""

import asyncio
from dataclasses import replace

from benchmarks.serving import overhead
from benchmarks.simulator import reality
from mdp.formats.bundle import Bundle
from partitioner.simulation.models import Load


def test_a_call_is_compared_with_bare_exchanges_under_keys() -> None:
    row = overhead.measure(overhead.STUB_KEYS, 2, calls=2)
    assert row["requests"] == 2 * overhead.ROUNDS
    assert min(ms for of in row["ms"].values() for ms in of.values()) > 0


def test_agents_that_wait_are_compared_with_their_simulation() -> None:
    with reality.fleet_of(reality.WAITING) as fleet:
        path, bundle = fleet.folder / "fleet.toml", Bundle.open(fleet.bundle)
        load = Load(requests=8, rate_per_s=20.0)
        seen = asyncio.run(reality.measure(path, load, [reality.PLENTY_MS], 1))[reality.PLENTY_MS]
        scenario = reality.scenario_of(bundle, seen.answers, [0.001])
    row = reality.compared(replace(scenario, load=load), 1, seen)
    assert row["requests"] == 8
    # Log-normal times around 25 ms of the slowest agent.
    assert row["p50"]["measured"] > 15 < row["p50"]["simulated"]
