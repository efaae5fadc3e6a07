"""The fault matrix: every fault against every kind of fleet, what is promised and what came.

    python -m benchmarks.faults            # all of it, as root: about 15 minutes
    python -m benchmarks.faults --faults hang crash --kinds stacked

Real agents, real signals; links by a relay on loopback and, as root, by network namespaces with
`tc tbf`. As root it runs in a network and a mount namespace of its own, so that nothing of it is
left behind. What cannot be made on this machine is listed as not run, with the reason. The exit
code is 1 if a promise was not kept. Faults and promises are in benchmarks/faults/table.py.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.faults.page import write_page
from benchmarks.faults.promises import Kind, summary
from benchmarks.faults.runs import Pace, Run, run_cell
from benchmarks.faults.scene import Scene, Where
from benchmarks.faults.table import FAULTS, Fault
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp.errors import InferenceError
from mdp.files import write_json

#: Says that this process has namespaces of its own already.
INSIDE = "--inside"


def go_inside(arguments: Sequence[str]) -> None:
    """Start again in namespaces of its own, if that is allowed here; else return."""
    if os.geteuid() != 0 or INSIDE in arguments:
        return
    apart = ["unshare", "--net", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode == 0:
        again = [sys.executable, "-m", "benchmarks.faults", INSIDE, *arguments]
        os.execvp(apart[0], [*apart, *again])


def row(fault: Fault, kind: Kind, run: Run, seconds: float) -> dict[str, Any]:
    under = run.of("turning", "faulty")
    errors = sum(isinstance(call.outcome, InferenceError) for call in run.calls)
    return {
        "fault": fault.name,
        "kind": kind,
        "where": fault.where,
        "came": summary(under),
        "kept": not run.broken,
        "broken": run.broken,
        "calls": len(run.calls),
        "answers": len(run.calls) - errors,
        "errors": errors,
        "calls_under_fault": len(under),
        "waited": sum(call.waited for call in under),
        "overshoot_ms": max(call.overshoot_ms for call in run.calls),
        "known_s": run.known_s,
        "back_s": run.back_s,
        "seconds": seconds,
    }


def run_kind(kind: Kind, faults: Sequence[Fault], folder: Path, pace: Pace) -> list[dict[str, Any]]:
    """Every fault against one kind of fleet; what needs no fleet of its own shares one."""
    rows, scenes = [], dict[Where, Scene]()
    with ExitStack() as stack:
        for fault in faults:
            shared = fault.where in ("relay", "name")
            where: Where = "loopback" if shared else fault.where
            if where not in scenes:
                scene = Scene(folder / f"{kind}-{where}", kind, where)
                scenes[where] = stack.enter_context(scene)
            started_s = time.monotonic()
            run = run_cell(scenes[where], fault, kind, pace)
            rows.append(row(fault, kind, run, time.monotonic() - started_s))
            said = "kept" if not run.broken else "NOT KEPT"
            print(f"{kind:9} {fault.name:19} {said:8} {rows[-1]['came']}", flush=True)
            for text in run.broken:
                print(f"    {text}", flush=True)
    return rows


def main() -> None:
    go_inside(sys.argv[1:])
    parser = argparse.ArgumentParser(description="Promised and kept, fault by fault.")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--deadline-ms", type=float, default=Pace().deadline_ms)
    parser.add_argument("--grace-ms", type=float, default=Pace().grace_ms)
    parser.add_argument("--out", type=Path, help="default, for all faults and kinds: what is kept")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    machine, started_s = describe_machine(), time.monotonic()
    asked = [fault for fault in FAULTS if fault.name in options.faults]
    hindered = {fault.name: why for fault in asked if (why := fault.hindered())}
    pace = replace(Pace(), deadline_ms=options.deadline_ms, grace_ms=options.grace_ms)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            possible = [fault for fault in asked if fault.name not in hindered]
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
             "not_run": hindered.get(f.name, "")} for f in asked
        ],
        "rows": rows,
    }  # fmt: skip
    whole = len(asked) == len(FAULTS) and len(options.kinds) == len(get_args(Kind))
    if options.out is not None or whole:
        write_json(options.out or RESULTS / "faults.json", result)
    if options.out is None and whole:
        write_page()
    sys.exit(0 if all(row["kept"] for row in rows) else 1)


if __name__ == "__main__":
    main()
