"""How long planning takes for 8, 100 and 1,000 unlike devices, and how near it comes to the best.

    python -m benchmarks.planning.search [--out FILE]

Devices are drawn from a fixed seed around the shipped profiles: each has a latency table, a link
and an availability of its own, so nothing is shared between them. Times are of one process on one
core, from profiles that are read to a plan, the fits of their latency included. The best plan is
found by trying every one, on small instances.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.models import vit
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.formats.plan import Region, TeacherSpec
from mdp.formats.profile import DeviceProfile, Link, read_profile, shipped_profiles
from partitioner.estimates.accuracy import predictor_for, shipped_law
from partitioner.estimates.accuracy_law import WHOLE, capability_of
from partitioner.estimates.network import through_port, waits_ms
from partitioner.planner.availability import Objective, exact_arrivals
from partitioner.planner.candidates import Candidate, Device, evaluate_device, fitted_ways
from partitioner.planner.design_space import REGIONS, make_choices, sub_model_grid
from partitioner.planner.local_search import choose
from partitioner.planner.placement import Limits, settled
from partitioner.planner.search import make_plan

TEACHER = TeacherSpec(
    name="vit_base_patch16_224",
    shape=vit(224, 16, 768, 12, 12),
)
COUNTS, TARGET_MS = (8, 100, 1000), 30.0
COUNT = 200
#: Devices, shapes and regions of which every plan is tried.
INSTANCES: tuple[tuple[int, int, tuple[Region, ...]], ...] = (
    (2, 40, (WHOLE,)), (3, 12, (WHOLE,)), (2, 8, REGIONS), (3, 4, REGIONS[:3]),
)  # fmt: skip
#: In every other round of these, the client's port carries something between these bits per second;
#: in the rest each crop has its link to itself.
PORT_BPS = (20e6, 1e9)
_SLOW = ("n100", "raspberry-pi-5", "laptop-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning.search", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "search.json")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    machine = describe_machine()
    value = {
        "machine": machine,
        "teacher": TEACHER.name,
        "target_ms": TARGET_MS,
        "shapes": len(sub_model_grid(TEACHER.shape)),
        "times": [timed(count) for count in COUNTS],
        "against_exhaustive": against_exhaustive(),
    }
    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())
    write_json(asked.out, value)


def drawn_devices(count: int, seed: int) -> list[DeviceProfile]:
    """Unlike devices around the shipped profiles that cannot run the teacher in time."""
    draw = np.random.default_rng(seed)
    shipped = [read_profile(name) for name in shipped_profiles() if name in _SLOW]
    return [_drawn(draw, shipped[i % len(shipped)], f"d{i:04}") for i in range(count)]


def _drawn(draw: np.random.Generator, like: DeviceProfile, name: str) -> DeviceProfile:
    speed = float(np.exp(draw.normal(0, 0.5)))
    noise = np.exp(draw.normal(0, 0.03, len(like.latency)))
    latency = [
        msgspec.structs.replace(point, latency_ms=point.latency_ms * speed * float(factor))
        for point, factor in zip(like.latency, noise, strict=True)
    ]
    link = Link(
        bandwidth_bps=float(draw.uniform(50e6, 940e6)), round_trip_s=float(draw.uniform(3e-4, 4e-3))
    )
    return msgspec.structs.replace(
        like, name=name, latency=latency, link=link, availability=float(draw.uniform(0.6, 1.0))
    )


def timed(count: int) -> dict[str, Any]:
    """Seconds of planning for so many devices; the faster of two runs."""
    profiles = drawn_devices(count, seed=count)
    wall_s, cpu_s = [], []
    for _ in range(2):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        plan = make_plan(TEACHER, profiles, target_ms=TARGET_MS)
        wall_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    print(f"{count} devices: {min(wall_s):.2f} s, {min(cpu_s):.2f} of the processor", flush=True)
    assert plan.accuracy is not None
    return {
        "devices": count,
        "wall_s": min(wall_s),
        "cpu_s": min(cpu_s),
        "members": len(plan.assignments),
        "replicas": len(plan.replicas),
        "left_out": len(plan.left_out),
        "expected_accuracy": plan.accuracy.expected,
    }


def against_exhaustive() -> dict[str, Any]:
    """How far the expected accuracy found is below the best there is, relative to the best."""
    predictor = predictor_for(shipped_law(), TEACHER.shape, num_classes=1000)
    grid = sub_model_grid(TEACHER.shape)
    behind: dict[str, list[float]] = {"no port": [], "shared port": []}
    for seed in range(COUNT):
        draw = np.random.default_rng(seed)
        count, shapes, regions = INSTANCES[seed % len(INSTANCES)]
        some = [grid[i] for i in sorted(draw.choice(len(grid), size=shapes, replace=False))]
        choices = make_choices(TEACHER.shape, predictor, shapes=some, regions=regions)
        target_ms = float(draw.uniform(20, 200))
        shared = seed // len(INSTANCES) % 2 == 1
        client_bps = float(np.exp(draw.uniform(*np.log(PORT_BPS)))) if shared else math.inf
        devices = [
            evaluate_device(p, fitted_ways(p, ["fp32"]), choices)
            for drawn in drawn_devices(count, seed=10_000 + seed)
            for p in [msgspec.structs.replace(drawn, link=through_port(drawn.link, client_bps))]
        ]
        limits = Limits(target_ms=target_ms, client_bps=client_bps)
        seats, found = choose(devices, predictor, limits)
        together = settled(seats, client_bps)
        assert all(seat.candidate.predicted_ms.total <= target_ms for seat in together)
        best = _best(devices, limits, Objective(
            predictor.law,
            capability_of(predictor.teacher_accuracy),
            exact_arrivals([d.profile.availability for d in devices]),
        ))  # fmt: skip
        if best > 0:
            behind["shared port" if shared else "no port"].append(max(0.0, 1 - found / best))
        assert bool(seats) == (best > 0)
    return {
        "objective": "expected accuracy",
        **{
            which: {
                "instances": len(shortfalls),
                "largest_shortfall": max(shortfalls),
                "mean_shortfall": float(np.mean(shortfalls)),
                "as_good": sum(value < 1e-4 for value in shortfalls),
            }
            for which, shortfalls in behind.items()
        },
    }


def _best(devices: Sequence[Device], limits: Limits, objective: Objective) -> float:
    """The highest expected accuracy of all plans without replicas."""
    options: list[list[Candidate | None]] = []
    for device in devices:
        runs = [device.running(row) for row in range(len(device.choices))]
        able = [c for c in runs if c is not None and c.predicted_ms.total <= limits.target_ms]
        options.append([None, *able])
    best = 0.0
    for combination in itertools.product(*options):
        taken = [(c, [i]) for i, c in enumerate(combination) if c is not None]
        waits = waits_ms([c.request_bytes for c, _ in taken], limits.client_bps)
        in_time = all(
            c.waiting(wait).predicted_ms.total <= limits.target_ms
            for (c, _), wait in zip(taken, waits, strict=True)
        )
        if in_time and len({c.identity for c, _ in taken}) == len(taken):
            best = max(best, objective.value(objective.sums(taken)))
    return best


if __name__ == "__main__":
    main()
