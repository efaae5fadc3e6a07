"""The fault matrix as figures for its page."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import kept, measured_on
from benchmarks.harness.tables import table


def markdown(result: dict[str, Any]) -> str:
    rows, faults = result["rows"], result["faults"]
    worst_ms = max(row["overshoot_ms"] for row in rows)
    beyond = f"the last one ended {worst_ms:.1f} ms after its deadline"
    if worst_ms <= 0:
        beyond = f"every one ended at least {-worst_ms:.1f} ms before its deadline"
    said = (
        f"{measured_on(result['machine'])}: {sum(row['kept'] for row in rows)} of {len(rows)} "
        f"promises kept in {sum(row['calls'] for row in rows):,} calls with a deadline of "
        f"{result['deadline_ms']:g} ms; {beyond}. It took {result['seconds'] / 60:.0f} minutes."
    )
    made = table(
        faults,
        ("fault", "{fault}"),
        (
            "how it is made",
            lambda f: f["made"] + f" (not run: {f['not_run']})" * bool(f["not_run"]),
        ),
    )
    return "\n\n".join([said, made, _matrix(faults, rows)])


def _matrix(faults: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """A row per fault: what became of the promise in each fleet, and the worst of all fleets."""
    cells = {(row["fault"], row["kind"]): row for row in rows}

    def said(kind: str) -> Callable[[dict[str, Any]], object]:
        def cell(fault: dict[str, Any]) -> object:
            found = cells.get((fault["fault"], kind))
            if found is None:
                return "not run"
            if found["kept"]:
                return found["waited"]
            return "**not kept**: " + "; ".join(found["broken"])

        return cell

    def worst(key: str, form: str) -> Callable[[dict[str, Any]], str]:
        def cell(fault: dict[str, Any]) -> str:
            of = [row[key] for row in rows if row["fault"] == fault["fault"]]
            known = [value for value in of if value is not None]
            return format(max(known), form) if known else ""

        return cell

    return table(
        faults,
        ("fault", "{fault}"),
        *((kind, said(kind)) for kind in dict.fromkeys(row["kind"] for row in rows)),
        ("worst ms", worst("overshoot_ms", "+.1f")),
        ("known s", worst("known_s", ".1f")),
        ("back s", worst("back_s", ".1f")),
    )


PAGE = Page("benchmarks.faults", lambda: markdown(kept("faults")))
write_page = PAGE.write
