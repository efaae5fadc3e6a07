"""What a call costs beyond computing, against a bare ZeroMQ exchange of the same bytes.

    python -m benchmarks.serving.overhead            # about 2 minutes

Agents on loopback, each a process of its own, serve 224x224 crops. They are asked in turns, a block
each, so that drift of the machine meets all:

    ours      by this project's client
    client    the same agents, by a bare DEALER each and a poller that sends them ready frames and
              decodes nothing: what is over it, the client costs
    both      as many processes with nothing but a ROUTER, which answer with frames of the same
              size, by the same bare client: what is over it, client and agents cost

Reported are a call's latency less its slowest member's own computing, the bare round trips to all,
and the ratios with the interval in which each lies when the rounds are drawn anew.

    stub           real agents whose model does nothing, so that the processor is all for the call
    stub, keys     the same in CurveZMQ, on both sides
    onnxruntime    `mdp-agent run` with a model that takes next to no time
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import (
    asked_bare,
    bare_exchange,
    colour_bundle,
    served,
    stub_fleet,
)
from mdp.cli.bench import noise_picture, percentiles
from mdp.client.sync import Client
from mdp.pictures.crop import Picture

NAME = "overhead"
RESULTS = Path(__file__).parents[1] / "results" / "overhead.json"
SIDE = 224
POINTS = (50, 99)
NAMES = tuple(f"p{point}" for point in POINTS)
OURS, CLIENT, BOTH = "ours", "client", "both"
#: Against what ours is held.
OVER = (CLIENT, BOTH)
STUB, STUB_KEYS, ONNX = "stub", "stub, keys", "onnxruntime"


def measure(kind: str, agents: int, rounds: int, per_round: int) -> dict[str, Any]:
    """All three in turns; milliseconds at p50 and p99, and their ratios."""
    keys, partial = kind == STUB_KEYS, 0
    blocks: dict[str, list[list[float]]] = {OURS: [], **{over: [] for over in OVER}}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if kind == ONNX:
            fleet = stack.enter_context(
                served(colour_bundle(folder, agents, SIDE), folder, "--threads", 1)
            )
        else:
            fleet = stack.enter_context(stub_fleet(folder, agents, side=SIDE, keys=keys))
        client = stack.enter_context(fleet.client())
        same_agents = stack.enter_context(asked_bare(fleet, side=SIDE))
        routers = stack.enter_context(bare_exchange(agents, side=SIDE, keys=keys))
        picture = noise_picture(SIDE)
        for number in range(rounds + 1):
            calls = [call(client, picture) for _ in range(per_round)]
            taken = {
                OURS: [took_ms for took_ms, _ in calls],
                CLIENT: [same_agents.overhead_ms() for _ in range(per_round)],
                BOTH: [routers.round_trip_ms() for _ in range(per_round)],
            }
            if number:  # the first one warms up
                partial += sum(is_partial for _, is_partial in calls)
                for what, block in taken.items():
                    blocks[what].append(block)
    ms = {what: percentiles([*chain(*taken)], POINTS) for what, taken in blocks.items()}
    return {
        "kind": kind,
        "agents": agents,
        "requests": rounds * per_round,
        "partial": partial,
        "ms": ms,
        "ratio": {over: {p: ms[OURS][p] / ms[over][p] for p in ms[over]} for over in OVER},
        "ratio_95": {
            over: {f"p{p}": ratio_interval(blocks[OURS], blocks[over], p) for p in POINTS}
            for over in OVER
        },
    }


def call(client: Client, picture: Picture) -> tuple[float, bool]:
    """A call by its caller's clock less its slowest member's computing, in ms; if it is partial."""
    started_s = time.perf_counter()
    answer = client.classify(picture)
    took_ms = (time.perf_counter() - started_s) * 1e3
    return took_ms - max(member.compute_ms for member in answer.members), answer.partial


def spread(row: dict[str, Any], over: str, point: str) -> str:
    """A ratio and where it lies."""
    ratio, (low, high) = row["ratio"][over][point], row["ratio_95"][over][point]
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def line_of(row: dict[str, Any]) -> str:
    """One row of the table, for people."""
    times = "  ".join(f"{row['ms'][what][p]:5.2f}" for p in NAMES for what in (OURS, *OVER))
    ratios = "  ".join(spread(row, over, p) for over in OVER for p in NAMES)
    return f"{row['kind']:<12} {row['agents']:>6}  {times}  {ratios}"


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every kind with every number of agents."""
    times = "  ".join(f"{what:>5}" for _ in NAMES for what in ("ours", "agent", "bare"))
    ratios = "  ".join(f"{over + ' ' + p:<16}" for over in OVER for p in NAMES)
    say(f"{'':12} agents  {times}  {ratios}")
    rows = []
    for kind in options.kinds:
        for count in options.agents:
            rows.append(measure(kind, count, options.rounds, options.per_round))
            say(line_of(rows[-1]))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The page's table."""
    lines = [
        "| agents | how many | a call, p50 ms | p99 | same agents asked bare, p50 | p99 "
        "| bare ROUTERs, p50 | p99 | client: ratio p50 (95 %) | p99 "
        "| both: ratio p50 (95 %) | p99 |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        cells = [f"{row['ms'][what][p]:.2f}" for what in (OURS, *OVER) for p in NAMES]
        cells += [spread(row, over, p) for over in OVER for p in NAMES]
        lines.append(f"| {row['kind']} | {row['agents']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to measure, and for how long."""
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--kinds", nargs="+", default=[STUB, STUB_KEYS, ONNX])
    parser.add_argument("--rounds", type=int, default=10)
    # The first calls of a block find the caches full of what the others did.
    parser.add_argument("--per-round", type=int, default=500)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Client overhead against bare ZeroMQ.")
    add_options(parser)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = describe_machine()
    rows = run(options, lambda line: print(line, flush=True))
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
