"""What a call costs beyond computing, against a bare ZeroMQ exchange of the same bytes.

    python -m benchmarks.overhead            # about 3 minutes

Agents on loopback, each a process of its own, serve 224x224 crops. Beside them as many processes
with nothing but a ROUTER answer the same frames with frames of the same size. Both are asked in
turns, a block each, so that drift of the machine meets both. Reported are a call's latency less its
slowest member's own computing, the bare round trip to all, and the ratio of both with the interval
in which it lies when the rounds are drawn anew.

    stub           real agents whose model does nothing, so that the processor is all for the call
    stub, keys     the same in CurveZMQ, on both sides
    onnxruntime    `mdp-agent run` with a model that takes next to no time
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.resampling import ratio_interval
from benchmarks.serving_fleet import bare_exchange, colour_bundle, served, stub_fleet
from mdp.bench import noise_picture, overhead_ms, percentiles

NAME = "overhead"
RESULTS = Path(__file__).parent / "results" / "overhead.json"
SIDE = 224
POINTS = (50, 99)
STUB, STUB_KEYS, ONNX = "stub", "stub, keys", "onnxruntime"


def measure(kind: str, agents: int, rounds: int, per_round: int) -> dict[str, object]:
    """Both exchanges in turns; milliseconds at p50 and p99, and their ratios."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    keys, partial = kind == STUB_KEYS, 0
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if kind == ONNX:
            fleet = stack.enter_context(
                served(colour_bundle(folder, agents, SIDE), folder, "--threads", 1)
            )
        else:
            fleet = stack.enter_context(stub_fleet(folder, agents, side=SIDE, keys=keys))
        client = stack.enter_context(fleet.client())
        bare_client = stack.enter_context(bare_exchange(agents, side=SIDE, keys=keys))
        picture = noise_picture(SIDE)
        for number in range(rounds + 1):
            predictions = [client.classify(picture) for _ in range(per_round)]
            trips = [bare_client.round_trip_ms() for _ in range(per_round)]
            if number:  # the first one warms up
                partial += sum(prediction.partial for prediction in predictions)
                ours.append([overhead_ms(prediction) for prediction in predictions])
                bare.append(trips)
    all_ours, all_bare = (percentiles([*chain(*blocks)], POINTS) for blocks in (ours, bare))
    return {
        "kind": kind,
        "agents": agents,
        "requests": rounds * per_round,
        "partial": partial,
        "overhead_ms": all_ours,
        "bare_ms": all_bare,
        "ratio": {point: all_ours[point] / all_bare[point] for point in all_ours},
        "ratio_95": {f"p{point}": ratio_interval(ours, bare, point) for point in POINTS},
    }


def line_of(row: dict[str, object]) -> str:
    """One row of the table, for people."""
    ours, theirs, ratio, sure = (
        row[key] for key in ("overhead_ms", "bare_ms", "ratio", "ratio_95")
    )
    spread = "  ".join(
        f"{ratio[p]:5.2f} ({sure[p][0]:.2f}-{sure[p][1]:.2f})" for p in ("p50", "p99")
    )
    return (
        f"{row['kind']:<12} {row['agents']:>6} {ours['p50']:>8.2f} {ours['p99']:>7.2f} "
        f"{theirs['p50']:>8.2f} {theirs['p99']:>7.2f}   {spread}"
    )


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, object]]:
    """Every kind with every number of agents."""
    say(f"{'':12} {'agents':>6} {'ours p50':>8} {'p99':>7} {'bare p50':>8} {'p99':>7}   "
        f"{'ratio p50':<19}  ratio p99")  # fmt: skip
    rows = []
    for kind in options.kinds:
        for count in options.agents:
            rows.append(measure(kind, count, options.rounds, options.per_round))
            say(line_of(rows[-1]))
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """The page's table."""
    lines = [
        "| agents | how many | overhead p50 ms | p99 | bare p50 ms | p99 | ratio p50 (95 %) "
        "| ratio p99 (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs, ratio, sure = (
            row[key] for key in ("overhead_ms", "bare_ms", "ratio", "ratio_95")
        )
        spread = " | ".join(
            f"{ratio[p]:.2f} ({sure[p][0]:.2f}-{sure[p][1]:.2f})" for p in ("p50", "p99")
        )
        lines.append(
            f"| {row['kind']} | {row['agents']} | {ours['p50']:.2f} | {ours['p99']:.2f} "
            f"| {theirs['p50']:.2f} | {theirs['p99']:.2f} | {spread} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to measure, and for how long."""
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--kinds", nargs="+", default=[STUB, STUB_KEYS, ONNX])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--per-round", type=int, default=50)


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
