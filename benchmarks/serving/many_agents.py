"""One client and 64 agents, beside a bare ZeroMQ fan-out of the same bytes.

    python -m benchmarks.serving --only many-agents      # about 2 minutes

64 stub agents, each with a ROUTER, a queue and threads of its own, take crops of 32x32 pixels, and
every answer is fused from all 64 of them. Beside them 64 bare ROUTERs answer the same frames with
as many bytes. Both are asked in turns, a block each: one after the other, and with several under
way.

Agents and ROUTERs are processes of their own, or several share one: 64 processes on two cores find
the caches empty at each request, which says more about the machine than about a fan-out.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import bare_exchange, stub_fleet
from mdp.cli.bench import noise_picture

NAME = "many-agents"
SIDE = 32
DEADLINE_MS = 10_000.0
AGENTS, ROUNDS, PER_ROUND = 64, 12, 100


def measure(per_process: int, in_flight: int) -> dict[str, Any]:
    """Answers and bare fan-outs a second, in turns."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    partial = 0
    shared: dict[str, Any] = {"side": SIDE, "per_process": per_process}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        fleet = stack.enter_context(stub_fleet(Path(name), AGENTS, **shared))
        client = stack.enter_context(fleet.client())
        bare_client = stack.enter_context(bare_exchange(AGENTS, **shared))
        picture = noise_picture(SIDE)
        for number in range(ROUNDS + 1):
            started_s = time.perf_counter()
            answers = [*client.stream(repeat(picture, PER_ROUND), deadline_ms=DEADLINE_MS,
                                      in_flight=in_flight)]  # fmt: skip
            between_s = time.perf_counter()
            bare_client.many(PER_ROUND, in_flight)
            ended_s = time.perf_counter()
            if number:  # the first one warms up
                partial += sum(answer.partial for answer in answers)
                ours.append([PER_ROUND / (between_s - started_s)])
                bare.append([PER_ROUND / (ended_s - between_s)])
    rates = [float(np.median(blocks)) for blocks in (ours, bare)]
    return {
        "agents": AGENTS,
        "agents_per_process": per_process,
        "crop_pixels": SIDE,
        "in_flight": in_flight,
        "answers": ROUNDS * PER_ROUND,
        "partial": partial,
        "answers_per_s": rates[0],
        "bare_per_s": rates[1],
        "ratio": rates[0] / rates[1],
        "ratio_95": ratio_interval(ours, bare, 50),
    }


def run() -> Iterator[dict[str, Any]]:
    for per_process in (1, 8):
        for in_flight in (1, 4, 8):
            yield measure(per_process, in_flight)


COLUMNS = (
    ("agents", "{agents}"),
    ("of a process", "{agents_per_process}"),
    ("under way", "{in_flight}"),
    ("answers a second", "{answers_per_s:.0f}"),
    ("bare fan-outs a second", "{bare_per_s:.0f}"),
    ("ratio", "{ratio:.2f}"),
    ("95 %", "{ratio_95[0]:.2f}-{ratio_95[1]:.2f}"),
)
