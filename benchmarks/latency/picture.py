"""Predicted against measured latency as a picture: the sub-models, and whole plans."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.latency.numbers import Compared, short
from benchmarks.latency.plans import PlanRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The band that is drawn, as a relative error: the aim for 19 of 20 predictions.
BAND = 0.2


def draw(compared: Sequence[Compared], plans: Sequence[PlanRow]) -> bytes:
    """The picture as an SVG, with the same bytes every time."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2)
        for marker, way in zip("osD^v<>p", sorted({one.way for one in compared}), strict=False):
            group = [one for one in compared if one.way == way]
            left.scatter(
                [one.row.latency_ms for one in group],
                [one.estimate.ms for one in group],
                s=16, marker=marker, alpha=0.75,
                label=short(way),
            )  # fmt: skip
        _finish(left, "sub-models that the fit never saw: one run, ms")
        for marker, teacher in zip("osD^", sorted({row.teacher for row in plans}), strict=False):
            group_of = [row for row in plans if row.teacher == teacher]
            right.scatter(
                [row.measured_ms for row in group_of],
                [row.predicted_ms for row in group_of],
                s=24, marker=marker, label=teacher,
            )  # fmt: skip
        _finish(right, "whole plans through real agents: client p50, ms")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _finish(axes: "Axes", title: str) -> None:
    """Equal logarithmic axes, the diagonal and the band."""
    values = [
        float(v) for c in axes.collections for pair in np.asarray(c.get_offsets()) for v in pair
    ]
    if not values:
        axes.set_axis_off()
        return
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    ends = [low, high]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.fill_between(
        ends, [end * (1 - BAND) for end in ends], [end * (1 + BAND) for end in ends],
        color="grey", alpha=0.15, linewidth=0, label=f"within {BAND:.0%}",
    )  # fmt: skip
    axes.set_aspect("equal")
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
