"""The figure of README and docs/results/solids.md: accuracy by cameras, and with each one lost.

python -m benchmarks scenes-verdict

On the left every subset of the cameras of the bundle `parts`, as its manifest has it; on the right
a network for each camera against one that sees all views (benchmarks/results/scenes-verdict.json).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import figure
from benchmarks.harness.results import read_result
from mdp.formats.bundle import Bundle
from mdp.formats.packaged import bundle_in_package

RESULT = "scenes-verdict"
#: A subset of the bundle's cameras, as the places of its devices, and its accuracy in per cent.
Subsets = Mapping[tuple[int, ...], float]


def of_bundle(bundle: Bundle) -> tuple[list[str], Subsets]:
    """The cameras in the plan's order, and the accuracy of each subset of them."""
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    cameras = [str(part.camera) for part in bundle.manifest.plan.assignments]
    return cameras, {one.members: 100 * one.stacked for one in evaluation.subsets}


def means(subsets: Subsets) -> list[float]:
    """The mean accuracy of all subsets with 1, 2, ... cameras."""
    sizes = sorted({len(members) for members in subsets})
    return [float(np.mean([v for m, v in subsets.items() if len(m) == size])) for size in sizes]


def lost(cameras: Sequence[str], subsets: Subsets) -> dict[str, float]:
    """Camera -> accuracy of all others."""
    places = range(len(cameras))
    return {
        name: subsets[tuple(place for place in places if place != gone)]
        for gone, name in enumerate(cameras)
    }


def picture() -> bytes:
    """The SVG."""
    bundle = Bundle.open(bundle_in_package("parts"))
    rows = {row["way"]: row for row in read_result(RESULT)["rows"]}
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None

    def panels(canvas: "figure.Figure") -> None:
        left, right = canvas.subplots(1, 2)
        _demo(left, *of_bundle(bundle))
        kinds = len(bundle.manifest.labels)
        left.set_title(f"{kinds} mechanical parts, {evaluation.pictures} items (the demo)")
        _trained(right, rows)
        right.set_title(f"{rows['cameras']['classes']} electronic parts, trained for ten minutes")
        for axes in (left, right):
            axes.set_xticks(range(1, 5))
            axes.set_xlabel("cameras that answer")
        left.set_ylabel("items answered rightly, %")

    return figure.draw_svg(9, 3.4, panels)


def _demo(axes: "figure.Axes", cameras: Sequence[str], subsets: Subsets) -> None:
    sizes = [len(members) for members in subsets]
    axes.plot(range(1, len(cameras) + 1), means(subsets), color=figure.BLUE, label="mean")
    axes.plot(
        sizes, list(subsets.values()), "o", color=figure.BLUE, markersize=4, label="each subset"
    )
    without = lost(cameras, subsets)
    x = len(cameras) - 1
    axes.plot([x] * len(without), list(without.values()), "o", color=figure.RED, markersize=5,
              label="one camera lost")  # fmt: skip
    everyone = subsets[tuple(range(len(cameras)))]
    axes.plot(len(cameras), everyone, "o", color=figure.GREEN, markersize=6, label="all")
    axes.annotate(f"{everyone:.1f}", (len(cameras), everyone), (6, -2),
                  textcoords="offset points", fontsize=8, color=figure.GREEN)  # fmt: skip
    # Text from the lowest upwards, so far apart that it can be read, and below the line of means.
    height = everyone - min(subsets.values())
    low = -np.inf
    for name, value in sorted(without.items(), key=lambda item: item[1]):
        low = max(value, low + 0.075 * height)
        axes.annotate(
            f"without {name} {value:.1f}", (x, value), (x + 0.12, low - 0.12 * height),
            fontsize=7.5, color=figure.RED, va="center",
        )  # fmt: skip
    axes.set_xlim(0.7, len(cameras) + 0.5)
    axes.legend(loc="lower right")


def _trained(axes: "figure.Axes", rows: Mapping[str, Mapping[str, Any]]) -> None:
    for way, label, colour in (
        ("cameras", "a network for each camera, fused", figure.BLUE),
        ("views", "one network that sees all views", figure.ORANGE),
    ):
        values = [100 * value for value in rows[way]["by_size"]]
        axes.plot(range(1, len(values) + 1), values, "o-", color=colour, label=label)
        axes.annotate(f"{values[-1]:.1f}", (len(values), values[-1]), (5, 3),
                      textcoords="offset points", fontsize=8, color=colour)  # fmt: skip
    best = 100 * max(rows["cameras"]["alone"])
    axes.axhline(best, color=figure.MIDDLE, linewidth=0.9, linestyle="--",
                 label=f"the best camera alone {best:.1f}")  # fmt: skip
    axes.set_xlim(0.7, 4.5)
    axes.legend(loc="lower right")
