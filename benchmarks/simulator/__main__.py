"""The simulator's speed, and its error against real fleets of three agents.

    python -m benchmarks.simulator                    # all of it, about 27 minutes
    python -m benchmarks.simulator --only waiting --quick

    computing   5 min  three `mdp-agent` on loopback that serve examples/bundles/cifar10, one thread
                       each: they and the client take the machine's cores from each other
    waiting    21 min  three real agents on loopback which wait for log-normal times instead of
                       computing, as devices with processors of their own
    speed       1 min  requests to devices per second of the processor, in one process

Each load runs without a deadline that matters and with tight ones, block by block in turns. The
simulator is given the computing times and round trips of the answers of the first, and the client's
late wake-ups from calls that another tight deadline cut. It predicts percentiles of the latency and
shares of complete answers, also under the deadlines that it was given nothing about. Random
requests arrive at the same moments really and simulated.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.simulator.page import PAGE
from benchmarks.simulator.reality import COMPUTING, WAITING, reality
from mdp.files import write_json
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import (
    DeviceModel,
    Jittered,
    Load,
    LogNormal,
    Scenario,
)

#: Of each load under each deadline.
REQUESTS, BLOCKS = 2000, 6
SPEED = "speed"


def fleets() -> Iterator[tuple[str, Scenario]]:
    """Fleets whose simulation is timed, from one device to ten thousand."""

    def devices(members: int, replicas: int, **more: Any) -> tuple[DeviceModel, ...]:
        return tuple(
            DeviceModel(
                name=f"d{k}/{number}", k=k, request_bytes=50_000, reply_bytes=8_000,
                compute=LogNormal(median_s=0.004 + 0.001 * (k % 5), sigma=0.2),
                delay=Jittered(round_trip_s=0.001, jitter_s=0.0001),
                bandwidth_bps=9.4e8, turnaround_s=0.0001, **more,
            )
            for k in range(members)
            for number in range(replicas)
        )  # fmt: skip

    def scenario(
        of: tuple[DeviceModel, ...], requests: int, clients: int = 1, rate: float | None = None
    ) -> Scenario:
        load = Load(requests=requests, clients=clients, rate_per_s=rate)
        return Scenario(devices=of, load=load, deadline_ms=50.0)

    failing = {"mean_up_s": 500.0, "mean_down_s": 10.0, "loss": 0.001}
    crowd = "10,000 devices that fail, 16 members, 500 clients, hedged"
    yield from {
        "1 device, 1 client": scenario(devices(1, 1), 200_000),
        "3 devices, 1 client": scenario(devices(3, 1), 100_000),
        "3 devices, 100 clients, 80 a second": scenario(devices(3, 1), 100_000, 100, 80.0),
        "16 devices, 10 clients, 60 a second": scenario(devices(16, 1), 20_000, 10, 60.0),
        "9,999 devices that fail, 3,333 clients": scenario(
            devices(3, 3333, **failing), 200_000, 3333, 20_000.0
        ),
        crowd: replace(
            scenario(devices(16, 625, **failing), 40_000, 500, 4_000.0), hedge_after_s=0.02
        ),
    }.items()


def speed(most: int | None) -> list[dict[str, Any]]:
    """Member-requests a second of the processor, for each of the fleets, best of two."""
    rows = []
    for name, scenario in islice(fleets(), most):
        best = 0.0
        for _ in range(2):
            started_s = time.process_time()
            trace = simulate(scenario)
            took_s = time.process_time() - started_s
            best = max(best, trace.asks / took_s)
        rows.append({"fleet": name, "member_requests": trace.asks, "per_s": round(best)})
        print(f"{name:<60} {trace.asks:>9,} member-requests {best:>9,.0f} a second", flush=True)
    return rows


def main() -> None:
    asked = arguments(__doc__, "quick", only=(COMPUTING, WAITING, SPEED))
    requests, blocks, most = (60, 1, 1) if asked.quick else (REQUESTS, BLOCKS, None)
    for part in asked.only:
        new: dict[str, Any] = {"machine": describe_machine()}
        if part == SPEED:
            new[SPEED] = speed(most)
        else:
            new["reality"], new["woken_late"] = reality(part, requests, blocks)
        if not asked.quick:
            write_json(RESULTS / f"simulator-{part}.json", new)
    if not asked.quick:
        PAGE.write()


if __name__ == "__main__":
    main()
