"""The fault matrix as figures for its page."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table


def figures() -> str:
    result = read_result("faults")
    rows, faults = result["rows"], result["faults"]
    worst_ms = max(row["overshoot_ms"] for row in rows)
    beyond = f"the last one ended {worst_ms:.1f} ms after its deadline"
    if worst_ms <= 0:
        beyond = f"every one ended at least {-worst_ms:.1f} ms before its deadline"
    verdict = (
        f"{format_machine(result['machine'])}: {sum(row['kept'] for row in rows)} of {len(rows)} "
        f"promises kept in {sum(row['calls'] for row in rows):,} calls with a deadline of "
        f"{result['deadline_ms']:g} ms; {beyond}. It took {result['seconds'] / 60:.0f} minutes."
    )
    return f"{verdict}\n\n{_matrix(faults, rows)}"


def _matrix(faults: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """A row per fault: calls that waited in each kind of fleet, and the worst of all kinds."""
    cells = {(row["fault"], row["kind"]): row for row in rows}

    def cell(fault: dict[str, Any], kind: str) -> object:
        row = cells.get((fault["fault"], kind))
        if row is None:
            return f"not run: {fault['not_run']}" if fault["not_run"] else "not run"
        return row["waited"] if row["kept"] else "**not kept**: " + "; ".join(row["broken"])

    def worst(key: str, form: str) -> Callable[[dict[str, Any]], str]:
        def text(fault: dict[str, Any]) -> str:
            of = (row[key] for row in rows if row["fault"] == fault["fault"])
            known = [value for value in of if value is not None]
            return format(max(known), form) if known else ""

        return text

    return table(
        faults,
        ("fault", "{fault}"),
        ("how it is made", "{made}"),
        *((kind, lambda fault, kind=kind: cell(fault, kind))
          for kind in dict.fromkeys(row["kind"] for row in rows)),
        ("worst ms", worst("overshoot_ms", "+.1f")),
        ("known s", worst("known_s", ".1f")),
        ("back s", worst("back_s", ".1f")),
    )  # fmt: skip


PAGE = Page("benchmarks.faults", figures)
