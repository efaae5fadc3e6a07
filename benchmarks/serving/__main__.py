"""Benchmarks of serving: what a call and the gateway cost beside computing.

    python -m benchmarks.serving                         # all, 34 minutes
    python -m benchmarks.serving --only gateway --quick
    python -m benchmarks.serving --only load servers --beside 6   # also on a busy machine

    overhead      2 min  a call against a bare ZeroMQ exchange of the same bytes
    gateway       1 min  answers over HTTP, beside the Python client's
    push          1 min  calls while a bundle is pushed, beside the same without
    servers       3 min  the gateway beside LitServe and MLServer (benchmarks/serving/servers.py)
    load          7 min  whole answers under load, overload and with devices in trouble
    simulated     2 min  whole answers as simulated, beside real agents with the same arrivals
    batches       4 min  callers one at a time, beside the best fixed batch of the runtime
    ladder       13 min  rungs under bursts, beside each alone (benchmarks/serving/ladder.py)

Each writes benchmarks/results/serving-<name>.json and its table in the page on serving. Nothing
else should run on the machine.
"""

import sys
import time

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table
from benchmarks.serving import batches, gateway, ladder, load, overhead, push, servers, simulated
from mdp.files import write_json

PARTS = {
    "overhead": overhead, "gateway": gateway, "push": push, "servers": servers, "load": load,
    "simulated": simulated, "batches": batches, "ladder": ladder,
}  # fmt: skip
#: Those that take turns with a busy machine.
BESIDE = ("servers", "load")


def figures() -> str:
    blocks = []
    for name, part in PARTS.items():
        outcome = read_result(f"serving-{name}")
        rows = table(outcome["rows"], *part.COLUMNS)
        blocks.append(f"**{name}** ({format_machine(outcome['machine'])})\n\n{rows}")
    return "\n\n".join(blocks)


PAGE = Page("benchmarks.serving", figures)


def main() -> None:
    asked = arguments(__doc__, "quick", only=tuple(PARTS), results=RESULTS, beside=0)
    if asked.beside and (others := [name for name in asked.only if name not in BESIDE]):
        sys.exit(f"--beside: expected --only of {' and '.join(BESIDE)}, got {', '.join(others)}")
    more = {"beside": asked.beside} if asked.beside else {}
    for name in asked.only:
        print(f"== {name}", flush=True)
        machine, started_s, rows = describe_machine(), time.monotonic(), []
        for row in PARTS[name].run(quick=asked.quick, **more):
            rows.append(row)
            text = table([row], *PARTS[name].COLUMNS).splitlines()
            print(*(text if len(rows) == 1 else text[2:]), sep="\n", flush=True)
        outcome = {"machine": machine, "seconds": time.monotonic() - started_s, "rows": rows}
        if not asked.quick:
            write_json(asked.results / f"serving-{name}.json", outcome)
    if asked.results == RESULTS and not asked.quick:
        PAGE.write()


if __name__ == "__main__":
    main()
