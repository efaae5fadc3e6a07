"""The fault matrix: every fault against every kind of fleet, promised and measured.

    python -m benchmarks.faults            # all of it, as root: about 15 minutes
    python -m benchmarks.faults --faults hang crash --kinds stacked --out runs/faults.json

Real agents and signals; links by a relay on loopback and, as root, by network namespaces with
`tc tbf`. As root it runs in a network and a mount namespace of its own, which leaves nothing
behind. A fault that cannot be made on this machine is listed as not run, with the reason. The exit
code is 1 if a promise was broken. Faults and promises: benchmarks/faults/table.py.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from benchmarks.faults.page import PAGE
from benchmarks.faults.promises import Kind, summary
from benchmarks.faults.runs import Pace, Run, run_cell
from benchmarks.faults.scene import Scene, Where
from benchmarks.faults.table import FAULTS, Fault
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from mdp.errors import InferenceError
from mdp.files import write_json

#: Set in a process that has namespaces of its own.
INSIDE = "--inside"


def enter_namespaces(options: Sequence[str]) -> None:
    """Start again in namespaces of its own, if that is allowed here; else return."""
    if os.geteuid() != 0 or INSIDE in options:
        return
    apart = ["unshare", "--net", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode == 0:
        again = [sys.executable, "-m", "benchmarks.faults", INSIDE, *options]
        os.execvp(apart[0], [*apart, *again])


def row(fault: Fault, kind: Kind, run: Run, seconds: float) -> dict[str, Any]:
    under = run.of("turning", "faulty")
    errors = sum(isinstance(call.outcome, InferenceError) for call in run.calls)
    return {
        "fault": fault.name, "kind": kind, "where": fault.where, "came": summary(under),
        "kept": not run.broken, "broken": run.broken, "calls": len(run.calls),
        "answers": len(run.calls) - errors, "errors": errors, "calls_under_fault": len(under),
        "waited": sum(call.waited for call in under),
        "overshoot_ms": max(call.overshoot_ms for call in run.calls),
        "known_s": run.known_s, "back_s": run.back_s, "seconds": seconds,
    }  # fmt: skip


def run_kind(kind: Kind, faults: Sequence[Fault], folder: Path, pace: Pace) -> list[dict[str, Any]]:
    """Every fault against one kind of fleet; those without a fleet of their own share one."""
    rows, scenes = [], dict[Where, Scene]()
    with ExitStack() as stack:
        for fault in faults:
            where: Where = "loopback" if fault.where in ("relay", "name") else fault.where
            if where not in scenes:
                scene = Scene(folder / f"{kind}-{where}", kind, where)
                scenes[where] = stack.enter_context(scene)
            started_s = time.monotonic()
            run = run_cell(scenes[where], fault, kind, pace)
            rows.append(row(fault, kind, run, time.monotonic() - started_s))
            verdict = "kept" if not run.broken else "NOT KEPT"
            print(f"{kind:9} {fault.name:19} {verdict:8} {rows[-1]['came']}", flush=True)
            for text in run.broken:
                print(f"    {text}", flush=True)
    return rows


def main() -> None:
    enter_namespaces(sys.argv[1:])
    asked = arguments(
        __doc__, INSIDE[2:], faults=tuple(fault.name for fault in FAULTS), kinds=get_args(Kind),
        deadline_ms=Pace().deadline_ms, grace_ms=Pace().grace_ms, out=RESULTS / "faults.json",
    )  # fmt: skip
    if asked.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    machine, started_s = describe_machine(), time.monotonic()
    chosen = [fault for fault in FAULTS if fault.name in asked.faults]
    hindered = {fault.name: why for fault in chosen if (why := fault.hindered())}
    pace = Pace(deadline_ms=asked.deadline_ms, grace_ms=asked.grace_ms)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for kind in asked.kinds:
            possible = [fault for fault in chosen if fault.name not in hindered]
            rows += run_kind(kind, possible, Path(name), pace)
    for fault_name, why in hindered.items():
        print(f"{fault_name}: not run: {why}")
    result = {
        "machine": machine,
        "deadline_ms": pace.deadline_ms,
        "grace_ms": pace.grace_ms,
        "seconds": time.monotonic() - started_s,
        "faults": [
            {"fault": f.name, "made": f.made, "healed": f.healed, "where": f.where,
             "not_run": hindered.get(f.name, "")} for f in chosen
        ],
        "rows": rows,
    }  # fmt: skip
    kept = asked.out == RESULTS / "faults.json"
    whole = len(chosen) == len(FAULTS) and len(asked.kinds) == len(get_args(Kind))
    if whole or not kept:
        write_json(asked.out, result)
    if whole and kept:
        PAGE.write()
    sys.exit(0 if all(row["kept"] for row in rows) else 1)


if __name__ == "__main__":
    main()
