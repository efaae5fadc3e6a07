"""The simulator against reality: figures for its page, and a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import kept, measured_on
from benchmarks.harness.tables import table

#: What kinds of agents are called, in order.
AGENTS = {"computing": "Agents that compute", "waiting": "Agents that wait"}
_MARKERS = {"apart": "o", "together": "x"}
#: The band of the picture, as a relative error.
_BAND = 0.15


def markdown(found: Mapping[str, Any]) -> str:
    machines = found["machines"]
    parts = ["![simulated against measured latency](simulation.svg)"]
    for agents, said in AGENTS.items():
        rows = [row for row in found["reality"] if row["agents"] == agents]
        late = [row for row in found["woken_late"] if row["agents"] == agents]
        if rows:
            parts += [
                f"**{said}** ({measured_on(machines[agents])})",
                reality_table(rows),
                _late(late),
            ]
    if speed := found.get("speed"):
        parts += [f"**Speed** ({measured_on(machines['speed'])})", _speeds(speed)]
    return "\n\n".join(parts)


def reality_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        rows,
        ("load", "{load}"),
        ("deadline ms", "{deadline_ms:g}"),
        ("drawn", "{drawn}"),
        ("p50 real", "{p50[measured]:.2f}"),
        ("simulated", "{p50[simulated]:.2f} ({p50[error]:+.0%})"),
        ("p99 real", "{p99[measured]:.2f}"),
        ("simulated", "{p99[simulated]:.2f} ({p99[error]:+.0%})"),
        ("complete real", "{complete[measured]:.1%}"),
        ("simulated", "{complete[simulated]:.1%}"),
    )


def _late(late: Sequence[Mapping[str, Any]]) -> str:
    return table(
        late,
        ("load", "{load}"),
        ("deadline ms", "{deadline_ms:g}"),
        ("calls that it cut", "{cut:,}"),
        ("woken late, ms: p50", "{p50:.2f}"),
        ("p90", "{p90:.2f}"),
        ("p99", "{p99:.2f}"),
    )


def _speeds(fleets: Sequence[Mapping[str, Any]]) -> str:
    return table(
        fleets,
        ("fleet", "{fleet}"),
        ("member-requests", "{member_requests:,}"),
        ("a second of one core", "{per_s:,}"),
    )


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    kinds = [agents for agents in AGENTS if any(row["agents"] == agents for row in rows)]

    def panels(canvas: "figure.Figure") -> None:
        grid = canvas.subplots(len(kinds), 2, squeeze=False)
        for (latency, complete), agents in zip(grid, kinds, strict=True):
            chosen = [row for row in rows if row["agents"] == agents]
            values = _dots(latency, chosen, {"p50": figure.BLUE, "p99": figure.RED})
            figure.diagonal(latency, values, _BAND)
            latency.set_title(f"{AGENTS[agents]}: latency, ms")
            _dots(complete, chosen, {"complete": figure.BLUE})
            complete.plot([0, 1], [0, 1], color=figure.MIDDLE, linewidth=0.8)
            complete.set_aspect("equal")
            complete.set_title(f"{AGENTS[agents]}: complete answers")
            for axes in (latency, complete):
                axes.set_xlabel("measured")
                axes.set_ylabel("simulated")
                axes.legend(loc="upper left")

    return figure.drawn(9.0, 4.2 * len(kinds), panels)


def _dots(
    axes: "figure.Axes", rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> list[float]:
    """A dot for each row and figure; returns all of their values."""
    values = []
    for drawn, marker in _MARKERS.items():
        for name, colour in colours.items():
            pairs = [row[name] for row in rows if row["drawn"] == drawn]
            real, said = ([pair[how] for pair in pairs] for how in ("measured", "simulated"))
            label = f"{name}, drawn {drawn}" if len(colours) > 1 else f"drawn {drawn}"
            axes.plot(real, said, marker, color=colour, markersize=5, label=label)
            values += real + said
    return values


PAGE = Page(
    "benchmarks.simulator",
    lambda: markdown(kept("simulator")), lambda: draw(kept("simulator")["reality"]),
)  # fmt: skip
