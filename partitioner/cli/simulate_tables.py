"""Output of `mdp-partition simulate`: tables on stdout."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from partitioner.simulation.outcome import Outcome
from partitioner.simulation.what_ifs import Comparison

#: Rows of devices at most.
MOST_DEVICES = 20


def print_comparisons(compared: Sequence[Comparison], title: str, notes: Sequence[str]) -> None:
    """Tables of the calls, the devices, and the what-ifs."""
    console = Console()
    modes = sorted({mode for one in compared for mode in one.base.modes})
    table = Table(
        "deadline", "accuracy", "answered", "complete", "p50 ms", "p99", "p99.9", "per s",
        title=title,
    )  # fmt: skip
    shares = Table("deadline", *modes, "no answer", title="modes")
    for one in compared:
        base, ms = one.base, one.base.latency_ms
        deadline = f"{one.deadline_ms:g} ms"
        table.add_row(
            deadline, accuracy_of(base), f"{base.answered:.2%}", f"{base.complete:.2%}",
            f"{ms.p50:.2f}", f"{ms.p99:.2f}", f"{ms.p999:.2f}", f"{base.throughput_per_s:.1f}",
        )  # fmt: skip
        counted = [base.modes.get(mode, 0.0) for mode in modes]
        shares.add_row(deadline, *(f"{share:.2%}" for share in (*counted, 1 - base.answered)))
    console.print(table)
    console.print(shares)
    console.print(_devices(compared))
    if compared[0].what_if:
        console.print(_changes(compared))
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)


def accuracy_of(outcome: Outcome) -> str:
    """The accuracy, or its lower bound, or `?`."""
    if outcome.accuracy is not None:
        return f"{outcome.accuracy:.2%}"
    return f">= {outcome.accuracy_at_least:.2%}" if outcome.accuracy_at_least else "?"


def _devices(compared: Sequence[Comparison]) -> Table:
    table = Table(
        "deadline", "device", "k", "busy", "asked", "used", "too late", "full", title="devices"
    )
    for one in compared:
        parts = one.base.devices
        for name in list(parts)[:MOST_DEVICES]:
            part = parts[name]
            table.add_row(
                f"{one.deadline_ms:g} ms", name, str(part.k), f"{part.utilisation:.1%}",
                f"{part.asked:,}", f"{part.used:,}", f"{part.late + part.too_late:,}",
                f"{part.overloaded:,}",
            )  # fmt: skip
        if len(parts) > MOST_DEVICES:
            table.add_row("", f"and {len(parts) - MOST_DEVICES:,} more")
        table.add_section()
    return table


def _changes(compared: Sequence[Comparison]) -> Table:
    table = Table(
        "deadline", "what if", "accuracy", "answered", "complete", "p50 ms", "p99",
        title="what changes",
    )  # fmt: skip
    lowered = any(each.lowered for one in compared for each in (one.base, *one.what_if.values()))
    if lowered:
        table.add_column("lowered")
    for one in compared:
        for name, outcome in {"as it is": one.base, **one.what_if}.items():
            ms = outcome.latency_ms
            table.add_row(
                f"{one.deadline_ms:g} ms", name, accuracy_of(outcome), f"{outcome.answered:.2%}",
                f"{outcome.complete:.2%}", f"{ms.p50:.2f}", f"{ms.p99:.2f}",
                *([f"{outcome.lowered:.2%}"] if lowered else []),
            )  # fmt: skip
        table.add_section()
    return table
