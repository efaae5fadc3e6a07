"""Accuracy by one to six cameras round an item, frozen and trained.

    make solids OUT=SCENES KICAD=/usr/share/kicad/3dmodels MORE='--classes 30 --test 25 --cameras 6'
    python -m benchmarks.scenes.one_to_six --scenes SCENES --weights FOLDER --scratch FOLDER

SCENES has scenes of six cameras, train/ and test/; WEIGHTS has files by timm's names.
`mdp-partition build` makes a bundle with a device for each camera in `--minutes`, and every subset
of the cameras is measured on the test scenes. Writes benchmarks/results/scenes-one-to-six.json.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

# torch reads it when it is loaded; use_threads says why.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.harness import figure
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.formats.bundle import Evaluation
from partitioner.build.bundle import build_bundle
from partitioner.config import Given
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, use_threads

RESULT = RESULTS / "scenes-one-to-six.json"
CAMERAS = ("top", "left", "right", "back", "front", "low")
PROFILE = "raspberry-pi-5"
FROZEN, TRAINED = "frozen", "trained"


def subsets_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Accuracy of each subset of the cameras, fused by the weights that were fitted to it."""
    return [
        {"cameras": [CAMERAS[place] for place in one.members], "right": one.stacked}
        for one in evaluation.subsets
    ]


def build(scenes: Path, weights: Path, scratch: Path, minutes: float, ms: float) -> dict[str, Any]:
    """A bundle with a device for each camera: accuracies frozen and trained, and what it took."""
    devices = [f"{PROFILE}-{number}" for number in range(1, len(CAMERAS) + 1)]
    config = Given(
        None,
        {
            "run.data": str(scenes),
            "run.weights": str(weights),
            "run.minutes": minutes,
            "plan.profiles": [f"{PROFILE}*{len(CAMERAS)}"],
            "plan.latency_ms": ms,
            "plan.cameras": dict(zip(devices, CAMERAS, strict=True)),
        },
    ).build()
    begun_s, out = time.monotonic(), scratch / f"six-{minutes:g}"
    built = build_bundle(config, out, Progress(), run=Path(f"{out}.run"))
    assert built is not None
    assert built.measured is not None
    measured = built.measured.to_json()
    before = built.measured.frozen
    found = {FROZEN: subsets_of((before or built.report).evaluation)}
    if before is not None:
        found[TRAINED] = subsets_of(built.report.evaluation)
    return {
        "minutes": minutes,
        "seconds": time.monotonic() - begun_s,
        "classes": sum(path.is_dir() for path in (scenes / "train").iterdir()),
        "tested": built.report.evaluation.pictures,
        "networks": sorted({one["network"] for one in measured["pilot"]["chosen"].values()}),
        "trained": measured["trained"],
        "subsets": found,
    }


def by_size(subsets: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Per cent of all subsets with 1, 2, ... cameras, the least first."""
    sizes = range(1, len(CAMERAS) + 1)
    return [
        sorted(100 * one["right"] for one in subsets if len(one["cameras"]) == size)
        for size in sizes
    ]


def figures() -> str:
    """Figures of the page."""
    result = read_result(RESULT.stem)
    sizes = {state: by_size(subsets) for state, subsets in result["subsets"].items()}
    one = {
        camera: {
            state: next(100 * s["right"] for s in subsets if s["cameras"] == [camera])
            for state, subsets in result["subsets"].items()
        }
        for camera in CAMERAS
    }
    epochs = ", ".join(f"{taught['epochs']:.1f}" for taught in result["trained"].values())
    return "\n\n".join(
        (
            f"Per cent of {result['tested']:,} test items of {result['classes']} classes, over all "
            f"subsets of so many cameras; {', '.join(result['networks'])}, {epochs} epochs; "
            f"{format_machine(result['machine'])}.",
            table(
                list(sizes.items()),
                ("", lambda row: row[0]),
                *(
                    (f"{n}", lambda row, n=n: f"{mean(row[1][n - 1]):.1f}{_range(row[1][n - 1])}")
                    for n in range(1, len(CAMERAS) + 1)
                ),
            ),
            "Each camera alone:",
            table(
                list(sizes),
                ("", lambda state: state),
                *((camera, lambda state, c=camera: f"{one[c][state]:.1f}") for camera in CAMERAS),
            ),
        )
    )


def _range(values: Sequence[float]) -> str:
    return f" ({values[0]:.1f} to {values[-1]:.1f})" if len(values) > 1 else ""


def picture() -> bytes:
    """SVG of the mean accuracy by the number of cameras, and of the worst and best subsets."""
    result = read_result(RESULT.stem)

    def draw(canvas: "figure.Figure") -> None:
        axes, sizes = canvas.subplots(), range(1, len(CAMERAS) + 1)
        for state, colour in ((TRAINED, figure.BLUE), (FROZEN, figure.ORANGE)):
            if state not in result["subsets"]:
                continue
            found = by_size(result["subsets"][state])
            means = [mean(values) for values in found]
            axes.fill_between(
                sizes, [v[0] for v in found], [v[-1] for v in found], color=colour, alpha=0.15,
                linewidth=0,
            )  # fmt: skip
            axes.plot(sizes, means, "o-", color=colour, label=state)
            for size, value in zip(sizes, means, strict=True):
                axes.annotate(f"{value:.1f}", (size, value), (0, 6), textcoords="offset points",
                              fontsize=8, color=colour, ha="center")  # fmt: skip
        axes.set_xticks(sizes)
        axes.set_xlabel("cameras that answer")
        axes.set_ylabel("items answered rightly, %")
        axes.set_title(
            f"{result['classes']} electronic parts, mean of all subsets (shaded: worst to best)"
        )
        axes.legend(loc="lower right")

    return figure.draw_svg(6.5, 3.6, draw)


PAGE = Page("benchmarks.scenes.one_to_six", figures, picture, "-cameras.svg")


def main() -> None:
    options = arguments(
        __doc__, scenes=Path, weights=Path, scratch=Path, minutes=10.0, latency_ms=12.0
    )
    use_threads(own_threads())
    options.scratch.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    found = build(
        options.scenes, options.weights, options.scratch, options.minutes, options.latency_ms
    )
    write_json(RESULT, {"machine": machine, **found})


if __name__ == "__main__":
    main()
