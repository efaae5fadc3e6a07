"""Cost of a call beyond computing, against a bare ZeroMQ exchange of the same bytes.

Agents on loopback, each a process of its own, serve 224x224 crops. In turns, a block each:

    ours      this project's client
    client    a bare DEALER for each of the same agents and a poller, which sends ready frames and
              decodes nothing: the difference is the client's cost
    both      the same bare client and as many processes with only a ROUTER, which reply with frames
              of the same size: the difference is the client's and the agents' cost

A row has a call's latency less its slowest member's computing, the bare round trips to all, and the
ratios with their intervals over resampled rounds.

    stub           agents whose model does nothing, so that the call has the processor
    stub, keys     the same in CurveZMQ, on both sides
    onnxruntime    `mdp-agent run` with a model that takes next to no time
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import chain, product
from typing import Any

from benchmarks.harness.resampling import in_rounds, ratio_interval
from benchmarks.harness.serving_fleet import (
    bare_exchange,
    client_of,
    colour_bundle,
    open_bare_client,
    serve_fleet,
    stub_fleet,
)
from mdp.cli.bench import noise_picture, percentiles
from mdp.client.sync import Client
from mdp.pictures.crop import Picture
from mdp.testing.agents import AgentFleet

SIDE = 224
POINTS = (50, 99)
#: The first calls of a block find cold caches.
AGENTS, ROUNDS, PER_ROUND = (1, 3, 8), 10, 500
OURS, CLIENT, BOTH = "ours", "client", "both"
STUB, STUB_KEYS, ONNX = "stub", "stub, keys", "onnxruntime"


def fleet_of(kind: str, agents: int) -> AbstractContextManager[AgentFleet]:
    if kind == ONNX:
        return serve_fleet(colour_bundle(agents, SIDE), "--threads", 1)
    return stub_fleet(agents, side=SIDE, keys=kind == STUB_KEYS)


def measure(kind: str, agents: int, calls: int) -> dict[str, Any]:
    """All three in turns; milliseconds at p50 and p99, and their ratios."""
    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of(kind, agents))
        client = stack.enter_context(client_of(fleet))
        same_agents = stack.enter_context(open_bare_client(fleet, side=SIDE))
        routers = stack.enter_context(bare_exchange(agents, side=SIDE, keys=kind == STUB_KEYS))
        picture = noise_picture(SIDE)
        blocks = in_rounds(
            {
                OURS: lambda: [call_ms(client, picture) for _ in range(calls)],
                CLIENT: lambda: [same_agents.overhead_ms() for _ in range(calls)],
                BOTH: lambda: [routers.round_trip_ms() for _ in range(calls)],
            },
            ROUNDS,
        )
    ms = {what: percentiles([*chain(*taken)], POINTS) for what, taken in blocks.items()}
    return {
        "kind": kind,
        "agents": agents,
        "requests": ROUNDS * calls,
        "ms": ms,
        "ratio": {
            over: {p: ms[OURS][p] / ms[over][p] for p in ms[over]} for over in (CLIENT, BOTH)
        },
        "ratio_95": {
            over: {f"p{p}": ratio_interval(blocks[OURS], blocks[over], p) for p in POINTS}
            for over in (CLIENT, BOTH)
        },
    }


def call_ms(client: Client, picture: Picture) -> float:
    """A call by its caller's clock less its slowest member's computing."""
    started_s = time.perf_counter()
    answer = client.classify(picture)
    took_ms = (time.perf_counter() - started_s) * 1e3
    return took_ms - max(member.compute_ms for member in answer.members)


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    for kind, count in product((STUB, STUB_KEYS, ONNX), AGENTS[: 1 if quick else None]):
        yield measure(kind, count, 10 if quick else PER_ROUND)


def _ratio(over: str, point: str) -> str:
    low, high = (f"{{ratio_95[{over}][{point}][{end}]:.2f}}" for end in (0, 1))
    return f"{{ratio[{over}][{point}]:.2f}} ({low}-{high})"


COLUMNS = (
    ("agents", "{kind}"),
    ("how many", "{agents}"),
    ("a call, p50 ms", "{ms[ours][p50]:.2f}"),
    ("p99", "{ms[ours][p99]:.2f}"),
    ("to the same agents asked bare: ratio p50 (95 %)", _ratio(CLIENT, "p50")),
    ("p99", _ratio(CLIENT, "p99")),
    ("to bare ROUTERs: ratio p50 (95 %)", _ratio(BOTH, "p50")),
)
