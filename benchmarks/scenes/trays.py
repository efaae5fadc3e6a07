"""Parts that lie in a tray: labels that do not exclude each other, beside classes of their sets.

    python -m benchmarks.scenes.trays --parts parts/ --weights LITE0 --scratch FOLDER

PARTS has scenes of four cameras, `<class>/<scene>/<camera>.jpg`, of parts that come in pairs of
twins by name, of which a draw has one each. A tray is a scene of four of them,
one in each quarter of every camera's picture: up to so many are of the labels, the others of parts
that no label names. LITE0 is a .safetensors of tf_efficientnet_lite0, which stays frozen; both ways
read the same features. Pictures of a test tray are of other scenes than those of training. Writes
benchmarks/results/scenes-trays.json.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.formats.bundle import JOINED_BY, NO_LABEL
from mdp.fusion.fuse import EVEN, Contribution, fuse, labels_held, probabilities, sigmoid
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, PictureSet, open_dataset
from partitioner.data.label_sets import LabelSets
from partitioner.export.several_labels import all_right, label_shares
from partitioner.fusion.several_fit import fit_several_subset
from partitioner.fusion.stacking import fit_subset
from partitioner.pilot.features import network_features
from partitioner.pilot.linear import fit, leave_groups_out
from partitioner.pilot.several import fit_several, leave_out_several
from partitioner.run.progress import Progress

RESULT = RESULTS / "scenes-trays.json"
NETWORK, SIDE = "tf_efficientnet_lite0", 224
CAMERAS = ("top", "left", "right", "back")
#: Pixels of a quarter.
QUARTER = 96
#: Scenes of a part that training trays are made of; the others are those of test trays.
LEARNED = 50

Floats = NDArray[np.floating]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TrayCase:
    """Trays with up to `most` of so many labels, and how many of each set of labels."""

    name: str
    labels: int
    most: int
    train: int
    test: int


#: With few sets each has many trays; with many sets most have few, and some in the test have none.
CASES = (
    TrayCase("4 labels, up to 2 in a tray", 4, 2, 24, 10),
    TrayCase("8 labels, up to 3 in a tray", 8, 3, 3, 2),
)
DRAWS = 3


def write_trays(parts: Path, out: Path, case: TrayCase, draw: int) -> None:
    """Write trays as a data set: `<train or test>/<labels joined>/<tray>/<camera>.jpg`."""
    random = np.random.default_rng([draw, case.labels])
    names = [path.name for path in sorted(parts.iterdir()) if path.is_dir()]
    twins = random.integers(2, size=len(names) // 2).tolist()
    names = [names[2 * pair + one] for pair, one in enumerate(twins)]
    order = random.permutation(len(names)).tolist()
    labels = [names[i] for i in order[: case.labels]]
    others = [names[i] for i in order[case.labels :]]
    sets = [
        some for size in range(case.most + 1) for some in combinations(range(case.labels), size)
    ]
    for split, each, scenes in (
        ("train", case.train, range(LEARNED)),
        ("test", case.test, range(LEARNED, 75)),
    ):
        for some in sets:
            folder = JOINED_BY.join(f"part{i}" for i in some) or NO_LABEL
            for number in range(each):
                fill = random.choice(len(others), 4 - len(some), replace=False).tolist()
                chosen = [labels[i] for i in some] + [others[i] for i in fill]
                scene = [f"s{random.choice(scenes):03d}" for _ in chosen]
                tray = out / split / folder / f"{number:03d}"
                _write_tray(parts, tray, chosen, scene, random.permutation(4).tolist())


def _write_tray(
    parts: Path, tray: Path, chosen: Sequence[str], scenes: Sequence[str], places: Sequence[int]
) -> None:
    tray.mkdir(parents=True)
    for camera in CAMERAS:
        picture = Image.new("RGB", (2 * QUARTER, 2 * QUARTER))
        for part, scene, place in zip(chosen, scenes, places, strict=True):
            with Image.open(parts / part / scene / f"{camera}.jpg") as one:
                quarter = one.resize((QUARTER, QUARTER), Image.Resampling.BILINEAR)
            picture.paste(quarter, (place % 2 * QUARTER, place // 2 * QUARTER))
        picture.save(tray / f"{camera}.jpg", quality=92)


def features(data: Dataset, pictures: PictureSet, weights: Path, cache: Path) -> dict[str, Floats]:
    """Features of trays by camera."""
    found = {}
    for camera in data.cameras:
        views = load_views(pictures, [View(SIDE, camera=camera)], cache, Progress(), "trays")[0]
        found[camera] = network_features(NETWORK, SIDE, weights, views, lambda *_: None).read
    return found


def measure_draw(case: TrayCase, draw: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways by number of cameras, on the same features."""
    folder: Path = options.scratch / f"trays-{case.labels}-{draw}"
    if not folder.exists():
        write_trays(options.parts, folder, case, draw)
    data = open_dataset(str(folder), cameras=CAMERAS, several=True)
    assert data.sets is not None
    cache = options.scratch / "cache"
    cache.mkdir(exist_ok=True)
    sets, split = data.sets, {}
    for name in ("train", "calibration", "test"):
        path = options.scratch / f"features-{case.labels}-{draw}-{name}.npz"
        pictures = data.split(name)
        if not path.exists():
            np.savez(path, **features(data, pictures, options.weights, cache))  # type: ignore[arg-type]
        with np.load(path) as stored:
            split[name] = {camera: stored[camera] for camera in CAMERAS}
    ways = {
        "several": _answers_of_several(sets, data, split),
        "classes": _answers_of_classes(sets, data, split),
        "classes_summed": _answers_of_classes(sets, data, split, summed=True),
    }
    rows, held = [], data.flags(data.test)
    for count in range(1, len(CAMERAS) + 1):
        row: dict[str, Any] = {"case": case.name, "draw": draw, "cameras": count}
        for way, told_by in ways.items():
            found = [told_by(members) for members in combinations(range(len(CAMERAS)), count)]
            shares = [label_shares((0,), told, held) for told in found]
            row[way] = {
                "all_right": float(np.mean([all_right(told, held) for told in found])),
                "each": float(np.mean([one.each for one in shares])),
                "precision": float(
                    np.mean([p for one in shares for p in one.precision if p is not None])
                ),
                "recall": float(np.mean([one.recall for one in shares])),
                "f1": float(np.mean([_f1(told, held) for told in found])),
            }
        rows.append(row)
    return rows


