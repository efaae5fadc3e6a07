"""accuracy.json as tables for its page, and as a picture.

The picture's right panel needs a model of delays, and it is a model: every device answers after the
time that was planned for it, times a log-normal factor (median 1, sigma `SIGMA`), independently;
with the chance of `LOST` it never answers. The teacher on one such device takes as many times
longer as measured. No answer counts as a wrong one.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.accuracy.methods import ABLATIONS, METHODS, OURS
from benchmarks.accuracy.numbers import (
    Figure,
    Spread,
    aims,
    all_in,
    one_in,
    one_missing,
    over_seeds,
    paired,
    runs_of,
    spread,
    two_in,
)
from benchmarks.accuracy.results import Results, Run
from benchmarks.accuracy.shapes import shape_name
from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS
from benchmarks.harness.tables import table
from mdp.files import read_json

_FIGURES: dict[str, Figure] = {
    "all in": all_in, "one missing": one_missing, "two in": two_in, "one in": one_in,
}  # fmt: skip
_HOLDS = {True: "yes", False: "NO", None: "?"}
SIGMA, LOST = 0.5, 0.02
#: Method, rule and label. Of the first one every subset is shown, too.
_SHOWN = (
    ("ours", "stacked", "ours, stacked"),
    ("ours", "boosted", "ours, boosted"),
    ("ours", "bagged", "ours, bagged"),
    ("independent", "averaged", "independent students, averaged"),
    ("class-split", "fused", "class split (DEKD style)"),
    ("class-split-drop", "fused", "class split, trained with members missing"),
    ("class-pruned", "fused", "class-wise pruned (ED-ViT style)"),
)
_SINGLE = "best single distilled ViT"
#: Deadlines, as multiples of the time planned for one answer.
_DEADLINES = [0.25 + 0.05 * step for step in range(116)]

Members = tuple[int, ...]


def markdown(results: Results, longer: Results | None = None) -> str:
    """Every table; `longer` are the same methods with more epochs, as far as they were run."""
    title = "Accuracy on the test split, %: mean ± sample standard deviation over seeds"
    tables = [_methods(results, title), _subsets(results), _latency(results)]
    tables.append(
        table(
            aims(results),
            ("aim", "{0.aim}"),
            ("figure", "{0.figure}"),
            ("holds", lambda aim: _HOLDS[aim.holds]),
            title="Aims",
        )
    )
    if longer is not None:
        more, usual = (one.configuration["epochs"] for one in (longer, results))
        tables.append(_methods(longer, f"With {more} epochs instead of {usual}"))
    return "\n\n".join(tables)


def _methods(results: Results, title: str) -> str:
    ours = runs_of(results, OURS)
    rows: list[tuple[Any, ...]] = []
    if results.teacher is not None:
        accuracy = f"{results.teacher.accuracy * 100:.1f}"
        rows.append(("teacher", "", accuracy, *[""] * (len(_FIGURES) + 2)))
    for method in METHODS:
        runs = runs_of(results, method)
        for rule in _rules(method, runs):
            figures = [_percent(over_seeds(runs, rule, of)) for of in _FIGURES.values()]
            is_ours = method == OURS and rule == "stacked"
            less = None if is_ours else paired(runs, rule, ours, "stacked")
            cpu_s = fmean(run.train_cpu_s for run in runs)
            ratios = [run.cost_ratio for run in runs if run.cost_ratio is not None]
            ratio = f"{fmean(ratios):.2f}" if ratios else ""
            rows.append((method, rule, *figures, _percent(less, "+.2f"), f"{cpu_s:.0f}", ratio))
    heads = ("method", "rule", *_FIGURES, "all in, against ours", "training, CPU s", "cost ratio")
    return table(rows, *((head, f"{{0[{i}]}}") for i, head in enumerate(heads)), title=title)


def _rules(method: str, runs: Sequence[Run]) -> list[str]:
    """The rules to show: of a variation of ours the headline alone."""
    if not runs:
        return []
    headline = runs[0].headline
    if method in ABLATIONS and method != OURS:
        return [headline]
    return [headline, *(rule for rule in runs[0].subsets[0].accuracy if rule != headline)]


def _percent(value: Spread | None, form: str = ".1f") -> str:
    if value is None:
        return ""
    mean = format(value.mean * 100, form)
    return mean if value.seeds == 1 else f"{mean} ± {value.deviation * 100:{form.strip('+')}}"


def _subsets(results: Results) -> str:
    runs = runs_of(results, OURS)
    rules = ("stacked", "boosted", "bagged")
    rows = []
    for subset in runs[0].subsets if runs else []:
        names = " + ".join(f"{k}: {shape_name(runs[0].members[k])}" for k in subset.members)
        same = [s for run in runs for s in run.subsets if s.members == subset.members]
        right = [spread([s.accuracy[rule] for s in same]) for rule in rules]
        errors = [s.ece["stacked"] for s in same if "stacked" in s.ece]
        rows.append((names, *map(_percent, [*right, spread(errors) if errors else None])))
    heads = ("members in", *rules, "calibration error, stacked")
    title = "Every arrival subset of ours, %"
    return table(rows, *((head, f"{{0[{i}]}}") for i, head in enumerate(heads)), title=title)


def _latency(results: Results) -> str:
    latency = results.latency
    rows: list[tuple[str, float, float]] = []
    if latency is not None:
        shapes = sorted(latency.shapes_ms.items(), key=lambda item: -item[1])
        rows = [(name, ms, ms / latency.teacher_ms)
                for name, ms in [("teacher", latency.teacher_ms), *shapes]]  # fmt: skip
    return table(
        rows,
        ("shape", "{0[0]}"),
        ("ms", "{0[1]:.2f}"),
        ("of the teacher's", "{0[2]:.2f}"),
        title="Latency of one picture, onnxruntime, one thread",
    )


def arrived_by(deadline: float) -> float:
    """Chance that a device has answered by `deadline`, in multiples of its planned time."""
    return (1 - LOST) * 0.5 * (1 + math.erf(math.log(deadline) / (SIGMA * math.sqrt(2))))


def expected_accuracy(
    accuracies: Mapping[Members, float], count: int, deadline: float, slower: float = 1.0
) -> float:
    """Mean accuracy by `deadline` over all arrival subsets of `count` devices.

    A device takes `slower` times what was planned. A subset without an accuracy answers nothing.
    """
    there = arrived_by(deadline / slower)
    return sum(
        accuracy * there ** len(members) * (1 - there) ** (count - len(members))
        for members, accuracy in accuracies.items()
    )


def _means(results: Results, method: str, rule: str) -> dict[Members, float]:
    """Accuracy of every subset in percent, the mean over seeds."""
    found: dict[Members, list[float]] = {}
    for run in runs_of(results, method):
        for subset in run.subsets:
            if rule in subset.accuracy:
                found.setdefault(subset.members, []).append(100 * subset.accuracy[rule])
    return {members: fmean(values) for members, values in found.items()}


def draw(results: Results) -> bytes:
    def panels(canvas: "figure.Figure") -> None:
        left, right = canvas.subplots(1, 2)
        _draw_subsets(left, results)
        _draw_deadlines(right, results)

    return figure.drawn(12, 5, panels)


def _draw_subsets(axes: "figure.Axes", results: Results) -> None:
    ours = _means(results, *_SHOWN[0][:2])
    axes.plot([len(m) for m in ours], list(ours.values()), "o", markersize=4, alpha=0.5)
    axes.set_prop_cycle(None)
    for method, rule, _ in _SHOWN:
        found = _means(results, method, rule)
        sizes = sorted({len(members) for members in found})
        line = [fmean(a for m, a in found.items() if len(m) == size) for size in sizes]
        if line:
            axes.plot(sizes, line, marker="o", markersize=3)
    axes.set_xticks(range(1, 1 + max(map(len, ours), default=1)))
    # What needs no subset. Other colours are named beside the right panel.
    levels = [(_SINGLE, value) for value in _means(results, "single", "alone").values()]
    if results.teacher is not None:
        levels.append(("teacher", 100 * results.teacher.accuracy))
    for name, value in levels:
        axes.plot((1, max(map(len, ours), default=1)), [value] * 2, ":", label=name)
    axes.set_ylim(bottom=20)
    axes.set_xlabel("members that arrived")
    axes.set_ylabel("accuracy on the test split, %")
    axes.set_title("means over seeds; dots: every subset of ours, stacked")
    figure.name_lines(axes)


def _draw_deadlines(axes: "figure.Axes", results: Results) -> None:
    count = max(map(len, _means(results, "ours", "stacked")), default=0)
    curves = [(label, _means(results, m, r), count, 1.0) for m, r, label in _SHOWN]
    curves.append((_SINGLE, _means(results, "single", "alone"), 1, 1.0))
    if results.teacher is not None and results.latency is not None:
        members = runs_of(results, "ours")[0].members
        slowest_ms = max(results.latency.shapes_ms[shape_name(spec)] for spec in members)
        slower = results.latency.teacher_ms / slowest_ms
        curves.append(("teacher", {(0,): 100 * results.teacher.accuracy}, 1, slower))
    for label, found, devices, slower in curves:
        if found:
            values = [expected_accuracy(found, devices, at, slower) for at in _DEADLINES]
            axes.plot(_DEADLINES, values, label=label)
    axes.set_xlabel("deadline, in planned answer times of one member")
    axes.set_ylabel("expected accuracy, %")
    axes.set_title(f"delays: log-normal, sigma {SIGMA:g}; {LOST:.0%} never answer")
    figure.name_lines(axes)


def _kept(name: str) -> Results:
    return read_json(RESULTS / f"{name}.json", Results)


PAGE = Page(
    "benchmarks.accuracy",
    lambda: markdown(_kept("accuracy"), _kept("accuracy-20-epochs")),
    lambda: draw(_kept("accuracy")),
)
