"""accuracy-networks.json as the tables of docs/results/accuracy.md, and as a picture."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table

RESULT = RESULTS / "accuracy-networks.json"
_TITLES = {"cifar10": "CIFAR-10", "tinyimagenet40": "tinyimagenet40", "imagenette": "Imagenette"}
Row = Mapping[str, Any]


def spread(values: Sequence[float]) -> str:
    """Mean, and sample standard deviation where there are several, in percent."""
    if not values:
        return ""
    mean = f"{fmean(values) * 100:.1f}"
    return f"{mean} ± {stdev(values) * 100:.1f}" if len(values) > 1 else mean


def change(of: Mapping[str, Any]) -> str:
    """A paired difference in points: ± standard error over the test pictures; spread over seeds."""
    over = "" if of["spread"] is None else f"; {of['spread'] * 100:.1f}"
    return f"{of['mean'] * 100:+.1f} ± {of['error'] * 100:.1f}{over}"


def figures(found: Row) -> str:
    """Every table."""
    sets = found["sets"]
    parts = [part for name, own in sets.items() for part in _rivals(_TITLES[name], own)]
    return "\n\n".join(parts)


def _rivals(title: str, own: Row) -> list[str]:
    unseen = bool(own["unseen_pictures"])
    told = f"{title}, {own['test_pictures']:,} test pictures" + (
        f", {own['unseen_pictures']} of them unseen" if unseen else ""
    )
    columns = [
        ("method", _method),
        ("ms", "{ms:.2f}"),
        ("all in", lambda row: spread(row["all_in"])),
        ("averaged", lambda row: spread(row["averaged"])),
        ("one missing", lambda row: spread(row["one_missing"])),
        ("worst", lambda row: spread(row["one_missing_worst"])),
        ("over the best single", lambda row: change(row["gain"])),
        *([("unseen", lambda row: spread(row["unseen"]))] if unseen else []),
    ]
    parts = []
    for budget in own["budgets"]:
        title = f"{told}, within {budget['budget_ms']:.2f} ms"
        parts += [table(budget["rows"], *columns, title=title)]
        parts += [_beside(budget)]
    return parts


def _method(row: Row) -> str:
    """Name of a method, and its networks with their parts of the picture, of the first seed."""
    if "whole pictures" in row["method"] or "best answer" in row["method"]:
        return str(row["method"])
    return f"{row['method']}: {', '.join(_short(name) for name in row['members'][0])}"


def _short(name: str) -> str:
    """A network without its data set and seed: "lite0-152 centre88"."""
    name = re.sub(r"-s\d(?=@|$)", "", name).replace("@", " ")
    return name.partition("-")[2] if name.split("-")[0] in ("cifar", "tiny", "nette") else name


def _beside(budget: Row) -> str:
    """Text beside the table of a budget: more members, and one slower device."""
    told = []
    if budget["series"]:
        counts = (f"{row['method']}: {spread(row['all_in'])}" for row in budget["series"])
        told.append(f"K chosen on calibration, all in: {', '.join(counts)}.")
    other = budget["one_device"]
    told.append(
        f"One slower device is as good as the best of these with {_short(other['name'])}: "
        f"{other['ms']:.2f} ms, {other['test'] * 100:.1f} %."
        if other
        else "No single network here is as good as the best of these in any time."
    )
    return " ".join(told)


def draw(found: Row) -> bytes:
    """Single networks, the best of them within each latency, and fleets of three beside."""
    sets = found["sets"]

    def panels(canvas: "figure.Figure") -> None:
        for axes, (name, own) in zip(
            canvas.subplots(1, len(sets), squeeze=False)[0], sets.items(), strict=True
        ):
            _panel(axes, own["front"])
            axes.set_title(_TITLES[name])
            axes.set_xlabel("milliseconds of the slowest member")
        canvas.axes[0].set_ylabel("accuracy on the test split, %")
        canvas.axes[0].legend(loc="lower right")

    return figure.draw_svg(12, 4.2, panels)


def _panel(axes: "figure.Axes", own: Row) -> None:
    singles, fleets = own["singles"], own["fleets"]
    least = min(100 * one["test"] for one in _front(singles))
    shown = [one for one in singles if 100 * one["test"] >= least - 5]
    for label, untouched, marker in (("single, trained", False, "o"), ("untouched", True, "x")):
        some = [one for one in shown if (one["kind"] == "untouched") == untouched]
        if some:
            axes.plot([one["ms"] for one in some], [100 * one["test"] for one in some], marker,
                      color=figure.MIDDLE, markersize=4, alpha=0.7, label=label)  # fmt: skip
    for label, some, colour in (
        ("best single", _front(singles), figure.ORANGE),
        ("best fleet of three", fleets, figure.BLUE),
    ):
        axes.plot([one["ms"] for one in some], [100 * one["test"] for one in some],
                  drawstyle="steps-post", marker="o", markersize=3, color=colour,
                  label=label)  # fmt: skip
    axes.set_ylim(bottom=least - 5)
    figure.logarithmic(axes, "x")


def _front(singles: Sequence[Row]) -> list[Row]:
    """The networks that no quicker one is as good as, on the calibration split."""
    found: list[Row] = []
    for one in sorted(singles, key=lambda one: (one["ms"], -one["calibration"])):
        if not found or one["calibration"] > found[-1]["calibration"]:
            found.append(one)
    return found


PAGE = Page(
    "benchmarks.accuracy",
    lambda: figures(read_result(RESULT.stem)),
    lambda: draw(read_result(RESULT.stem)),
)