def _answers_of_several(sets: LabelSets, data: Dataset, split: dict[str, dict[str, Floats]]) -> Any:
    """A function from members to the labels told of the test trays, each label by itself."""
    train, held = data.train.targets, data.flags(data.train)
    groups = np.arange(len(train))
    fitted, tested = {}, {}
    for k, camera in enumerate(CAMERAS):
        own = split["train"][camera]
        left_out = leave_out_several(own, held, train, groups)
        assert left_out.by_label is not None
        classifier = fit_several(own, held, left_out.penalty, left_out.by_label)
        later = classifier.logits(np.asarray(split["calibration"][camera], np.float64))
        fitted[k] = _contribution(np.concatenate([left_out.logits, later]))
        tested[k] = _contribution(classifier.logits(np.asarray(split["test"][camera], np.float64)))
    both = np.concatenate([held, data.flags(data.calibration)])

    def told(members: tuple[int, ...]) -> Flags:
        weights = fit_several_subset(fitted, members, both)
        return labels_held(sigmoid(fuse(tested, weights)), weights)

    return told


def _answers_of_classes(
    sets: LabelSets, data: Dataset, split: dict[str, dict[str, Floats]], *, summed: bool = False
) -> Any:
    """The same by classes of their own, one for each set of labels.

    The likeliest set answers; or, `summed`, the labels whose sets have more than one half together.
    """
    train, count = data.train.targets, len(sets.sets)
    groups = np.arange(len(train))
    fitted, tested = {}, {}
    for k, camera in enumerate(CAMERAS):
        own = split["train"][camera]
        left_out = leave_groups_out(own, train, groups, count)
        classifier = fit(own, train, count, penalty=left_out.penalty, sharpness=left_out.sharpness)
        later = classifier.logits(np.asarray(split["calibration"][camera], np.float64))
        fitted[k] = _contribution(np.concatenate([left_out.answers, later]))
        tested[k] = _contribution(classifier.logits(np.asarray(split["test"][camera], np.float64)))
    both = np.concatenate([train, data.calibration.targets])

    def told(members: tuple[int, ...]) -> Flags:
        weights = fit_subset(fitted, members, both)
        shares = probabilities(fuse(tested, weights))
        if summed:
            return np.asarray(shares @ sets.flags(np.arange(count)) > EVEN)
        found: Index = shares.argmax(axis=1)
        return sets.flags(found)

    return told


def _f1(told: Flags, held: Flags) -> float:
    """F1 of each label, on average."""
    both, either = (told & held).sum(axis=0), told.sum(axis=0) + held.sum(axis=0)
    return float(np.mean(2 * both / np.maximum(either, 1)))


def _contribution(logits: Floats) -> Contribution:
    return Contribution(None, logits.astype(np.float32))


#: Ways of answering, in words.
WAYS = {
    "several": "each label by itself",
    "classes": "a class for each set, the likeliest",
    "classes_summed": "the same classes, summed for each label",
}


def figures() -> str:
    """Trays told right by each way, for one to four cameras: the mean of draws and of cameras."""
    kept: list[dict[str, Any]] = read_result(RESULT.stem)["rows"]
    parts = []
    for case in CASES:
        own = [row for row in kept if row["case"] == case.name]
        rows = []
        for way, words in WAYS.items():
            row: dict[str, Any] = {"words": words}
            for count in range(1, len(CAMERAS) + 1):
                each = [one[way] for one in own if one["cameras"] == count]
                for key in ("all_right", "each", "precision", "recall", "f1"):
                    row[f"{key}{count}"] = 100 * mean(one[key] for one in each)
            last = [one[way] for one in own if one["cameras"] == len(CAMERAS)]
            row["draws"] = ", ".join(f"{100 * one['all_right']:.1f}" for one in last)
            rows.append(row)
        every = table(
            rows,
            ("every label right, %", "{words}"),
            *((f"{count} of 4", f"{{all_right{count}:.1f}}") for count in (1, 2, 3)),
            ("all 4", "{all_right4:.1f}"),
            ("by draw", "{draws}"),
        )
        by_label = table(
            rows,
            ("by label, %", "{words}"),
            *(
                column
                for count, words in ((1, "one camera"), (4, "all 4"))
                for column in (
                    (f"right, {words}", f"{{each{count}:.1f}}"),
                    ("precision", f"{{precision{count}:.1f}}"),
                    ("recall", f"{{recall{count}:.1f}}"),
                    ("F1", f"{{f1{count}:.1f}}"),
                )
            ),
        )
        parts.append(f"### {case.name}\n\n{every}\n\n{by_label}")
    return "\n\n".join(parts)


PAGE = Page("benchmarks.scenes.trays", figures)


def main() -> None:
    """Measure every draw of every case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("parts", "weights", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    machine, rows = describe_machine(), list[dict[str, Any]]()
    for case in CASES:
        for draw in range(DRAWS):
            rows += measure_draw(case, draw, options)
            print(rows[-1], flush=True)
    write_json(RESULT, {"machine": machine, "rows": rows})
    PAGE.write()


if __name__ == "__main__":
    main()
