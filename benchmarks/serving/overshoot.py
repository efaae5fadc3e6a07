"""By how much calls end after their deadline.

    python -m benchmarks.serving --only overshoot        # about 2 minutes

Three stub agents, one of which is late now and then: its model then takes longer than any deadline
here. Calls with deadlines drawn from a few, one after the other, are timed by their caller; first
while nothing else runs, then beside as many busy processes as there are cores. Overshoot is what
a caller waited beyond the deadline, 0 for calls that ended before it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from benchmarks.harness.serving_fleet import client_of, stub_fleet
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.errors import InferenceError

NAME = "overshoot"
SIDE = 224
AGENTS = 3
DEADLINES_MS = (5.0, 10.0, 20.0)
COMPUTE_MS, LATE_MS, LATE_SHARE = 1.0, 30.0, 0.15
POINTS = (50, 99, 99.9)
CALLS = 8000
BUSY = "while True: pass"


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(client: Client, cores: int) -> dict[str, Any]:
    """What calls waited beyond their deadlines, beside so many busy `cores`."""
    draw, picture = Random(cores), noise_picture(SIDE)
    beyond: list[float] = []
    answered = whole = 0
    with load(cores):
        for _ in range(CALLS):
            deadline_ms = draw.choice(DEADLINES_MS)
            started_s = time.perf_counter()
            try:
                whole += not client.classify(picture, deadline_ms=deadline_ms).partial
                answered += 1
            except InferenceError:
                pass
            beyond.append((time.perf_counter() - started_s) * 1e3 - deadline_ms)
    over = [max(0.0, ms) for ms in beyond]
    return {
        "busy_processes": cores,
        "calls": CALLS,
        "answered": answered / CALLS,
        "whole": whole / CALLS,
        "ended_after": sum(ms > 0 for ms in beyond) / CALLS,
        "overshoot_ms": {**percentiles(over, POINTS), "max": max(over)},
        "to_deadline_ms": percentiles(beyond, POINTS),
    }


def run() -> Iterator[dict[str, Any]]:
    late = {f"device-{AGENTS - 1}": ("--late-ms", LATE_MS, "--late-share", LATE_SHARE)}
    stubs = stub_fleet(AGENTS, "--compute-ms", COMPUTE_MS, side=SIDE, each=late)
    with stubs as fleet, client_of(fleet) as client:
        for cores in (0, os.cpu_count() or 1):
            yield measure(client, cores)


COLUMNS = (
    ("busy processes beside", "{busy_processes}"),
    ("calls", "{calls}"),
    ("with all members", "{whole:.0%}"),
    ("end after the deadline", "{ended_after:.2%}"),
    ("overshoot p50 ms", "{overshoot_ms[p50]:.2f}"),
    ("p99", "{overshoot_ms[p99]:.2f}"),
    ("p99.9", "{overshoot_ms[p99.9]:.2f}"),
    ("longest", "{overshoot_ms[max]:.2f}"),
)
