"""Both builds of the simulator do the same: `make test-compiled`.

    python -m benchmarks.simulator.traces keep FILE       interpreted
    python -m benchmarks.simulator.traces compare FILE    compiled

Every scenario's trace is kept by the one and has to be that of the other, to the last digit.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import compiled
from benchmarks.simulator.__main__ import fleets
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import (
    DeviceModel,
    Jittered,
    Load,
    LogNormal,
    Measured,
    Scenario,
    SlowSpells,
)

DRAWN = 100


def drawn(seed: int) -> Scenario:
    """Some fleet and load, with everything that a scenario may have in one or another."""
    choose: Callable[[list[Any]], Any] = random.Random(seed).choice
    measured = Measured(values_s=(0.001, 0.004, 0.030), together=choose(["", "answers"]))
    devices = tuple(
        DeviceModel(
            name=f"d{k}/{number}",
            k=k,
            compute=choose([LogNormal(median_s=0.02, sigma=0.5), measured]),
            delay=choose([Jittered(round_trip_s=0.002, jitter_s=0.001), measured]),
            request_bytes=1000.0,
            bandwidth_bps=choose([1e6, math.inf]),
            turnaround_s=choose([0.0, 0.003]),
            mean_up_s=choose([math.inf, 0.5, 5.0]),
            mean_down_s=0.2,
            loss=choose([0.0, 0.1]),
            slow=choose([None, SlowSpells(every_s=0.5, lasts_s=0.2, factor=8.0)]),
        )
        for k in range(choose([1, 2, 4]))
        for number in range(choose([1, 2, 3]))
    )
    load = Load(
        requests=300,
        clients=choose([1, 4]),
        rate_per_s=choose([None, 40.0, 200.0]),
        think_s=choose([0.0, 0.01]),
    )
    return Scenario(
        devices=devices,
        load=load,
        deadline_ms=choose([15.0, 60.0, 300.0]),
        seed=seed,
        hedge_after_s=choose([None, 0.01]),
        hedge_share=choose([0.05, 1.0]),
        lost=frozenset(choose([[], [devices[0].name]])),
        before=LogNormal(median_s=0.0002),
        after_s=0.0001,
        late_s=choose([0.001, LogNormal(median_s=0.001, sigma=0.3), measured]),
        client_bps=choose([math.inf, 2e6]),
        detect_s=choose([0.05, 3.0]),
        reconnect_s=0.1,
    )


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """The fleets whose speed is measured, with fewer requests, and many small ones."""
    for name, scenario in fleets():
        requests = scenario.load.requests // 50
        yield name, replace(scenario, load=replace(scenario.load, requests=requests))
    for seed in range(DRAWN):
        yield f"drawn {seed}", drawn(seed)


def traces() -> dict[str, Any]:
    """Scenario -> its whole trace, as JSON gives it back: every digit of every number."""
    found = {}
    for name, scenario in scenarios():
        trace = asdict(simulate(scenario))
        trace["subsets"] = list(trace["subsets"].items())
        found[name] = json.loads(json.dumps(trace, default=list))
    return found


def main() -> None:
    """Keep this build's traces, or compare them with those that were kept."""
    command, file = sys.argv[1], Path(sys.argv[2])
    if compiled() != (command == "compare"):
        sys.exit("expected an interpreted build to keep and a compiled one to compare")
    found = traces()
    if command == "keep":
        file.write_text(json.dumps(found))
        return
    kept = json.loads(file.read_text())
    other = [name for name in found if found[name] != kept[name]]
    if other or kept.keys() != found.keys():
        sys.exit(f"other traces when compiled: {', '.join(other)}")
    total = sum(trace["asks"] for trace in found.values())
    print(f"{len(found)} scenarios, {total:,} member-requests: the same traces in both builds")


if __name__ == "__main__":
    main()
