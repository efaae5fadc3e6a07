"""A plan as a picture: accuracy against latency, and what each device does with its budget."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mdp.formats.plan import Plan
from partitioner.planner.targets import ParetoPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (10.0, 4.2)


def draw_plan(plan: Plan, points: Sequence[ParetoPoint], kind: str) -> bytes:
    """The picture as SVG or PNG; the same bytes every time.

    Element ids come from a fixed salt and no date is written, else every drawing would differ.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _front(left, plan, points)
        _budgets(right, plan)
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=120)
    return buffer.getvalue()


def _front(axes: "Axes", plan: Plan, points: Sequence[ParetoPoint]) -> None:
    """Every Pareto point with its typical error, the plan, and the best single device.

    Accuracies that are not predicted are left out, and the picture says so.
    """
    shown = [
        (point.latency_ms, 100 * predicted.expected, 100 * (predicted.typical_error or 0))
        for point in points
        if (predicted := point.accuracy).expected is not None
    ]
    if shown:
        x = [latency_ms for latency_ms, _, _ in shown]
        low = [expected - error for _, expected, error in shown]
        high = [expected + error for _, expected, error in shown]
        axes.fill_between(x, low, high, alpha=0.15, label="typical error")
        y = [expected for _, expected, _ in shown]
        axes.plot(x, y, marker="o", markersize=3, label="best plan, expected")
    accuracy = plan.accuracy
    if accuracy is not None and accuracy.expected is not None and accuracy.all_in is not None:
        taken = [a.predicted_ms for a in plan.assignments]
        taken += [replica.predicted_ms for replica in plan.replicas]
        latency_ms = max(ms.total for ms in taken)
        axes.plot(latency_ms, 100 * accuracy.expected, "s", label="this plan, expected")
        axes.plot(latency_ms, 100 * accuracy.all_in, "^", label="this plan, all in")
    one = plan.single_device
    if one is not None and one.accuracy is not None:
        label = f"{one.device} alone, when it is there"
        axes.plot(one.predicted_ms.total, 100 * one.accuracy, "x", label=label)
    if accuracy is not None and accuracy.unknown and accuracy.all_in is None:
        reason = textwrap.fill(accuracy.unknown, 40)
        axes.text(0.5, 0.5, f"not predicted:\n{reason}", ha="center", transform=axes.transAxes)
    axes.axvline(plan.target_ms, linestyle=":", color="grey", linewidth=1)
    _plain_logarithm(axes)
    axes.set_xlabel("latency of one answer, ms")
    axes.set_ylabel("predicted accuracy, %")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="lower right")


def _plain_logarithm(axes: "Axes") -> None:
    """Ticks at 1, 2, 5, 10 and so on: those in between would overlap over one or two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _budgets(axes: "Axes", plan: Plan) -> None:
    """One bar per device: compute, network, and what is left of the target."""
    parts = [(a.device, a.predicted_ms) for a in plan.assignments]
    parts += [(f"{r.device} (replica of {r.k})", r.predicted_ms) for r in plan.replicas]
    names = [name for name, _ in parts]
    compute = [ms.compute for _, ms in parts]
    network = [ms.network for _, ms in parts]
    used = [c + n for c, n in zip(compute, network, strict=True)]
    slack = [max(0.0, plan.target_ms - value) for value in used]
    rows = range(len(parts))
    axes.barh(rows, compute, label="compute")
    axes.barh(rows, network, left=compute, label="network")
    axes.barh(rows, slack, left=used, label="slack", color="lightgrey")
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms of the target of {plan.target_ms:g} ms")
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
