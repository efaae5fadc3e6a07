"""Every benchmark of serving: what a call costs, and what becomes of it in bad company.

    python -m benchmarks.serving                         # all of them, about 9 minutes
    python -m benchmarks.serving --only overshoot stream

    overhead      2 min  a call against a bare ZeroMQ exchange of the same bytes
    dead-device   1 min  calls of a fleet that has lost a device, beside a healthy one
    overshoot     1 min  by how much calls end after their deadline
    stream        3 min  `stream` beside the slowest member's model run in a loop
    many-agents   2 min  one client and 64 agents, beside a bare fan-out

Each writes results/serving-<name>.json and its table in docs/results/serving.md. Nothing else
should run on the machine meanwhile.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import write_figures
from benchmarks.serving import dead_device, many_agents, overhead, overshoot, stream_rate

PARTS = {part.NAME: part for part in (overhead, dead_device, overshoot, stream_rate, many_agents)}
RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "serving.md"


def figures(kept: dict[str, dict[str, Any]]) -> str:
    """What docs/results/serving.md shows of every part that was ever measured."""
    blocks = []
    for name, outcome in kept.items():
        machine = outcome["machine"]
        said = (
            f"{machine['cores']} virtual cores, {machine['processor']}, load "
            f"{machine['load_before']:.1f} before the run, {machine['date']}"
        )
        blocks.append(f"**{name}** ({said})\n\n{PARTS[name].table(outcome['rows'])}")
    return "\n\n".join(blocks)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    for part in PARTS.values():
        part.add_options(parser)
    options = parser.parse_args()
    for name in options.only:
        print(f"== {name}", flush=True)
        machine, started_s = describe_machine(), time.monotonic()
        rows = PARTS[name].run(options, lambda line: print(line, flush=True))
        outcome = {"machine": machine, "seconds": time.monotonic() - started_s, "rows": rows}
        path = options.results / f"serving-{name}.json"
        path.write_text(json.dumps(outcome, indent=1) + "\n")
        print(f"   {outcome['seconds']:.0f} s", flush=True)
    paths = {name: options.results / f"serving-{name}.json" for name in PARTS}
    kept = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    write_figures(options.page, "benchmarks.serving", figures(kept))


if __name__ == "__main__":
    main()
