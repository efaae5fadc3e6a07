"""Colours and axes of pictures, and reproducible SVG."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

INK, PAPER, FAINT, MIDDLE = "#24292f", "#ffffff", "#d5dae0", "#6e7781"
#: Their replacements on dark pages. Colours of data have a contrast of 3:1 and more on either.
_DARK = {INK: "#e6edf3", PAPER: "#0d1117", FAINT: "#30363d"}
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f81f7", "#d9730d", "#2da44e", "#d1495b", "#8957e5"
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#9a6700", "#c74a9b", "#16909a", MIDDLE)
#: An axis over more than this has only powers of ten for labels.
_WIDE = 100
_STYLE: Any = {
    # Fixed element ids; text stays text.
    "svg.hashsalt": "mdp", "svg.fonttype": "none",
    "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "legend.frameon": False,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "axes.edgecolor": MIDDLE,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": MIDDLE, "ytick.color": MIDDLE, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.6,
    # Text may be wider in a reader's font.
    "figure.constrained_layout.w_pad": 0.12,
    "lines.linewidth": 1.4, "axes.prop_cycle": f"cycler('color', {list(_COLOURS)})",
}  # fmt: skip


def draw_svg(width: float, height: float, draw: Callable[["Figure"], None]) -> bytes:
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


def logarithmic(axes: "Axes", which: str) -> None:
    """Make the `x` or `y` axis logarithmic, with whole numbers beside ticks that have room."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > _WIDE * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
