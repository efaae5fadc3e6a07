"""Puts what `make fuzz`, `make test-arm` or `make test-gpu` measured into the results and pages.

    python -m benchmarks.keep fuzz|arm|gpu

Those write what they have measured into runs/; this adds the machine, so it is for the same one.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from mdp.errors import InputError
from mdp.files import write_json

ROOT = Path(__file__).parents[2]
#: Where each is found.
FOUND = {"fuzz": "fuzz/figures.json", "arm": "arm.json", "gpu": "gpu.json"}


def keep(what: str, runs: Path) -> None:
    """Write results/`what`.json, and the page that shows it; raises InputError."""
    found = runs / FOUND[what]
    if not found.is_file():
        raise InputError(f"{found}: not there: expected what `make fuzz` or `make test-*` leaves")
    measured = json.loads(found.read_text())
    rows = {"rows": measured} if what == "fuzz" else measured
    write_json(RESULTS / f"{what}.json", {"machine": describe_machine(), **rows})
    if what in PAGES:
        PAGES[what].write()


def fuzz_figures() -> str:
    """One row for each target."""
    rows, machine = kept("fuzz")["rows"], kept("fuzz")["machine"]
    total, found = sum(row["inputs"] for row in rows), [r for r in rows if r["finding"]]
    verdict = (
        f"{len(found)} targets with a finding"
        if found
        else "no crash, no hang, no process beyond its memory"
    )
    said = (
        f"{total:,} inputs, {verdict}; {machine['cores']} virtual cores shared with other work, "
        f"{machine['processor']}, {machine['date']}."
    )
    targets = table(
        rows,
        ("target", "{target}"),
        ("inputs", "{inputs:,}"),
        ("accepted", "{accepted_share:.1%}"),
        ("a second of one core", lambda r: f"{r['inputs'] / max(0.1, r['processor_s']):,.0f}"),
        ("branches", "{branches}"),
        ("slowest ms", "{slowest_input_ms:.0f}"),
        ("peak MiB", "{peak_mib:.0f}"),
        ("growth, KiB a million inputs", _growth),
    )
    return f"{said}\n\n{targets}"


def _growth(row: Mapping[str, Any]) -> str:
    growth = row["growth_kib_per_million"]
    return "too short to say" if growth is None else f"{round(growth):,}"


def arm_figures() -> str:
    """What the agent of the other architecture gave beside the one of this machine."""
    rows, machine = kept("arm")["rows"], kept("arm")["machine"]
    said = (
        f"{rows[0]['pictures']} pictures, {kept('arm')['processor']} emulated on "
        f"{machine['cores']} virtual cores, {machine['processor']}, "
        f"load {machine['load_before']} before, {machine['date']}."
    )
    members = table(
        rows,
        ("sub-model", "{device}"),
        ("precision", "{precision}"),
        ("largest logit", "{largest_logit:.2f}"),
        ("largest difference", "{largest_difference:.2g}"),
        ("same label", "{same_label}/{pictures}"),
        ("READY after s, here", "{start_s[here]:.1f}"),
        ("emulated", "{start_s[arm]:.1f}"),
    )
    return f"{said}\n\n{members}"


PAGES = {
    "fuzz": Page("benchmarks.keep fuzz", fuzz_figures),
    "arm": Page("benchmarks.keep arm", arm_figures),
}


def main() -> None:
    """Keep one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=FOUND)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    options = parser.parse_args()
    keep(options.what, options.runs)


if __name__ == "__main__":
    main()
