"""A ladder of rungs in a real agent under bursts, beside each of its rungs alone, all in batches.

    python -m benchmarks.serving --only ladder

Calls come at random, 15 a second and ten times as many in each tenth second, with a deadline of
200 ms, the same for all. The agent is real, its computing played: a rung waits 8, 16 or 32 ms for
one picture, for a batch of up to 8 half of that once and half for each picture, and is right on 74,
76.5 or 78 % of the pictures. `score` counts answers in time times the share that their rung is
right on; no answer in time counts as wrong. `right` are answers in time with the right label.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec.structs import replace

import mdp
from benchmarks.harness.serving_fleet import STUB
from benchmarks.harness.stub_agent import played_picture
from mdp.errors import InferenceError
from mdp.files import read_json, write_json
from mdp.formats.bundle import MANIFEST, Manifest
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import LABELS, write_bundle
from mdp.testing.processes import PATIENCE_S

#: Milliseconds of one picture, and the share that is right, of each rung from the top.
RUNGS = ((32.0, 0.78), (16.0, 0.765), (8.0, 0.74))
#: Which rungs an agent has.
SIDES = {"top": (0,), "middle": (1,), "lowest": (2,), "ladder": (0, 1, 2)}
SIDE, BATCH, CLIENTS = 16, 8, 4
PER_S, BURST, DEADLINE_MS = 15.0, 10.0, 200.0
SEEDS, SECONDS = 3, 60.0


def arrivals(seed: int, seconds: float) -> list[float]:
    """Moments of the calls: a Poisson process, thinned outside of every tenth second."""
    draw, now_s, found = random.Random(seed), 0.0, list[float]()
    while (now_s := now_s + draw.expovariate(BURST * PER_S)) < seconds:
        if int(now_s) % 10 == 9 or draw.random() < 1 / BURST:
            found.append(now_s)
    return found


def write_ladder(folder: Path, rungs: Sequence[int]) -> None:
    """A bundle of one device with these rungs, of which only the plan counts."""
    write_bundle(folder, devices=("pi",), sizes=(SIDE,), rungs=len(rungs))
    manifest = read_json(folder / MANIFEST, Manifest)
    (own,) = manifest.plan.assignments
    ms = replace(own.predicted_ms, compute=RUNGS[rungs[0]][0])
    own = replace(own, batch=BATCH, predicted_ms=ms)
    if lower := own.lower:
        timed = zip(lower, rungs[1:], strict=True)
        own = replace(
            own, rungs=tuple(replace(one, compute_ms=RUNGS[rung][0]) for one, rung in timed)
        )
    write_json(folder / MANIFEST, replace(manifest, plan=replace(manifest.plan, assignments=[own])))


class Calls:
    """Outcomes of the calls of one side."""

    def __init__(self, rungs: Sequence[int]) -> None:
        self._rungs = rungs
        self.calls = self.right = self.late = 0
        self.answered: Counter[int] = Counter()
        #: Why there was no answer, by code.
        self.refused: Counter[str] = Counter()
        self.latencies_ms: list[float] = []

    async def ask(self, client: mdp.AsyncClient, label: int, place: float) -> None:
        """One call, from now."""
        picture, started_s, answer = played_picture(label, place, SIDE), time.monotonic(), None
        try:
            answer = await client.classify(picture, deadline_ms=DEADLINE_MS)
        except InferenceError as error:
            self.refused.update(str(code) for code in error.codes.values())
        took_ms = (time.monotonic() - started_s) * 1e3
        self.calls += 1
        if answer is None:
            return
        self.latencies_ms.append(took_ms)
        if took_ms > DEADLINE_MS:
            self.late += 1
            return
        self.answered[self._rungs[answer.members[0].rung]] += 1
        self.right += answer.label == LABELS[label]

    def row(self) -> dict[str, Any]:
        in_time = sum(self.answered.values())
        score = sum(number * RUNGS[rung][1] for rung, number in self.answered.items())
        return {
            "calls": self.calls,
            "in_time": in_time / self.calls,
            "score": score / self.calls,
            "right": self.right / self.calls,
            "late": self.late,
            "p50_ms": float(np.percentile(self.latencies_ms, 50)),
            "p99_ms": float(np.percentile(self.latencies_ms, 99)),
            "refused": dict(self.refused),
            "by_rung": [self.answered[rung] / self.calls for rung in range(len(RUNGS))],
        }


async def play(
    fleet: AgentFleet, rungs: Sequence[int], seed: int, seconds: float
) -> dict[str, Any]:
    """One run of one side."""
    path, draw, calls = fleet.folder / "fleet.toml", random.Random(seed), Calls(rungs)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S))
            for _ in range(CLIENTS)
        ]
        for client in clients:
            for number in range(16):
                await client.classify(played_picture(0, number / 16, SIDE), deadline_ms=5000.0)
        under_way, started_s = set(), time.monotonic()
        for number, at_s in enumerate(arrivals(seed, seconds)):
            await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
            label, place = draw.randrange(len(LABELS)), draw.random()
            call = asyncio.create_task(calls.ask(clients[number % CLIENTS], label, place))
            under_way.add(call)
            call.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    return calls.row()


def side_of(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """One run of one side with agents of its own."""
    rungs = SIDES[name]
    with TemporaryDirectory() as folder:
        write_ladder(Path(folder) / "bundle", rungs)
        with AgentFleet(Path(folder), Path(folder) / "bundle") as fleet:
            told = ",".join(f"{ms}:{right}" for ms, right in (RUNGS[rung] for rung in rungs))
            fleet.start("pi", "--rungs", told, program=STUB)
            fleet.write()
            return asyncio.run(play(fleet, rungs, seed, seconds))


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Every side in turns for each seed; means over the seeds, all late answers."""
    seeds, seconds = (1, 10.0) if quick else (SEEDS, SECONDS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in range(seeds):
        for name in SIDES:
            found[name].append(side_of(name, seed, seconds))
    best = max(mean(found[name], "score") for name in SIDES if name != "ladder")
    for name, rows in found.items():
        keys = ("in_time", "score", "right", "p50_ms", "p99_ms")
        yield {
            "rungs": name,
            "calls": sum(row["calls"] for row in rows),
            **{key: mean(rows, key) for key in keys},
            "late": sum(row["late"] for row in rows),
            "gain": mean(rows, "score") - best,
            "by_rung": np.mean([row["by_rung"] for row in rows], axis=0).tolist(),
            "seeds": rows,
        }


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


COLUMNS = (
    ("rungs", "{rungs}"),
    ("calls", "{calls}"),
    ("in time", "{in_time:.1%}"),
    ("score", "{score:.1%}"),
    ("to the best fixed, points", "{gain:+.1%}"),
    ("right", "{right:.1%}"),
    ("by top, middle, lowest", "{by_rung[0]:.0%}, {by_rung[1]:.0%}, {by_rung[2]:.0%}"),
    ("p50 ms", "{p50_ms:.1f}"),
    ("p99", "{p99_ms:.1f}"),
    ("late", "{late}"),
)
