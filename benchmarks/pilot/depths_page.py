"""Figures and the picture of cuts of a vision transformer, accuracy against milliseconds.

python -m benchmarks depth-cuts
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table

RESULT = "depth-cuts"
#: What a budget's part is called in the table.
_WAYS = {
    "cut": "best cut",
    "single": "best network",
    "single_of_all_time": "best network, time of all three",
}
#: Points behind the teacher that are promised: of one device, of all, and with one missing.
_ALONE, _TOGETHER, _ONE_MISSING = 3.0, 1.0, 2.0
#: Of the sizes, ascending; each has a contrast of 3:1 and more on light and dark pages.
_COLOURS = (figure.MIDDLE, "#16909a", figure.BLUE, figure.PURPLE, "#c74a9b")
_BUDGET_NAMES = {0.125: "1/8", 0.25: "1/4", 0.5: "1/2", 1.0: "1"}
_NETWORKS = {"vit_tiny_patch16_224": "ViT-Ti/16"} | {
    f"tf_efficientnet_lite{k}": f"Lite{k}" for k in range(5)
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Behind:
    """Points behind the teacher, the mean of all draws, and their standard error."""

    points: float
    error: float

    def words(self, promised: float) -> str:
        """The points, and whether no more are promised."""
        kept = "kept" if self.points <= promised else "not kept"
        return f"{self.points:+.1f} ± {self.error:.1f}, {kept}"


def behind(scores: Sequence[Mapping[str, float]]) -> Behind:
    """Of scores of several draws, whose test pictures are others."""
    points = float(np.mean([one["behind"] for one in scores]))
    error = math.sqrt(sum(one["error"] ** 2 for one in scores)) / len(scores)
    # No difference at all is -0.0 where points are negative zeros.
    return Behind(100 * points + 0.0, 100 * error)


def by_data(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The draws of each data set, in the order of the results."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["data"], []).append(row)
    return found


def accuracies(draws: Rows) -> list[float]:
    """The mean accuracy of each candidate over the draws, in per cent."""
    means = 100 * np.mean([row["accuracy"] for row in draws], axis=0)
    return [float(one) for one in means]


def at_budget(draws: Rows, budget: float) -> list[Mapping[str, Any]]:
    """Rows of all draws within a budget."""
    return [one for row in draws for one in row["budgets"] if one["budget"] == budget]


def budgets_of(draws: Rows) -> list[float]:
    """The budgets that were measured, ascending."""
    return sorted({one["budget"] for row in draws for one in row["budgets"]})


def figures() -> str:
    """Depths at every size, other networks, budgets, and what the method promises."""
    result = read_result(RESULT)
    some, data = result["candidates"], by_data(result["rows"])
    return "\n\n".join((
        f"{_counts(data)}; {format_machine(result['machine'])}.",
        "Promised, and points behind the teacher with their standard error over test pictures:",
        promises(data),
        "Within a part of the teacher's time, in per cent of the test pictures:",
        contests(some, data),
        "Every depth of the ViT-Ti/16 at every size, in per cent of the test pictures:",
        depths(some, data),
        f"Parts of the teacher's time that the cuts take; {_timed_words(some)}:",
        parts_of_time(some),
        "Other networks, whole, in per cent of the test pictures:",
        others(some, data),
    ))  # fmt: skip


def _counts(data: Mapping[str, Rows]) -> str:
    return "; ".join(
        f"{name}: {len(draws)} {'draws' if len(draws) > 1 else 'draw'}, {draws[0]['learnt']:,} to "
        f"learn from, {draws[0]['tested']:,} of the test"
        for name, draws in data.items()
    )


def promises(data: Mapping[str, Rows]) -> str:
    """A row for each promise, a column for each data set; of scenes each camera has a network."""
    rows = [
        (f"{what}, {part} of the time", budget, way, key, promised)
        for budget, part in ((0.25, "a quarter"), (0.5, "half"))
        for way, what, key, promised in (
            ("cut", "one cut", "together", _ALONE),
            ("single", "one network of any family", "together", _ALONE),
            ("cuts", "three cuts", "together", _TOGETHER),
            ("cuts", "three cuts", "one_missing", _ONE_MISSING),
            ("fleet", "three of any", "together", _TOGETHER),
            ("fleet", "three of any", "one_missing", _ONE_MISSING),
        )
    ]

    def cell(name: str) -> Any:
        def points(row: tuple[str, float, str, str, float]) -> str:
            _, budget, way, key, promised = row
            found = at_budget(data[name], budget)
            # One camera alone is no rival of a teacher that sees all of them.
            if way in ("cut", "single") and "single_of_all_time" not in found[0]:
                return ""
            return behind([one[way][key] for one in found]).words(promised)

        return points

    def words(row: tuple[str, float, str, str, float]) -> str:
        missing = ", one missing" if row[3] == "one_missing" else ""
        return f"{row[0]}{missing}: at most {row[4]:g}"

    return table(rows, ("promised", words), *((name, cell(name)) for name in data))


def contests(some: Rows, data: Mapping[str, Rows]) -> str:
    """Cuts, networks and fleets within each budget, means over the draws."""
    rows = [
        (name, draws, budget, at_budget(draws, budget))
        for name, draws in data.items()
        for budget in budgets_of(draws)
    ]
    teacher = _teacher(some)

    def mean(way: str, key: str) -> Any:
        def cell(row: tuple[str, Rows, float, Rows]) -> str:
            if any(way not in one for one in row[3]):
                return ""
            return f"{100 * np.mean([one[way][key]['accuracy'] for one in row[3]]):.1f}"

        return cell

    return table(
        rows,
        ("pictures", lambda row: row[0]),
        ("part of the time", lambda row: _BUDGET_NAMES[row[2]]),
        ("teacher", lambda row: f"{_teacher_accuracy(row[0], row[1], teacher):.1f}"),
        *((head, mean(way, "together")) for way, head in _WAYS.items()),
        ("cuts together", mean("cuts", "together")),
        ("one missing", mean("cuts", "one_missing")),
        ("any together", mean("fleet", "together")),
        ("one missing", mean("fleet", "one_missing")),
        ("networks, first draw", lambda row: _fleet_words(some, row[3][0]["fleet"]["rows"])),
    )


def _teacher(some: Rows) -> int:
    cuts = [row for row, one in enumerate(some) if one["depth"]]
    return max(cuts, key=lambda row: (some[row]["depth"], some[row]["image_size"]))


def _teacher_accuracy(_: str, draws: Rows, teacher: int) -> float:
    return accuracies(draws)[teacher]


def _fleet_words(some: Rows, rows: Mapping[str, int]) -> str:
    return ", ".join(_words(some[row]) for row in rows.values())


def _words(one: Mapping[str, Any]) -> str:
    cut = f" {one['depth']}" if one["depth"] else ""
    return f"{_NETWORKS[one['network']]}{cut} at {one['image_size']}"


def depths(some: Rows, data: Mapping[str, Rows]) -> str:
    """A row for each data set and size, a column for each depth; the best depth is bold."""
    rows = [
        (name, size, _at_size(some, accuracies(draws), size))
        for name, draws in data.items()
        for size in _sizes(some)
    ]

    def cell(depth: int) -> Any:
        def words(row: tuple[str, int, Mapping[int, float]]) -> str:
            value = row[2][depth]
            return f"**{value:.1f}**" if value == max(row[2].values()) else f"{value:.1f}"

        return words

    return table(
        rows,
        ("pictures", lambda row: row[0]),
        ("px", lambda row: row[1]),
        *((str(depth), cell(depth)) for depth in rows[0][2]),
    )


def _timed_words(some: Rows) -> str:
    """Words on the depths that were timed, and how far they are from a line between two."""
    timed = sorted({one["depth"] for one in some if one["depth"] and one["timed"]})
    errors = []
    for size in _sizes(some):
        ratios = _at_size(some, [one["ratio"] for one in some], size)
        for depth in timed[1:-1]:
            ends = [ratios[timed[0]], ratios[timed[-1]]]
            line = float(np.interp(depth, [timed[0], timed[-1]], ends))
            errors.append(abs(ratios[depth] / line - 1))
    depths = ", ".join(map(str, timed))
    return (
        f"depths {depths} were timed, all others lie on lines between them (those within are at "
        f"most {100 * max(errors, default=0):.0f} % off the line through the outermost)"
    )


def parts_of_time(some: Rows) -> str:
    """A row for each size, a column for each depth."""
    ratios = [one["ratio"] for one in some]
    rows = [(size, _at_size(some, ratios, size)) for size in _sizes(some)]
    return table(
        rows,
        ("px", lambda row: row[0]),
        *(
            (str(depth), lambda row, depth=depth: f"{row[1][depth]:.3f}")
            for depth in rows[0][1]
        ),
        ("ms of all", lambda row: f"{_at_size(some, [o['ms'] for o in some], row[0])[12]:.1f}"),
    )  # fmt: skip


def _sizes(some: Rows) -> list[int]:
    return sorted({one["image_size"] for one in some if one["depth"]})


def _at_size(some: Rows, values: Sequence[float], size: int) -> dict[int, float]:
    """Value by depth of the cuts at one size."""
    found = {
        one["depth"]: value
        for one, value in zip(some, values, strict=True)
        if one["depth"] and one["image_size"] == size
    }
    return dict(sorted(found.items()))


def others(some: Rows, data: Mapping[str, Rows]) -> str:
    """A row for each network that is no cut."""
    means = {name: accuracies(draws) for name, draws in data.items()}
    return table(
        [row for row, one in enumerate(some) if not one["depth"]],
        ("network", lambda row: _words(some[row])),
        ("ms", lambda row: f"{some[row]['ms']:.1f}"),
        ("part of the time", lambda row: f"{some[row]['ratio']:.3f}"),
        *((name, lambda row, name=name: f"{means[name][row]:.1f}") for name in data),
    )


def picture() -> bytes:
    """The SVG of the kept result."""
    result = read_result(RESULT)
    return draw(result["candidates"], by_data(result["rows"]))


def draw(some: Rows, data: Mapping[str, Rows]) -> bytes:
    """The SVG: a panel for each data set, and after them one for the legend."""

    def panels(canvas: "figure.Figure") -> None:
        # Room between a row's axes and the titles below them.
        canvas.set_layout_engine("constrained", h_pad=0.12)
        columns = min(3, len(data) + 1)
        lines = math.ceil((len(data) + 1) / columns)
        grid = canvas.subplots(lines, columns, squeeze=False).flatten()
        for axes, (name, draws) in zip(grid, data.items(), strict=False):
            _draw(axes, some, draws)
            axes.set_title(name)
        for axes in grid[len(data) :]:
            axes.axis("off")
        for axes in grid[: len(data) : columns]:
            axes.set_ylabel("answered rightly, %")
        handles, labels = grid[0].get_legend_handles_labels()
        grid[len(data)].legend(handles, labels, loc="center left", fontsize=8.5)

    return figure.draw_svg(10, 6.4, panels)


def _draw(axes: "figure.Axes", some: Rows, draws: Rows) -> None:
    means, milliseconds = accuracies(draws), [one["ms"] for one in some]
    for size, colour in zip(_sizes(some), _COLOURS, strict=False):
        x, y = (_at_size(some, values, size).values() for values in (milliseconds, means))
        axes.plot([*x], [*y], ".-", color=colour, linewidth=1.1, markersize=3.5,
                  label=f"ViT-Ti/16, first 1 to 12 layers at {size} px")  # fmt: skip
    others = [row for row, one in enumerate(some) if not one["depth"]]
    axes.plot(
        [milliseconds[row] for row in others], [means[row] for row in others], "D",
        color=figure.ORANGE, markersize=3.5, label="EfficientNet-Lite0 to 2",
    )  # fmt: skip
    teacher = _teacher(some)
    budgets = budgets_of(draws)
    at = [milliseconds[teacher] * budget for budget in budgets]
    together, missing = (
        [100 * np.mean([one["fleet"][key]["accuracy"] for one in at_budget(draws, budget)])
         for budget in budgets]
        for key in ("together", "one_missing")
    )  # fmt: skip
    axes.vlines(at, missing, together, color=figure.GREEN, linewidth=1.2)
    axes.plot(at, together, "s", color=figure.GREEN, markersize=5.5,
              label="several devices within this time, together")  # fmt: skip
    axes.plot(
        at, missing, "_", color=figure.GREEN, markersize=8, label="at least, with any one missing"
    )
    axes.plot(milliseconds[teacher], means[teacher], "*", color=figure.RED, markersize=11,
              label="teacher: all of the ViT-Ti/16 at 224 px")  # fmt: skip
    figure.logarithmic(axes, "x")
    axes.set_xlabel("ms a picture, one thread")


PAGE = Page("benchmarks.pilot.depths", figures, picture)
