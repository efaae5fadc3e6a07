"""accuracy.json as a picture: every arrival subset, and expected accuracy against the deadline.

    python -m benchmarks.accuracy.picture [--out docs/results/accuracy.svg]

The right panel needs a model of delays, and it is a model: every device answers after the time that
was planned for it, times a log-normal factor (sigma 0.5, median 1), independently; with the chance
of `LOST` it never answers. The teacher on one such device takes as many times longer as measured.
No answer counts as a wrong one.
"""

import argparse
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.accuracy.__main__ import RESULTS
from benchmarks.accuracy.numbers import runs_of
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.shapes import shape_name
from mdp.files import read_json, write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGMA, LOST = 0.5, 0.02
#: Method, rule, label, and whether every subset is shown and not only the mean of a size.
_SHOWN = (
    ("ours", "stacked", "ours, stacked", True),
    ("ours", "boosted", "ours, boosted", False),
    ("ours", "bagged", "ours, bagged", False),
    ("independent", "averaged", "independent students, averaged", False),
    ("class-split", "fused", "class split (DEKD style)", False),
    ("class-split-drop", "fused", "class split, trained with members missing", False),
    ("class-pruned", "fused", "class-wise pruned (ED-ViT style)", False),
)
#: Deadlines, as multiples of the time planned for one answer.
_DEADLINES = [0.25 + 0.05 * step for step in range(116)]

Members = tuple[int, ...]


def arrived_by(deadline: float) -> float:
    """Chance that a device has answered by `deadline`, in multiples of its planned time."""
    normal = 0.5 * (1 + math.erf(math.log(deadline) / (SIGMA * math.sqrt(2))))
    return (1 - LOST) * normal


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


def means(results: Results, method: str, rule: str) -> dict[Members, float]:
    """Accuracy of every subset in percent, the mean over seeds."""
    found: dict[Members, list[float]] = {}
    for run in runs_of(results, method):
        for subset in run.subsets:
            if rule in subset.accuracy:
                found.setdefault(subset.members, []).append(100 * subset.accuracy[rule])
    return {members: statistics.fmean(values) for members, values in found.items()}


def draw(results: Results) -> bytes:
    """The picture as an SVG, with the same bytes every time."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 5), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2)
        _draw_subsets(left, results)
        _draw_deadlines(right, results)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw_subsets(axes: "Axes", results: Results) -> None:
    for method, rule, label, every in _SHOWN:
        found = means(results, method, rule)
        sizes = sorted({len(members) for members in found})
        if not sizes:
            continue
        line = [statistics.fmean(a for m, a in found.items() if len(m) == s) for s in sizes]
        (drawn,) = axes.plot(sizes, line, marker="o", markersize=3, label=label)
        if every:
            axes.scatter(
                [len(members) for members in found], list(found.values()),
                color=drawn.get_color(), s=14, alpha=0.5, zorder=3,
            )  # fmt: skip
    for name, value in _levels(results):
        axes.axhline(value, linestyle=":", color="grey")
        axes.annotate(name, (1.0, value), fontsize=8, va="bottom")
    axes.set_xlabel("members that arrived")
    axes.set_ylabel("accuracy on the test split, %")
    axes.set_title("means over seeds; dots: every subset of ours")
    axes.set_xticks(
        range(1, 1 + max((len(m) for m in means(results, "ours", "stacked")), default=1))
    )
    axes.set_ylim(bottom=20)
    axes.legend(fontsize=8, loc="lower right")


def _levels(results: Results) -> Sequence[tuple[str, float]]:
    """What needs no subset: the teacher, and the best single model."""
    levels = [("best single distilled ViT", value) for value in _single(results).values()]
    if results.teacher is not None:
        levels.append(("teacher", 100 * results.teacher.accuracy))
    return levels


def _single(results: Results) -> dict[Members, float]:
    return means(results, "single", "alone")


def _draw_deadlines(axes: "Axes", results: Results) -> None:
    count = max((len(members) for members in means(results, "ours", "stacked")), default=0)
    curves = [(label, means(results, m, r), count, 1.0) for m, r, label, _ in _SHOWN]
    curves.append(("best single distilled ViT", _single(results), 1, 1.0))
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
    axes.legend(fontsize=8, loc="lower right")


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/results/accuracy.svg"))
    arguments = parser.parse_args()
    write_bytes(arguments.out, draw(read_json(arguments.results, Results)))


if __name__ == "__main__":
    main()
