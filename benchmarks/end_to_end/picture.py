"""The figures as a picture: latency, throughput and bytes of everybody, over both links."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.end_to_end.outcomes import Answers
from benchmarks.end_to_end.report import LinkResult, Results, mean
from mdp.cli.bench import percentiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_APART = 0.25
#: An axis over more than this has only powers of ten for labels.
_WIDE = 100
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
        _dots(latency, results.links, lambda row: percentiles(row.latency_ms, (50,))["p50"])
        _dots(rate, results.links, lambda row: mean(row.per_s))
        _dots(sent, results.links, lambda row: mean(row.sent_bytes) / 1e3)
        latency.set_title("one picture, p50 in ms (less is better)", fontsize=10)
        rate.set_title(f"pictures/s, {results.in_flight} under way (more is better)", fontsize=10)
        sent.set_title("kB on the wire for a picture (less is better)", fontsize=10)
        sent.legend(fontsize=8)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _dots(axes: "Axes", links: Sequence[LinkResult], value: Callable[[Answers], float]) -> None:
    """A dot for each rival and link, hollow where it is calculated; lengths mean nothing here."""
    names = [row.name for row in links[0].found.answers]
    for number, (link, colour) in enumerate(zip(links, _COLOURS, strict=False)):
        for place, row in enumerate(link.found.answers):
            axes.plot(
                value(row), place + (number - 0.5) * _APART, "os"[number],
                color=colour, fillstyle="none" if row.calculated else "full",
                label=f"{link.bandwidth_bps / 1e6:.0f} Mbit/s" if place == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xscale("log")
    from matplotlib.ticker import LogLocator

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < _WIDE * low else (1.0,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.3)
