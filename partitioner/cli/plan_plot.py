"""A plan as a picture: accuracy against latency, and what each device does with its budget."""

import io
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
    """Every Pareto point with its typical error, the plan, and the best single device."""
    x = [point.latency_ms for point in points]
    y = [100 * point.accuracy.expected for point in points]
    error = [100 * point.accuracy.typical_error for point in points]
    low = [value - e for value, e in zip(y, error, strict=True)]
    high = [value + e for value, e in zip(y, error, strict=True)]
    axes.fill_between(x, low, high, alpha=0.15, label="typical error")
    axes.plot(x, y, marker="o", markersize=3, label="best plan, expected")
    if plan.accuracy is not None:
        predicted = [a.predicted_ms for a in plan.assignments]
        predicted += [replica.predicted_ms for replica in plan.replicas]
        latency_ms = max(ms.total for ms in predicted)
        axes.plot(latency_ms, 100 * plan.accuracy.expected, "s", label="this plan, expected")
        axes.plot(latency_ms, 100 * plan.accuracy.all_in, "^", label="this plan, all in")
    one = plan.single_device
    if one is not None and one.accuracy is not None:
        label = f"{one.device} alone, when it is there"
        axes.plot(one.predicted_ms.total, 100 * one.accuracy, "x", label=label)
    axes.axvline(plan.target_ms, linestyle=":", color="grey", linewidth=1)
    _plain_logarithm(axes)
    axes.set_xlabel("latency of one answer, ms")
    axes.set_ylabel("predicted accuracy, %")
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
