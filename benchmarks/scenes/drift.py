"""Number of looks until one of four simulated cameras is known to be covered, without labels.

    python -m benchmarks.scenes.drift --data imagenette/val --scratch FOLDER

Takes the scenes that `benchmarks.scenes` has left in --scratch, and the first model of its bundle
for every camera; fusion and expected agreement are fitted to the calibration split, looks are drawn
from the test split. Writes benchmarks/results/scenes-drift.json.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.scenes.__main__ import CAMERAS, NAMES, SEEDS
from benchmarks.scenes.render import SIDE_PX, cameras, view
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution, FusionWeights, Logits
from mdp.pictures.crop import load_picture
from mdp.requests.camera_drift import CameraDrift
from partitioner.data.crops import View, cut
from partitioner.data.datasets import PictureSet, open_dataset
from partitioner.export.sessions import member_contribution, open_member
from partitioner.fusion.bundle_fit import agreement
from partitioner.fusion.stacking import fit_fusion

RESULT = RESULTS / "scenes-drift.json"
#: Looks before and after a change; runs of each camera; scenes of the turned cameras.
BEFORE, AFTER, RUNS, TURNED = 100, 50, 25, 120
#: A turned camera's picture is displaced by so many of its sides.
SHIFTS = (0.5, 0.75)
#: Looks of one run in which all cameras work.
NORMAL_LOOKS, NORMAL_RUNS = 1000, 5


def looks(detector: CameraDrift, logits: Logits) -> list[tuple[str, ...]]:
    """The suspects after each look; `logits` `[K, N, C]`."""
    return [
        detector.saw({k: Contribution(None, row) for k, row in enumerate(look)}, NAMES)
        for look in logits.swapaxes(0, 1)
    ]


def measure_alarms(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed's alarms."""
    scratch = options.scratch / f"seed-{seed}"
    data = open_dataset(str(scratch / "scenes"), cameras=NAMES)
    bundle = Bundle.open(scratch / "bundle")
    part = bundle.manifest.plan.assignments[0]
    runtime = open_member(bundle.model(0), part, len(data.labels))
    seen = View(part.spec.image_size)

    def logits(pictures: Sequence[Any]) -> Logits:
        side = seen.image_size
        cuts = [cut(load_picture(each, smallest_side=side), seen) for each in pictures]
        return member_contribution(runtime, np.stack(cuts), part).bag

    def of_all(pictures: PictureSet) -> Logits:
        sources: Any = pictures.sources
        return np.stack([logits([scene[name] for scene in sources]) for name in NAMES])

    calibration, normal = of_all(data.calibration), of_all(data.test)
    contributions = {k: Contribution(None, rows) for k, rows in enumerate(calibration)}
    fusion = fit_fusion(contributions, data.calibration.targets)
    fusion = msgspec.structs.replace(fusion, agreement=agreement(contributions, fusion))
    random = np.random.default_rng([seed, 7])
    rows = random.permutation(len(data.test))[:TURNED]
    files = {path.stem: path for path in options.data.rglob("*") if path.is_file()}
    names = [Path(data.test.names[row]).name for row in rows]
    photographs = [Image.open(files[name]).convert("RGB") for name in names]
    noise = random.normal(0, 6, (TURNED, SIDE_PX, SIDE_PX, 1)).clip(0, 255).astype(np.uint8)
    black = logits(list(noise.repeat(3, axis=3)))
    changed = {"covered: black but for noise": np.stack([black] * CAMERAS)}
    for by in SHIFTS:
        turned = []
        for camera in cameras(seed, CAMERAS):
            x, y = camera.shift
            other = replace(camera, shift=(x + float(np.copysign(by, x)), y))
            turned.append(logits([view(each, other, photographs, random) for each in photographs]))
        changed[f"turned by {by:g} of its picture"] = np.stack(turned)
    strange = normal[:, random.permutation(normal.shape[1])[:TURNED]]
    changed["turned to other scenes"] = strange
    return {
        "seed": seed,
        "agreement": fusion.agreement,
        "wrong_alarms": wrong_alarms(fusion, normal, random),
        "changes": {
            name: count_looks(fusion, normal, normal[:, rows], after, random)
            for name, after in changed.items()
        },
    }


def wrong_alarms(fusion: FusionWeights, normal: Logits, random: np.random.Generator) -> list[int]:
    """In each run of `NORMAL_LOOKS`, drawn anew, how often a camera became a suspect."""
    counts = []
    for _ in range(NORMAL_RUNS):
        drawn = random.integers(0, normal.shape[1], NORMAL_LOOKS)
        found = looks(CameraDrift(fusion), normal[:, drawn])
        new = [set(now) - set(last) for last, now in zip([(), *found], found, strict=False)]
        counts.append(sum(map(len, new)))
    return counts


def count_looks(
    fusion: FusionWeights, before: Logits, whole: Logits, after: Logits, random: np.random.Generator
) -> dict[str, Any]:
    """After how many looks the changed camera was a suspect; `whole`, `after` of one scene each."""
    needed, missed, others = [], 0, 0
    for camera in range(CAMERAS):
        for _ in range(RUNS):
            detector = CameraDrift(fusion)
            looks(detector, before[:, random.integers(0, before.shape[1], BEFORE)])
            rows = random.permutation(TURNED)[:AFTER]
            scene = whole[:, rows].copy()
            scene[camera] = after[camera, rows]
            found = looks(detector, scene)
            when = [n for n, suspects in enumerate(found, 1) if NAMES[camera] in suspects]
            others += any(set(suspects) - {NAMES[camera]} for suspects in found)
            missed += not when
            needed += when[:1]
    median = float(np.median(needed)) if needed else None
    return {"looks": needed, "median": median, "missed": missed, "others": others}


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]
    lines = []
    for name in rows[0]["changes"]:
        found = [row["changes"][name] for row in rows]
        lines.append(
            {
                "what": name,
                "noticed": ", ".join(f"{CAMERAS * RUNS - each['missed']}" for each in found),
                "median": ", ".join(f"{each['median']:g}" for each in found),
                "others": sum(each["others"] for each in found),
            }
        )
    columns = (
        ("of 100 changes", "{what}"), ("noticed within 50 looks, by seed", "{noticed}"),
        ("looks, median", "{median}"), ("also another named", "{others}"),
    )  # fmt: skip
    wrong = sum(sum(row["wrong_alarms"]) for row in rows)
    runs = NORMAL_RUNS * len(rows)
    return f"{table(lines, *columns)}\n\nWrong alarms in {runs} runs of {NORMAL_LOOKS:,}: {wrong}."


PAGE = Page("benchmarks.scenes.drift", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.drift", description=__doc__)
    for name in ("data", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    rows = [measure_alarms(seed, options) for seed in SEEDS]
    write_json(RESULT, {"rows": rows})
    PAGE.write()


if __name__ == "__main__":
    main()
