"""The simulator against reality: as a table for docs/simulation.md, and as a picture."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import write_figures

HEADER = (
    "| load | deadline ms | drawn | p50 real | simulated | p99 real | simulated | complete real "
    "| simulated |\n|---|---|---|---|---|---|---|---|---|\n"
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the table, without its header; latencies in ms."""
    lines = []
    for row in rows:
        p50, p99, complete = row["p50"], row["p99"], row["complete"]
        cells = [
            row["load"], f"{row['deadline_ms']:g}", row["drawn"],
            f"{p50['measured']:.2f}", f"{p50['simulated']:.2f} ({p50['error']:+.0%})",
            f"{p99['measured']:.2f}", f"{p99['simulated']:.2f} ({p99['error']:+.0%})",
            f"{complete['measured']:.1%}", f"{complete['simulated']:.1%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def put_table(
    page: Path,
    rows: Sequence[Mapping[str, Any]],
    late: Sequence[Mapping[str, Any]],
    rates: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
) -> None:
    """Write what was measured between the marks of `page`."""
    text = (
        f"{machine['cores']} virtual cores, {machine['processor']}, load {machine['load_before']} "
        f"before the run, {machine['date']}.\n\n"
        f"![simulated against measured latency](simulation.svg)\n\n{HEADER}{markdown(rows)}\n"
        "| load | deadline ms | calls that it cut | woken late, ms: p50 | p90 | p99 |\n"
        "|---|---|---|---|---|---|\n"
    )
    text += "".join(
        f"| {r['load']} | {r['deadline_ms']:g} | {r['cut']:,} "
        f"| {r['p50']:.2f} | {r['p90']:.2f} | {r['p99']:.2f} |\n"
        for r in late
    )
    text += "\n| fleet | member-requests | a second of one core |\n|---|---|---|\n"
    text += "".join(
        f"| {r['fleet']} | {r['member_requests']:,} | {r['per_s']:,} |\n" for r in rates
    )
    write_figures(page, "benchmarks.simulator", text)


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """An SVG: simulated against measured, one panel for latency and one for complete answers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        latency, complete = figure.subplots(1, 2)
        for drawn, marker in (("apart", "o"), ("together", "x")):
            for point, colour in (("p50", "tab:blue"), ("p99", "tab:red")):
                chosen = [row[point] for row in rows if row["drawn"] == drawn]
                latency.loglog(
                    [value["measured"] for value in chosen],
                    [value["simulated"] for value in chosen],
                    marker,
                    color=colour,
                    label=f"{point}, drawn {drawn}",
                )
        values = [row[point][how] for row in rows for point in ("p50", "p99")
                  for how in ("measured", "simulated")]  # fmt: skip
        ends = [0.8 * min(values), 1.25 * max(values)]
        latency.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], alpha=0.15)
        latency.plot(ends, ends, color="black", linewidth=0.8)
        latency.set_xlabel("measured, ms")
        latency.set_ylabel("simulated, ms")
        latency.set_title("latency; the band is 15 %")
        latency.legend()
        complete.plot(
            [row["complete"]["measured"] for row in rows],
            [row["complete"]["simulated"] for row in rows],
            "o",
        )
        complete.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        complete.set_xlabel("measured")
        complete.set_ylabel("simulated")
        complete.set_title("share of complete answers")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
