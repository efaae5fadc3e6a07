"""How pictures look: colours, axes, names beside what they name. SVG, the same every time."""

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

INK, PAPER, FAINT, MIDDLE = "#24292f", "#ffffff", "#d5dae0", "#6e7781"
#: What these are where a reader prefers dark pages. Colours of data have 3:1 and more on either.
_DARK = {INK: "#e6edf3", PAPER: "#0d1117", FAINT: "#30363d"}
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f81f7", "#d9730d", "#2da44e", "#d1495b", "#8957e5"
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#9a6700", "#c74a9b", "#16909a", MIDDLE)
MARKERS = "os^Dv<>p"
#: Points of type of names in the picture, and the distance of their lines in that size.
SMALL, _APART = 8, 1.3
#: An axis over more than this has only powers of ten for labels.
_WIDE = 100
_STYLE: Any = {
    # Element ids come from a fixed salt, and text stays text.
    "svg.hashsalt": "mdp", "svg.fonttype": "none",
    "font.size": 9, "axes.titlesize": 10, "legend.fontsize": SMALL, "legend.frameon": False,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "axes.edgecolor": MIDDLE,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": MIDDLE, "ytick.color": MIDDLE, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.6,
    # Names may be wider in a reader's font than in the one that they were laid out with.
    "figure.constrained_layout.w_pad": 0.12,
    "lines.linewidth": 1.4, "axes.prop_cycle": f"cycler('color', {list(_COLOURS)})",
}  # fmt: skip


def drawn(width: float, height: float, draw: Callable[["Figure"], None]) -> bytes:
    """An SVG of so many inches, on which `draw` has drawn."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    start = b'<style type="text/css">'
    dark = f"@media (prefers-color-scheme: dark){{{rules}}}\n".encode()
    return buffer.getvalue().replace(start, start + dark, 1)


def name_lines(axes: "Axes") -> None:
    """Each line's label at its right end, in its colour; fixes the limits of the y axis."""
    import numpy as np
    from scipy.optimize import isotonic_regression

    named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines = [line for line in named if len(np.asarray(line.get_ydata()))]
    spec, canvas = axes.get_subplotspec(), axes.get_figure(root=True)
    if not lines or spec is None or canvas is None:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends = np.array([float(np.asarray(line.get_ydata())[-1]) - low for line in lines])
    ends /= high - low
    # What axes have of the height is known only once everything is drawn.
    inches = 0.8 * canvas.get_figheight() / spec.get_gridspec().nrows
    steps = _APART * SMALL / 72 / inches * np.arange(len(lines))
    order = np.argsort(ends, kind="stable")
    places = np.minimum(isotonic_regression(ends[order] - steps).x, 1 - steps[-1]) + steps
    for index, place in zip(order, places, strict=True):
        line = lines[index]
        axes.text(1.01, place, line.get_label(), color=line.get_color(), fontsize=SMALL,
                  va="center", transform=axes.transAxes)  # fmt: skip


def logarithmic(axes: "Axes", which: str) -> None:
    """Make the `x` or `y` axis logarithmic, with whole numbers beside ticks that have room."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > _WIDE * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def diagonal(axes: "Axes", values: Iterable[float], band: float) -> None:
    """Equal logarithmic axes around `values`, their diagonal, and a band of so much beside it."""
    low, high = min(values := list(values)) / 1.3, max(values) * 1.3
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    ends = [low, high]
    axes.plot(ends, ends, color=MIDDLE, linewidth=0.8)
    under, over = ([end * factor for end in ends] for factor in (1 - band, 1 + band))
    axes.fill_between(
        ends, under, over, color=MIDDLE, alpha=0.15, linewidth=0, label=f"within {band:.0%}"
    )
    for which in "xy":
        logarithmic(axes, which)
    axes.set_aspect("equal")
