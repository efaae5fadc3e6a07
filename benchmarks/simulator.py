"""How fast the simulator is, and how near to a real fleet of three agents.

    python -m benchmarks.simulator

Speed is requests to devices per second of the processor, in one process. For reality, three
`mdp-agent` processes on loopback serve examples/bundles/cifar10, one thread each. Each load is run
without a deadline that matters and with tight ones, block by block in turns. What the simulator is
told are the computing times and round trips of the answers of the first, and how late the client is
woken at a deadline, from calls that were cut by one with which nothing is compared. What it has to
find are percentiles of the latency and the shares of complete and partial answers, also under the
deadlines that it was told nothing about.
"""

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.serving_fleet import served
from benchmarks.simulator_late import End, woken_late_s
from benchmarks.simulator_picture import draw, markdown, put_table
from mdp import AsyncClient
from mdp.bench import noise_picture
from mdp.bundle import Bundle
from mdp.errors import InferenceError
from mdp.files import write_bytes, write_json
from mdp.prediction import Prediction
from mdp.session import LATE
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
from partitioner.simulation.setup import Assumptions
from partitioner.spread import CLIENT_FUSE_MS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "simulator.json"
PAGE, PICTURE = ROOT / "docs" / "simulation.md", ROOT / "docs" / "simulation.svg"
BUNDLE = ROOT / "examples" / "bundles" / "cifar10"
PLENTY_MS = 1000.0
#: An agent encodes and sends a reply before it goes on (docs/lab-log.md, what a call costs).
TURNAROUND_S = 0.0001
#: Shares of the usual calls, in percent, that come before the moment to decide. Under the first
#: deadline it is measured how late the client is woken; the others are simulated.
CALIBRATED, COMPARED = 75, (60, 90)
SIMULATED = 50_000


@dataclass(slots=True)
class Seen:
    """What one load under one deadline showed."""

    latencies_ms: list[float] = field(default_factory=list)
    complete: int = 0
    requests: int = 0
    answers: list[Prediction] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def take(self, answer: Prediction | InferenceError, took_ms: float) -> None:
        """Count one call's end, after so long by the caller's clock."""
        self.requests += 1
        if isinstance(answer, Prediction):
            self.latencies_ms.append(answer.latency_ms)
            self.complete += not answer.partial
            self.answers.append(answer)
            self.ends.append(End(answer.latency_ms, LATE in answer.missing.values()))
        else:
            self.ends.append(End(took_ms, LATE in answer.outcomes.values()))


async def ask(client: AsyncClient, picture: Any, deadline_ms: float, seen: Seen) -> None:
    """One call, whatever becomes of it."""
    answer: Prediction | InferenceError
    started_s = time.monotonic()
    try:
        answer = await client.classify(picture, deadline_ms=deadline_ms)
    except InferenceError as error:
        answer = error
    seen.take(answer, (time.monotonic() - started_s) * 1e3)


async def at_random(
    client: AsyncClient, rate_per_s: float, requests: int, deadline_ms: float, seed: int, seen: Seen
) -> None:
    """Requests as a Poisson process, whether or not those before have been answered."""
    picture, gaps = noise_picture(64), np.random.default_rng(seed)
    calls, due_s = set(), time.monotonic()
    for gap_s in gaps.exponential(1 / rate_per_s, requests):
        due_s += gap_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        call = asyncio.create_task(ask(client, picture, deadline_ms, seen))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await asyncio.gather(*calls)


async def one_by_one(
    client: AsyncClient, requests: int, deadline_ms: float, clients: int, seen: Seen
) -> None:
    """Callers that each wait for an answer before they ask again."""
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


def told(
    bundle: Bundle, answers: Sequence[Prediction], late_s: Sequence[float], together: str
) -> Scenario:
    """A fleet with the computing times and round trips of these answers, and such wake-ups.

    Each device's are drawn apart from all others', or `together`, whole answers at a time: agents
    that share the cores of one machine keep each other waiting, as real devices do not.
    """
    whole = [answer for answer in answers if not answer.partial]
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
                compute=Measured(values_s=tuple(compute_s[a.device]), together=together),
                delay=Measured(values_s=tuple(trips_s[a.device]), together=together),
                turnaround_s=TURNAROUND_S,
            )
            for a in bundle.manifest.plan.assignments
        ),
        load=Load(requests=1),
        deadline_ms=PLENTY_MS,
        before=Measured(values_s=tuple(before_s), together=together),
        after_s=CLIENT_FUSE_MS / 1e3,
        late_s=Measured(values_s=tuple(late_s)),
    )


def compared(scenario: Scenario, real: Seen) -> dict[str, Any]:
    """One deadline: what was measured, what is simulated, and how far apart they are."""
    trace = simulate(scenario)
    answered = np.array(trace.subset) != trace.subsets.get((), -1)
    complete = answered & (np.array(trace.partial) == 0)
    row: dict[str, Any] = {"deadline_ms": scenario.deadline_ms, "requests": real.requests}
    for point in (50, 90, 99):
        row[f"p{point}"] = pair(
            float(np.percentile(real.latencies_ms, point)) if real.latencies_ms else 0.0,
            float(np.percentile(np.array(trace.latencies_s)[answered] * 1e3, point))
            if answered.any()
            else 0.0,
        )
    row["answered"] = pair(len(real.latencies_ms) / real.requests, float(answered.mean()))
    row["complete"] = pair(real.complete / real.requests, float(complete.mean()))
    return row


