"""The simulator against reality: as a table for docs/results/simulation.md, and as a picture."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.page import write_figures

#: What kinds of agents are called, in order.
AGENTS = {"computing": "Agents that compute", "waiting": "Agents that wait"}
#: Parts of a result, the same of each build.
SPEEDS = ("speed", "speed_compiled")
#: Where there are any, these milliseconds are written at the axes.
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MARKERS = {"apart": "o", "together": "x"}
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


def put_table(page: Path, found: Mapping[str, Any]) -> None:
    """Write what was measured between the marks of `page`, those parts that there are."""
    machines = found["machines"]
    text = "![simulated against measured latency](simulation.svg)\n\n"
    for agents, said in AGENTS.items():
        rows = [row for row in found["reality"] if row["agents"] == agents]
        late = [row for row in found["woken_late"] if row["agents"] == agents]
        if rows:
            text += f"**{said}** ({measured_on(machines[agents])})\n\n{HEADER}{markdown(rows)}\n"
            text += woken_late(late) + "\n"
    if builds := [name for name in SPEEDS if name in found]:
        each = "; ".join(measured_on(machines[name]) for name in builds)
        text += f"**Speed** ({each})\n\n{speeds([found[name] for name in builds])}"
    write_figures(page, "benchmarks.simulator", text)


def measured_on(machine: Mapping[str, Any]) -> str:
    """The machine, the moment and the build of a part's run."""
    # Until there were compiled ones, results did not say.
    build = "compiled" if machine.get("compiled") else "interpreted"
    return (
        f"{machine['cores']} virtual cores, {machine['processor']}, load {machine['load_before']} "
        f"before the run, {machine['date']}, {build}"
    )


def woken_late(late: Sequence[Mapping[str, Any]]) -> str:
    """The table of how late a client was woken, with its header."""
    text = (
        "| load | deadline ms | calls that it cut | woken late, ms: p50 | p90 | p99 |\n"
        "|---|---|---|---|---|---|\n"
    )
    return text + "".join(
        f"| {r['load']} | {r['deadline_ms']:g} | {r['cut']:,} "
        f"| {r['p50']:.2f} | {r['p90']:.2f} | {r['p99']:.2f} |\n"
        for r in late
    )


def speeds(builds: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The table of how fast the simulator is, in each build, with its header."""
    text = (
        f"| fleet | member-requests | a second of one core |{' compiled |' * (len(builds) - 1)}\n"
    )
    text += f"|---|---|{'---|' * len(builds)}\n"
    for same in zip(*builds, strict=True):
        rates = " | ".join(f"{row['per_s']:,}" for row in same)
        text += f"| {same[0]['fleet']} | {same[0]['member_requests']:,} | {rates} |\n"
    return text


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """An SVG: simulated against measured; latency and complete answers, for each kind of agents."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    kinds = [agents for agents in AGENTS if any(row["agents"] == agents for row in rows)]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 4.2 * len(kinds)), layout="constrained")
        FigureCanvasSVG(figure)
        for panels, agents in zip(
            figure.subplots(len(kinds), 2, squeeze=False), kinds, strict=True
        ):
            chosen = [row for row in rows if row["agents"] == agents]
            _latencies(panels[0], chosen)
            panels[0].set_title(f"{AGENTS[agents]}: latency; the band is 15 %")
            _shares(panels[1], chosen)
            panels[1].set_title(f"{AGENTS[agents]}: complete answers")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _latencies(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for drawn, marker in MARKERS.items():
        for point, colour in (("p50", "tab:blue"), ("p99", "tab:red")):
            chosen = [row[point] for row in rows if row["drawn"] == drawn]
            axes.loglog(
                [value["measured"] for value in chosen],
                [value["simulated"] for value in chosen],
                marker,
                color=colour,
                label=f"{point}, drawn {drawn}",
            )
    values = [row[point][how] for row in rows for point in ("p50", "p99")
              for how in ("measured", "simulated")]  # fmt: skip
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], alpha=0.15)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    ticks = [ms for ms in TICKS_MS if ends[0] <= ms <= ends[1]]
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ticks, [f"{ms:g}" for ms in ticks])
        set_ticks([], minor=True)
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("simulated, ms")
    axes.legend()


def _shares(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for drawn, marker in MARKERS.items():
        chosen = [row["complete"] for row in rows if row["drawn"] == drawn]
        axes.plot(
            [value["measured"] for value in chosen],
            [value["simulated"] for value in chosen],
            marker,
            color="tab:blue",
            label=f"drawn {drawn}",
        )
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    axes.set_xlabel("measured")
    axes.set_ylabel("simulated")
    axes.legend()
