"""accuracy-networks.json as the tables of docs/results/accuracy.md, and as a picture."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table

RESULT = RESULTS / "accuracy-networks.json"
_KINDS = {
    "": "taught", "labels": "labels alone", "half": "half labels", "short": "quarter of the epochs",
    "scratch": "not pretrained", "boost": "boosted", "stack": "boosted, imitating",
    "chain": "started from the first", "untouched": "untouched",
    "brief": "cut short",
}  # fmt: skip
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
    rows = [row | {"data": _TITLES[name]} for name, own in sets.items() for row in own["ablations"]]
    if rows:
        parts.append(_ablations(rows))
    parts.append(_candidates(sets))
    if found["checks"]:
        parts.append(_checks(found["checks"]))
    return "\n\n".join(parts)


def _rivals(title: str, own: Row) -> list[str]:
    unseen = bool(own["unseen_pictures"])
    told = f"{title}, {own['test_pictures']:,} test pictures" + (
        f", {own['unseen_pictures']} of them unseen" if unseen else ""
    )
    columns = [
        ("method", "{method}"),
        ("ms", "{ms:.2f}"),
        ("all in", lambda row: spread(row["all_in"])),
        ("averaged", lambda row: spread(row["averaged"])),
        ("one missing", lambda row: spread(row["one_missing"])),
        ("worst", lambda row: spread(row["one_missing_worst"])),
        ("one in", lambda row: spread(row["one_in"])),
        ("over the best single", lambda row: change(row["gain"])),
        *([("unseen", lambda row: spread(row["unseen"]))] if unseen else []),
    ]
    parts = []
    for budget in own["budgets"]:
        first = budget["rows"][0]
        single = re.sub(r"-s\d$", "", budget["single"][0])
        rows = [first | {"method": f"{first['method']}: {single}"}, *budget["rows"][1:]]
        parts += [table(rows, *columns, title=f"{told}, within {budget['budget_ms']:.2f} ms")]
        parts += [_beside(budget)]
    return parts


def _beside(budget: Row) -> str:
    """What the table of a budget leaves out: more members, hindsight, and one slower device."""
    told = []
    if budget["series"]:
        counts = (f"{row['method']}: {spread(row['all_in'])}" for row in budget["series"])
        told.append(f"K chosen on calibration, all in: {', '.join(counts)}.")
    hindsight, other = budget["hindsight"], budget["one_device"]
    told.append(f"Best single in hindsight: {hindsight['name']}, {hindsight['test'] * 100:.1f} %.")
    told.append(
        f"One slower device is as good as the best of these with {other['name']}: "
        f"{other['ms']:.2f} ms, {other['test'] * 100:.1f} %."
        if other
        else "No single network here is as good as the best of these in any time."
    )
    return " ".join(told)


def verdict(row: Row) -> str:
    """Whether a part brings more than noise."""
    mean = row["brings"]["mean"]
    if abs(mean) <= row["noise"]:
        return "within noise"
    return "earns its place" if mean > 0 else "LOSES"


def _ablations(rows: Sequence[Row]) -> str:
    return table(
        rows,
        ("data", "{data}"),
        ("part", "{part}"),
        ("without", lambda row: f"{row['accuracy_without'] * 100:.1f}"),
        ("with", lambda row: f"{row['accuracy_with'] * 100:.1f}"),
        ("brings", lambda row: change(row["brings"])),
        ("noise", lambda row: f"{row['noise'] * 100:.1f}"),
        ("members alone", lambda row: f"{row['alone'] * 100:+.1f}"),
        ("verdict", verdict),
        title="What each part brings to a fleet of three, points",
    )


def _candidates(sets: Mapping[str, Row]) -> str:
    """A row per network, a column for the trainings that only ablations have."""
    rows = []
    for name, own in sets.items():
        for body, ms in {one["body"]: one["ms"] for one in own["candidates"]}.items():
            by_kind = {c["kind"]: c["test"] for c in own["candidates"] if c["body"] == body}
            if set(by_kind) == {"untouched"}:
                continue  # in the picture
            main = {"teacher": by_kind.pop("teacher", []), "": by_kind.pop("", [])}
            rows.append({
                "data": _TITLES[name],
                "body": body,
                "ms": ms,
                "taught": spread(main[""] or main["teacher"]),
                "untouched": spread(by_kind.pop("untouched", [])),
                "others": ", ".join(f"{_KINDS[k]} {spread(v)}" for k, v in by_kind.items()),
            })  # fmt: skip
    return table(
        rows,
        ("data", "{data}"),
        ("network", "{body}"),
        ("ms", "{ms:.2f}"),
        ("taught", "{taught}"),
        ("untouched", "{untouched}"),
        ("otherwise", "{others}"),
        title="Single networks that were trained",
    )


def _checks(rows: Sequence[Row]) -> str:
    told = (
        f"{row['name']} {row['came'] * 100:.2f} and {row['exported'] * 100:.2f} "
        f"(same label {row['same_label'] * 100:.1f})"
        for row in rows
    )
    return f"As trained, and as ONNX export on the product's crops: {'; '.join(told)}."


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

    return figure.drawn(12, 4.2, panels)


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
    lambda: figures(kept(RESULT.stem)),
    lambda: draw(kept(RESULT.stem)),
)
