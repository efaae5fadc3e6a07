"""Every benchmark of serving: what a call costs, and what becomes of it in bad company.

    python -m benchmarks.serving                         # all of them, about 10 minutes
    python -m benchmarks.serving --only overshoot stream

    overhead      2 min  a call against a bare ZeroMQ exchange of the same bytes
    dead-device   1 min  calls of a fleet that has lost a device, beside a healthy one
    overshoot     1 min  by how much calls end after their deadline
    stream        3 min  `stream` beside the slowest member's model run in a loop
    many-agents   2 min  one client and 64 agents, beside a bare fan-out
    gateway       1 min  answers over HTTP, beside the Python client's

Each writes results/serving-<name>.json and its table in the page on serving. Nothing else should
run on the machine meanwhile.
"""

import argparse
import time
from pathlib import Path

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from benchmarks.harness.tables import table
from benchmarks.serving.page import PAGE, PARTS
from mdp.files import write_json


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.only:
        print(f"== {name}", flush=True)
        machine, started_s, rows = describe_machine(), time.monotonic(), []
        for row in PARTS[name].run():
            rows.append(row)
            text = table([row], *PARTS[name].COLUMNS).splitlines()
            print(*(text if len(rows) == 1 else text[2:]), sep="\n", flush=True)
        outcome = {"machine": machine, "seconds": time.monotonic() - started_s, "rows": rows}
        write_json(options.results / f"serving-{name}.json", outcome)
    if options.results == RESULTS:
        PAGE.write()


if __name__ == "__main__":
    main()
