"""Time of planning for 8, 100 and 1,000 unlike devices.

    python -m benchmarks.planning.search [--quick]

Devices are drawn from a fixed seed around the shipped profiles, each with a latency table, a link
and an availability of its own. Times are of one process on one core, from profiles to a plan, with
the fits of their latency.
"""

import os
import time
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.models import vit
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.formats.plan import TeacherSpec
from mdp.formats.profile import DeviceProfile, Link, read_profile, shipped_profiles
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within

TEACHER = TeacherSpec(name="vit_base_patch16_224", shape=vit(224, 16, 768, 12, 12))
COUNTS, TARGET_MS = (8, 100, 1000), 30.0
_SLOW = ("n100", "raspberry-pi-5", "laptop-cpu")


def main() -> None:
    asked = arguments(__doc__, "quick", out=RESULTS / "search.json")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    value = {"machine": describe_machine(), "teacher": TEACHER.name, "target_ms": TARGET_MS}
    value["times"] = [timed(count) for count in COUNTS[: 1 if asked.quick else None]]
    if not asked.quick:
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
        plan = plan_within(make_problem(TEACHER, profiles), TARGET_MS).plan
        wall_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    assert plan.accuracy is not None
    row = {
        "devices": count, "wall_s": min(wall_s), "cpu_s": min(cpu_s),
        "members": len(plan.assignments), "replicas": len(plan.replicas),
        "left_out": len(plan.left_out), "expected_accuracy": plan.accuracy.expected,
    }  # fmt: skip
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
