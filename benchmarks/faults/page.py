"""The fault matrix as it stands in docs/results/reliability.md."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.page import write_figures

WRITER = "benchmarks.faults"


def write_page(page: Path, result: dict[str, Any]) -> None:
    """Put what was run between the marks of `page`; raises InputError where these are missing."""
    write_figures(page, WRITER, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """What was run, how each fault was made, and what became of each promise."""
    rows, machine = result["rows"], result["machine"]
    kept = sum(row["kept"] for row in rows)
    calls = sum(row["calls"] for row in rows)
    worst_ms = max(row["overshoot_ms"] for row in rows)
    beyond = f"the last one ended {worst_ms:.1f} ms after its deadline"
    if worst_ms <= 0:
        beyond = f"every one ended at least {-worst_ms:.1f} ms before its deadline"
    said = (
        f"Run on {machine['date']} ({machine['processor']}, {machine['cores']} cores, load before "
        f"the run {machine['load_before']:g}): "
        f"{kept} of {len(rows)} promises kept in {calls:,} calls with a deadline of "
        f"{result['deadline_ms']:g} ms; {beyond}. It took {result['seconds'] / 60:.0f} minutes."
    )
    parts = [said, _made(result["faults"]), _matrix(result["faults"], rows)]
    return "\n\n".join(parts)


def _made(faults: Iterable[dict[str, Any]]) -> str:
    return _table(
        ("fault", "how it is made", "how it is healed", "run"),
        (
            (f["fault"], f["made"], f["healed"], f"no: {f['not_run']}" if f["not_run"] else "yes")
            for f in faults
        ),
    )


def _matrix(faults: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """A row per fault: what became of the promise in each fleet, and the worst of all fleets."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["fault"], row["kind"]): row for row in rows}

    def cell(fault: str, kind: str) -> str:
        found = cells.get((fault, kind))
        if found is None:
            return "not run"
        if found["kept"]:
            return f"kept, {found['waited']}"
        return "**not kept**: " + "; ".join(found["broken"])

    def worst(fault: str, key: str, form: str) -> str:
        values = [row[key] for row in rows if row["fault"] == fault and row[key] is not None]
        return format(max(values), form) if values else ""

    return _table(
        ("fault", *kinds, "worst ms", "known s", "back s"),
        (
            (
                name, *(cell(name, kind) for kind in kinds), worst(name, "overshoot_ms", "+.1f"),
                worst(name, "known_s", ".1f"), worst(name, "back_s", ".1f"),
            )
            for name in (fault["fault"] for fault in faults)
        ),
    )  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
