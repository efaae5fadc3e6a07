"""Tables of networks that were measured on the user's own pictures."""

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from partitioner.export.evaluate import Report

if TYPE_CHECKING:
    from partitioner.build.measured.build import MeasuredBuild
    from partitioner.pilot.measure import Pilot


def print_pilot(pilot: "Pilot") -> None:
    """Accuracy by network, depth and picture size, and the choice for each device."""
    sides = sorted({one.candidate.spec.image_size for one in pilot.measured.values()})
    table = Table(
        "network",
        *(f"{side} px" for side in sides),
        title=f"% of {pilot.singles:,} training pictures, each left out of its classifier",
    )
    cells: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for row, one in pilot.measured.items():
        place = one.candidate.name, one.candidate.depth
        share = pilot.accuracy_of(row)
        chosen = "*" if row in pilot.choice.rows.values() else ""
        cells[place][one.candidate.spec.image_size] = f"{100 * share:.1f}{chosen}"
    for (name, depth), by_side in cells.items():
        what = f"{name}, {depth} layers" if depth else name
        table.add_row(what, *(by_side.get(side, "") for side in sides))
    console = Console()
    console.print(table)
    for device, row in pilot.choice.rows.items():
        one = pilot.measured[row]
        own = "" if one.blend is None else ", with rows of its own classifier"
        console.print(
            f"* {device}: {one.candidate.words}{own}, {pilot.latency_ms[device]:.1f} ms predicted",
            soft_wrap=True,
            highlight=False,
        )


def accuracy_line(build: "MeasuredBuild") -> str:
    """One line: the accuracy of all devices before, and on the test split."""
    pictures = build.report.evaluation.pictures
    what = "every label right, all together" if build.report.evaluation.by_label else "all together"
    text = f"{what}: {build.pilot.predict_words(pictures)}"
    if build.frozen is not None:
        text += f", measured {_all_together(build.frozen):.1%} frozen and"
        return f"{text} {_all_together(build.report):.1%} trained, on the test split"
    return f"{text}, measured {_all_together(build.report):.1%} on the test split"


def _all_together(report: Report) -> float:
    """The accuracy of all members."""
    every = tuple(member.k for member in report.evaluation.members)
    return next(one.stacked for one in report.evaluation.subsets if one.members == every)
