"""A schedule as a picture: who does what when."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from partitioner.crew.planning.costs import Span, makespan_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES, _ROW_INCHES, _FRAME_INCHES = 9.0, 0.45, 1.1
#: Of the whole width; text in a narrower bar would reach over its neighbours.
_ROOM_FOR_TEXT = 0.06
_MINUTE_S, _HOUR_S = 60, 3600


def schedule_svg(spans: Sequence[Span]) -> str:
    """An SVG with a row for each trainer, in order of appearance; the same text every time.

    Of a predicted or a real schedule. Element ids come from a fixed salt and no date is written.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(span.trainer for span in spans))
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        size = _WIDTH_INCHES, _FRAME_INCHES + _ROW_INCHES * len(names)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.subplots(), spans, names)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw(axes: "Axes", spans: Sequence[Span], names: list[str]) -> None:
    longest = makespan_s(spans)
    unit_s, unit = next(
        (size, name)
        for size, name in ((_HOUR_S, "h"), (_MINUTE_S, "min"), (1, "s"))
        if longest >= 3 * size or size == 1
    )
    colours = {what: f"C{i % 10}" for i, what in enumerate(dict.fromkeys(s.what for s in spans))}
    for span in spans:
        row, start, seconds = names.index(span.trainer), span.start_s, span.end_s - span.start_s
        axes.barh(
            row,
            seconds / unit_s,
            left=start / unit_s,
            color=colours[span.what],
            edgecolor="white",
            height=0.8,
        )
        if seconds > _ROOM_FOR_TEXT * longest:
            middle = (start + seconds / 2) / unit_s
            axes.text(middle, row, span.what, ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, longest / unit_s or 1)
    axes.set_xlabel(f"time in {unit}")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
