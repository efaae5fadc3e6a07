"""The fault matrix as it stands in docs/reliability.md."""

from collections.abc import Sequence
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
        ("how it is made", "{made}"),
        ("how it is healed", "{healed}"),
        ("run", lambda f: f"no: {f['not_run']}" if f["not_run"] else "yes"),
    )
    return "\n\n".join([said, made, _matrix(faults, rows), _details(rows)])


def _matrix(faults: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    kept_ = {(row["fault"], row["kind"]): row["kept"] for row in rows}
    words = {None: "not run", True: "kept", False: "**not kept**"}
    kinds = dict.fromkeys(row["kind"] for row in rows)
    cells = [(kind, lambda f, kind=kind: words[kept_.get((f["fault"], kind))]) for kind in kinds]
    return table(faults, ("fault", "{fault}"), *cells)


def _details(rows: Sequence[dict[str, Any]]) -> str:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    return table(
        rows,
        ("fault", "{fault}"),
        ("fleet", "{kind}"),
        ("promised", "{promised}"),
        ("came", "{came}"),
        ("kept", lambda r: "yes" if r["kept"] else "**no**: " + "; ".join(r["broken"])),
        ("calls", "{calls}"),
        ("waited", "{waited}"),
        ("worst ms", "{overshoot_ms:+.1f}"),
        ("known s", lambda row: seconds(row["known_s"])),
        ("back s", lambda row: seconds(row["back_s"])),
    )


PAGE = Page("reliability.md", "benchmarks.faults", lambda: markdown(kept("faults")))
