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


def markdown() -> str:
    parts = ["![simulated against measured latency](simulation.svg)"]
    for agents, said in AGENTS.items():
        found = kept(f"simulator-{agents}")
        parts += [f"**{said}** ({measured_on(found['machine'])})", reality_table(found["reality"])]
    found = kept("simulator-speed")
    speeds = table(
        found["speed"],
        ("fleet", "{fleet}"),
        ("member-requests", "{member_requests:,}"),
        ("a second of one core", "{per_s:,}"),
    )
    return "\n\n".join([*parts, f"**Speed** ({measured_on(found['machine'])})", speeds])


def reality_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows whose times are drawn for each device on its own; the picture has the others."""
    return table(
        [row for row in rows if row["drawn"] == "apart"],
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
        for (latency, complete), (agents, said) in zip(grid, AGENTS.items(), strict=True):
            rows = kept(f"simulator-{agents}")["reality"]
            values = _dots(latency, rows, {"p50": figure.BLUE, "p99": figure.RED})
            figure.diagonal(latency, values, _BAND)
            latency.set_title(f"{said}: latency, ms")
            _dots(complete, rows, {"complete": figure.BLUE})
            complete.plot([0, 1], [0, 1], color=figure.MIDDLE, linewidth=0.8)
            complete.set_aspect("equal")
            complete.set_title(f"{said}: complete answers")
            for axes in (latency, complete):
                axes.set_xlabel("measured")
                axes.set_ylabel("simulated")
                axes.legend(loc="upper left")

    return figure.drawn(9.0, 4.2 * len(AGENTS), panels)


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


PAGE = Page("benchmarks.simulator", markdown, draw)
