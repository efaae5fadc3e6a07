"""One client and 64 agents, beside a bare ZeroMQ fan-out of the same bytes.

    python -m benchmarks.serving --only many-agents      # about 2 minutes

64 stub agents, each with a ROUTER, a queue and threads of its own, take crops of 32x32 pixels, and
every answer is fused from all 64 of them. Beside them 64 bare ROUTERs answer the same frames with
as many bytes. Both are asked in turns, a block each: one after the other, and with several under
way.

Agents and ROUTERs are processes of their own, or several share one: 64 processes on two cores find
the caches empty at each request, which says more about the machine than about a fan-out.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import numpy as np

from benchmarks.harness.resampling import in_rounds, ratio_interval
from benchmarks.harness.serving_fleet import bare_exchange, client_of, stub_fleet
from mdp.cli.bench import noise_picture

NAME = "many-agents"
SIDE = 32
DEADLINE_MS = 10_000.0
AGENTS, ROUNDS, PER_ROUND = 64, 12, 100


def per_s(block: Callable[[], object]) -> list[float]:
    """How many of `PER_ROUND` a second."""
    started_s = time.perf_counter()
    block()
    return [PER_ROUND / (time.perf_counter() - started_s)]


def measure(per_process: int, in_flight: int) -> dict[str, Any]:
    """Answers and bare fan-outs a second, in turns."""
    shared: dict[str, Any] = {"side": SIDE, "per_process": per_process}
    with ExitStack() as stack:
        fleet = stack.enter_context(stub_fleet(AGENTS, **shared))
        client = stack.enter_context(client_of(fleet))
        bare_client = stack.enter_context(bare_exchange(AGENTS, **shared))
        picture, partial = noise_picture(SIDE), 0

        def streamed() -> None:
            nonlocal partial
            answers = client.stream(
                repeat(picture, PER_ROUND), deadline_ms=DEADLINE_MS, in_flight=in_flight
            )
            partial += sum(answer.partial for answer in answers)

        rates = in_rounds(
            {
                "ours": lambda: per_s(streamed),
                "bare": lambda: per_s(lambda: bare_client.many(PER_ROUND, in_flight)),
            },
            ROUNDS,
        )
    ours_per_s, bare_per_s = (float(np.median(rates[which])) for which in ("ours", "bare"))
    return {
        "agents": AGENTS,
        "agents_per_process": per_process,
        "crop_pixels": SIDE,
        "in_flight": in_flight,
        "answers": ROUNDS * PER_ROUND,
        "partial": partial,
        "answers_per_s": ours_per_s,
        "bare_per_s": bare_per_s,
        "ratio": ours_per_s / bare_per_s,
        "ratio_95": ratio_interval(rates["ours"], rates["bare"], 50),
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