def pair(measured: float, simulated: float) -> dict[str, float]:
    """Both, and the simulated one's relative error."""
    off = simulated / measured - 1 if measured else 0.0
    return {"measured": measured, "simulated": simulated, "error": off}


def reality(requests: int, blocks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every load of the three agents under every deadline, beside the simulator; and by how much
    each load's client was woken late."""
    rows, late = [], []
    bundle = Bundle.open(BUNDLE)
    loads = {
        "one caller": Load(requests=requests),
        "three callers": Load(requests=requests, clients=3),
        "50 a second": Load(requests=requests, rate_per_s=50.0),
        "150 a second": Load(requests=requests, rate_per_s=150.0),
    }
    with (
        tempfile.TemporaryDirectory() as name,
        served(bundle, Path(name), "--threads", 1) as running,
    ):
        fleet = running.path
        running.client().close()  # now all of them are READY
        for load_name, load in loads.items():
            first = asyncio.run(measure(fleet, replace(load, requests=200), [PLENTY_MS], 1))
            usual_ms = np.percentile(first[PLENTY_MS].latencies_ms, [CALIBRATED, *COMPARED])
            # Deciding comes 2 ms before a short deadline, or after half of a very short one.
            tight = [float(round(ms + min(2.0, ms), 2)) for ms in usual_ms]
            seen = asyncio.run(measure(fleet, load, [PLENTY_MS, *tight], blocks))
            ends = seen.pop(tight[0]).ends
            late_s = woken_late_s(ends, tight[0]) or (Assumptions().late_ms / 1e3,)
            cut = sum(end.cut for end in ends)
            points = {f"p{p}": float(np.percentile(late_s, p)) * 1e3 for p in (50, 90, 99)}
            late.append({"load": load_name, "deadline_ms": tight[0], "cut": cut, **points})
            for drawn, together in (("apart", ""), ("together", "answers")):
                base = told(bundle, seen[PLENTY_MS].answers, late_s, together)
                simulated = replace(base, load=replace(load, requests=SIMULATED))
                for deadline_ms, real in seen.items():
                    row = compared(replace(simulated, deadline_ms=deadline_ms), real)
                    rows.append({"load": load_name, "drawn": drawn, **row})
                    print(markdown(rows[-1:]), end="", flush=True)
    return rows, late


def fleets() -> Iterator[tuple[str, Scenario]]:
    """What speed is measured on: from one device to ten thousand."""

    def devices(members: int, replicas: int, **more: Any) -> tuple[DeviceModel, ...]:
        return tuple(
            DeviceModel(
                name=f"d{k}/{number}",
                k=k,
                compute=LogNormal(median_s=0.004 + 0.001 * (k % 5), sigma=0.2),
                delay=Jittered(round_trip_s=0.001, jitter_s=0.0001),
                request_bytes=50_000,
                reply_bytes=8_000,
                bandwidth_bps=9.4e8,
                turnaround_s=0.0001,
                **more,
            )
            for k in range(members)
            for number in range(replicas)
        )

    failing = {
        "mean_up_s": 500.0, "mean_down_s": 10.0, "loss": 0.001,
        "slow": SlowSpells(every_s=60.0, lasts_s=1.0, factor=4.0),
    }  # fmt: skip
    three = devices(3, 1)
    yield (
        "1 device, 1 client",
        Scenario(devices=devices(1, 1), load=Load(requests=200_000), deadline_ms=50.0),
    )
    yield (
        "3 devices, 1 client",
        Scenario(devices=three, load=Load(requests=100_000), deadline_ms=50.0),
    )
    yield (
        "3 devices, 100 clients, 80 a second",
        Scenario(
            devices=three,
            load=Load(requests=100_000, clients=100, rate_per_s=80.0),
            deadline_ms=50.0,
        ),
    )
    yield (
        "16 devices, 10 clients, 60 a second",
        Scenario(
            devices=devices(16, 1),
            load=Load(requests=20_000, clients=10, rate_per_s=60.0),
            deadline_ms=50.0,
        ),
    )
    yield (
        "9,999 devices that fail, 3,333 clients",
        Scenario(
            devices=devices(3, 3333, **failing),
            load=Load(requests=200_000, clients=3333, rate_per_s=20_000.0),
            deadline_ms=50.0,
        ),
    )
    yield (
        "10,000 devices that fail, 16 members, 500 clients, hedged",
        Scenario(
            devices=devices(16, 625, **failing),
            load=Load(requests=40_000, clients=500, rate_per_s=4_000.0),
            deadline_ms=50.0,
            hedge_after_s=0.02,
        ),
    )


def speed(scale: float) -> list[dict[str, Any]]:
    """Member-requests a second of the processor, for every fleet, best of two."""
    rows = []
    for name, scenario in fleets():
        requests = max(100, int(scenario.load.requests * scale))
        scenario = replace(scenario, load=replace(scenario.load, requests=requests))
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
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Speed of the simulator, and its truth.")
    parser.add_argument("--requests", type=int, default=2000, help="per load and deadline")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--scale", type=float, default=1.0, help="of the requests for speed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep-docs", action="store_true", help="leave docs/ as it is")
    options = parser.parse_args()
    machine = describe_machine()
    rows, late = reality(options.requests, options.blocks)
    rates = speed(options.scale)
    found = {"machine": machine, "reality": rows, "woken_late": late, "speed": rates}
    write_json(options.out, found)
    if not options.keep_docs:
        put_table(PAGE, rows, late, rates, machine)
        write_bytes(PICTURE, draw(rows))


if __name__ == "__main__":
    main()
