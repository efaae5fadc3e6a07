"""Puts what `make fuzz`, `make test-arm` or `make test-gpu` measured into the results and pages.

    python -m benchmarks.keep fuzz|arm|gpu

Those write what they have measured into runs/; this adds the machine, so it is for the same one.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import find, write_figures
from benchmarks.harness.results import RESULTS
from benchmarks.harness.tables import table
from mdp.errors import InputError
from mdp.files import write_json

ROOT = Path(__file__).parents[2]
WRITER = "benchmarks.keep"
#: Where each is found.
FOUND = {"fuzz": "fuzz/figures.json", "arm": "arm.json", "gpu": "gpu.json"}


def keep(what: str, runs: Path) -> None:
    """Write results/`what`.json, and the page that shows it; raises InputError."""
    found = runs / FOUND[what]
    if not found.is_file():
        raise InputError(f"{found}: not there: expected what `make fuzz` or `make test-*` leaves")
    measured, machine = json.loads(found.read_text()), describe_machine()
    if what == "fuzz":
        write_json(RESULTS / "fuzz.json", {"machine": machine, "rows": measured})
        write_figures(find("fuzzing.md"), WRITER, fuzz_table(measured, machine))
        return
    write_json(RESULTS / f"{what}.json", {"machine": machine, **measured})
    if what == "arm":
        figures = arm_table(measured["rows"], measured["processor"], machine)
        write_figures(find("platforms.md"), WRITER, figures)


def fuzz_table(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """One row for each target."""
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


def arm_table(rows: Sequence[Mapping[str, Any]], processor: str, machine: Mapping[str, Any]) -> str:
    """What the agent of the other architecture gave beside the one of this machine."""
    said = (
        f"{rows[0]['pictures']} pictures, {processor} emulated on {machine['cores']} virtual "
        f"cores, {machine['processor']}, load {machine['load_before']} before, "
        f"{machine['date']}."
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


def main() -> None:
    """Keep one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=FOUND)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    options = parser.parse_args()
    keep(options.what, options.runs)


if __name__ == "__main__":
    main()
