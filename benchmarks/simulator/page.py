"""The simulator against real fleets, as figures for its page and a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import kept, measured_on
from benchmarks.harness.tables import table

AGENTS = {"computing": "Agents that compute", "waiting": "Agents that wait"}
#: The band of the picture, as a relative error.
_BAND = 0.15


def markdown() -> str:
    parts = ["![simulated against measured latency](simulation.svg)"]
    for agents, title in AGENTS.items():
        found = kept(f"simulator-{agents}")
        parts += [f"**{title}** ({measured_on(found['machine'])})", reality_table(found["reality"])]
    found = kept("simulator-speed")
    speeds = table(
        found["speed"],
        ("fleet", "{fleet}"),
        ("member-requests", "{member_requests:,}"),
        ("a second of one core", "{per_s:,}"),
    )
    return "\n\n".join([*parts, f"**Speed** ({measured_on(found['machine'])})", speeds])


def reality_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        rows,
        ("load", "{load}"),
        ("deadline ms", "{deadline_ms:g}"),
        ("p50 ms (simulated)", "{p50[measured]:.2f} ({p50[error]:+.0%})"),
        ("p99 ms (simulated)", "{p99[measured]:.2f} ({p99[error]:+.0%})"),
        ("complete", "{complete[measured]:.1%}"),
        ("simulated", "{complete[simulated]:.1%}"),
    )


def draw() -> bytes:
    def panels(canvas: "figure.Figure") -> None:
        grid = canvas.subplots(len(AGENTS), 2, squeeze=False)
        for (latency, complete), (agents, title) in zip(grid, AGENTS.items(), strict=True):
            rows = kept(f"simulator-{agents}")["reality"]
            figure.diagonal(latency, _dots(latency, rows, "p50", "p99"), _BAND)
            latency.set_title(f"{title}: latency, ms")
            _dots(complete, rows, "complete")
            complete.plot([0, 1], [0, 1], color=figure.MIDDLE, linewidth=0.8)
            complete.set_aspect("equal")
            complete.set_title(f"{title}: complete answers")
            for axes in (latency, complete):
                axes.set_xlabel("measured")
                axes.set_ylabel("simulated")
                axes.legend(loc="upper left")

    return figure.drawn(9.0, 4.2 * len(AGENTS), panels)


def _dots(axes: "figure.Axes", rows: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    """A dot for each row and figure; returns all of their values."""
    values = []
    for name, colour in zip(names, (figure.BLUE, figure.RED), strict=False):
        real, simulated = ([row[name][how] for row in rows] for how in ("measured", "simulated"))
        axes.plot(real, simulated, "o", color=colour, markersize=5, label=name)
        values += real + simulated
    return values


PAGE = Page("benchmarks.simulator", markdown, draw)
