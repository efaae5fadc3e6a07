"""The figures as a picture: latency, throughput and bytes of everybody, over both links."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.end_to_end.outcomes import Answers
from benchmarks.end_to_end.report import LinkResult, Results, mean
from mdp.bench import percentiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 0.38
_COLOURS = ("#4477aa", "#ee6677")


def draw(results: Results) -> bytes:
    """The picture as an SVG, with the same bytes every time."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 5), layout="constrained")
        FigureCanvasSVG(figure)
        latency, rate, sent = figure.subplots(1, 3, sharey=True)
        _bars(latency, results.links, lambda row: percentiles(row.latency_ms, (50,))["p50"])
        _bars(rate, results.links, lambda row: mean(row.per_s))
        _bars(sent, results.links, lambda row: mean(row.sent_bytes) / 1e3)
        latency.set_title("one picture, p50 in ms (less is better)", fontsize=10)
        rate.set_title(f"pictures/s, {results.in_flight} under way (more is better)", fontsize=10)
        sent.set_title("kB on the wire for a picture (less is better)", fontsize=10)
        sent.legend(fontsize=8)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _bars(axes: "Axes", links: Sequence[LinkResult], value: Callable[[Answers], float]) -> None:
    """A bar for each rival and link, hatched where it is calculated."""
    names = [row.name for row in links[0].found.answers]
    for number, (link, colour) in enumerate(zip(links, _COLOURS, strict=False)):
        for place, row in enumerate(link.found.answers):
            axes.barh(
                place + (number - 0.5) * _HEIGHT, value(row), _HEIGHT,
                color=colour, hatch="///" if row.calculated else None, edgecolor="white",
                label=f"{link.bandwidth_bps / 1e6:.0f} Mbit/s" if place == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)
