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
    """What was run, how each fault was made, and every cell of the matrix."""
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
    parts = [said, _made(result["faults"]), _matrix(result["faults"], rows), _details(rows)]
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
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["fault"], row["kind"]): row for row in rows}

    def cell(fault: str, kind: str) -> str:
        found = cells.get((fault, kind))
        if found is None:
            return "not run"
        return "kept" if found["kept"] else "**not kept**"

    names = [fault["fault"] for fault in faults]
    return _table(("fault", *kinds), ((n, *(cell(n, kind) for kind in kinds)) for n in names))


def _details(rows: Iterable[dict[str, Any]]) -> str:
    return _table(
        ("fault", "fleet", "promised", "came", "kept", "calls", "waited", "worst ms", "known s",
         "back s"),
        (
            (
                row["fault"], row["kind"], row["promised"], row["came"],
                "yes" if row["kept"] else "**no**: " + "; ".join(row["broken"]),
                str(row["calls"]), str(row["waited"]), f"{row['overshoot_ms']:+.1f}",
                _seconds(row["known_s"]), _seconds(row["back_s"]),
            )
            for row in rows
        ),
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
