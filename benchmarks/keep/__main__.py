"""Keep the figures of `make fuzz`, `test-arm`, `test-gpu` or `cluster` in the results and pages.

    python -m benchmarks.keep fuzz|arm|gpu|deployed-cluster

These leave their figures in runs/; the machine is added, so run it on the same one.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp import console
from mdp.errors import InputError
from mdp.files import write_json

RUNS = Path(__file__).parents[2] / "runs"
FOUND = {
    "fuzz": "fuzz/figures.json",
    "arm": "arm.json",
    "gpu": "gpu.json",
    "deployed-cluster": "cluster/figures.json",
}


def main() -> None:
    """Write the results, and the page that shows them; raises InputError."""
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    if what not in FOUND:
        raise InputError(f"expected one of {', '.join(FOUND)}, got {what!r}")
    found = RUNS / FOUND[what]
    if not found.is_file():
        raise InputError(f"{found}: not there: expected the figures of the target of make")
    measured = json.loads(found.read_text())
    rows = {"rows": measured} if what == "fuzz" else measured
    write_json(RESULTS / f"{what}.json", {"machine": describe_machine(), **rows})
    if what in PAGES:
        PAGES[what].write()


def fuzz_figures() -> str:
    """One row for each target."""
    rows, machine = read_result("fuzz")["rows"], read_result("fuzz")["machine"]
    total, found = sum(row["inputs"] for row in rows), [r for r in rows if r["finding"]]
    verdict = (
        f"{len(found)} targets with a finding"
        if found
        else "no crash, no hang, no process beyond its memory"
    )
    summary = (
        f"{total:,} inputs, {verdict}; {machine['cores']} virtual cores shared with other work, "
        f"{machine['processor']}, {machine['date']}."
    )
    targets = table(
        rows,
        ("target", _target),
        ("inputs", "{inputs:,}"),
        ("accepted", "{accepted_share:.1%}"),
        ("growth, KiB a million inputs", _growth),
    )
    return f"{summary}\n\n{targets}"


def _target(row: Mapping[str, Any]) -> str:
    """The target, and the date where it was run by itself."""
    return f"{row['target']} ({row['date']})" if "date" in row else f"{row['target']}"


def _growth(row: Mapping[str, Any]) -> str:
    growth = row["growth_kib_per_million"]
    return "too short to say" if growth is None else f"{round(growth):,}"


def arm_figures() -> str:
    """The emulated agent's answers against those of this machine's."""
    rows, machine = read_result("arm")["rows"], read_result("arm")["machine"]
    summary = (
        f"{rows[0]['pictures']} pictures, {read_result('arm')['processor']} emulated on "
        f"{machine['cores']} virtual cores, {machine['processor']}, "
        f"load {machine['load_before']} before, {machine['date']}."
    )
    members = table(
        rows,
        ("sub-model", "{device}"),
        ("precision", "{precision}"),
        ("largest difference", "{largest_difference:.2g}"),
        ("same label", "{same_label}/{pictures}"),
    )
    return f"{summary}\n\n{members}"


#: What a row says, and how, of the figures of `make cluster`.
CLUSTER = (
    ("three nodes Ready, with API server, scheduler and controllers", "{nodes_ready_s:.0f} s"),
    ("images given to three nodes", "{images_loaded_s:.0f} s"),
    ("two gateways ready, which without agents say why", "{gateways_ready_s:.0f} s"),
    ("devices put on the nodes until an answer of all three over HTTPS", "{agents_answer_s:.0f} s"),
    ("an answer of all three", "{answer_s:.2f} s"),
    ("resident: an agent, a gateway", "{mdp-agent_mb:.0f} MB, {mdp-gateway_mb:.0f} MB"),
    ("resident: the cluster's own programs", "{cluster_mb:.0f} MB"),
    (
        "an agent's pod deleted among calls: stopped, whole again",
        "{agent_pod_stops_s:.0f} s, {agent_pod_replaced_s:.0f} s",
    ),
    (
        "... calls; those that it was missed in, by name; lost",
        "{calls_while_deleted:.0f}; {partial_while_deleted:.0f}; 0",
    ),
    ("an agent killed: whole again", "{agent_killed_s:.0f} s"),
    (
        "gateways replaced among calls; calls, lost",
        "{gateways_replaced_s:.0f} s; {gateways_replaced_calls:.0f}, {gateways_replaced_lost:.0f}",
    ),
    (
        "a node with a gateway drained among calls; calls, lost",
        "{node_drained_s:.0f} s; {node_drained_calls:.0f}, {node_drained_lost:.0f}",
    ),
    (
        "another bundle, all pods at once; of that without an answer (503, with the reasons)",
        "{upgrade_s:.0f} s; {upgrade_silent_s:.0f} s",
    ),
    ("another bundle, device by device; calls lost", "{by_hand_s:.0f} s; 0"),
)


def cluster_figures() -> str:
    """Times and sizes of the chart in a cluster."""
    found = read_result("deployed-cluster")
    machine = found["machine"]
    summary = (
        f"Kubernetes {found['kubernetes'].removeprefix('v')}, {found['nodes']} nodes on "
        f"{machine['cores']} virtual cores with other work on them (load "
        f"{machine['load_before']:.0f} at the end), {machine['processor']}, {machine['date']}: "
        "times are upper bounds, of one run."
    )
    rows = [(what, shown.format(**found)) for what, shown in CLUSTER]
    return f"{summary}\n\n{table(rows, ('what', '{0[0]}'), ('measured', '{0[1]}'))}"


PAGES = {
    "deployed-cluster": Page("benchmarks.keep deployed-cluster", cluster_figures),
    "fuzz": Page("benchmarks.keep fuzz", fuzz_figures),
    "arm": Page("benchmarks.keep arm", arm_figures),
}


if __name__ == "__main__":
    console.run(main, "benchmarks.keep")
