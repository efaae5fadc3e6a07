"""Learning curves as a picture: one panel per network, one line per named loss."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: One mapping per finished epoch: the mean of every named loss, `validation` where there is one,
#: and `seconds`.
Curve = list[dict[str, float]]

_COLUMNS = 3
_PANEL_INCHES = (4.0, 3.0)
#: Not losses: the time an epoch took.
_LEFT_OUT = ("seconds",)


def draw_curves(curves: Mapping[str, Curve]) -> bytes:
    """An SVG with one panel for each of `curves`, a name to its epochs; the same bytes every time.

    Element ids come from a fixed salt and no date is written, else every drawing would differ.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    columns = max(1, min(_COLUMNS, len(curves)))
    rows = max(1, math.ceil(len(curves) / columns))
    width, height = _PANEL_INCHES
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        FigureCanvasSVG(figure)
        for number, (name, curve) in enumerate(curves.items()):
            _draw(figure.add_subplot(rows, columns, number + 1), name, curve)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw(axes: "Axes", name: str, curve: Curve) -> None:
    from matplotlib.ticker import MaxNLocator

    for loss in _names(curve):
        epochs = [number for number, epoch in enumerate(curve, 1) if loss in epoch]
        dashed = "--" if loss == "validation" else "-"
        axes.plot(
            epochs,
            [curve[number - 1][loss] for number in epochs],
            linestyle=dashed,
            # A line through a single epoch is invisible.
            marker="o" if len(epochs) == 1 else "",
            label=loss,
        )
    axes.set_title(name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean over the epoch")
    axes.set_xlim(0.5, max(1, len(curve)) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        # Losses fall. A search for the best place is slow on busy cores, and matplotlib warns.
        axes.legend(loc="upper right")


def _names(curve: Curve) -> Sequence[str]:
    """Names of the losses in `curve`, in order of appearance."""
    found = dict.fromkeys(name for epoch in curve for name in epoch)
    return [name for name in found if name not in _LEFT_OUT]
