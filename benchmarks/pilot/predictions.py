"""Accuracies predicted by the pilot against the truth, on data sets that it had not seen.

    python -m benchmarks.pilot.predictions --data FOLDER --weights FOLDER --cache FOLDER

DATA has cifar10/, imagenette/, tinyimagenet40/ and parts/ (scenes of four cameras), WEIGHTS files
by timm's names, CACHE gets views and features and may be reused. Of each data set some pictures
are given to the pilot, three times others: it measures every candidate, chooses one for each of
three unequal devices (or for each camera), and says how accurate they are together. Then the
classifiers are fitted to the same pictures and answer others. Writes
benchmarks/results/pilot-predictions.json and the page's figures.
"""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table
from benchmarks.pilot.pools import CAMERAS, FeatureStore, PicturePool, PoolPictures
from mdp.files import write_json
from partitioner.pilot.candidates import FrozenNetwork, candidates
from partitioner.pilot.choice import choose
from partitioner.pilot.features import Features
from partitioner.pilot.linear import (
    Array,
    HeldOutPredictions,
    Index,
    fit,
    interval,
    leave_groups_out,
    log_softmax,
)
from partitioner.pilot.measure import plain_shapes
from partitioner.run.progress import Progress
from partitioner.run.weights import weights_in
from partitioner.training.compute import use_threads

RESULT = RESULTS / "pilot-predictions.json"
DRAWS = 3
#: Cuts after every second layer are tried at both, other networks at the larger one.
SMALL_PX, LARGE_PX = 64, 128
#: Layers that the middle device has the time for, at the larger size.
_MIDDLE = 6

_LEARNT = ("baboon", "basketball", "bathtub", "beaker", "bighorn", "birdhouse", "black_stork",
           "cauliflower", "convertible", "cougar")  # fmt: skip
CIFAR = PicturePool("cifar10/train", 150, {"cat": 500, "dog": 500})
CIFAR_TEST = PicturePool("cifar10/test", 100, {"cat": 300, "dog": 300})
NETTE = PicturePool("imagenette/val", 400, {})
NETTE_TRAIN = PicturePool("imagenette/train", 60, {})
NETTE_VAL = PicturePool("imagenette/val", 60, {}, "ILSVRC2012_val")
TINY = PicturePool("tinyimagenet40/val", 50, {})
TINY_TRAIN = PicturePool("tinyimagenet40/train", 25, dict.fromkeys(_LEARNT, 60))
PARTS = PicturePool("parts", 40, {})


@dataclass(frozen=True, slots=True)
class PilotCase:
    """A data set: classes, and pictures or scenes of each that the pilot gets."""

    name: str
    learnt: PicturePool
    #: Names, or the places of the first and the last one among all, in their order.
    classes: Sequence[str] | range
    each: int
    #: Where the truth is measured; None: on the other pictures of `learnt`.
    tested: PicturePool | None = None
    #: Of scenes: one for each device.
    cameras: tuple[str, ...] = ()
    #: The networks had been trained on the pilot's pictures, and not on those of the test.
    known: bool = False

    @property
    def uses_all(self) -> bool:
        """True where the pilot gets every picture of the pool, so that all draws are one."""
        most = [self.learnt.more.get(str(label), self.learnt.each) for label in self.classes]
        return max(most) <= self.each


ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
VEHICLES = ("airplane", "automobile", "ship", "truck")
CASES = (
    PilotCase("CIFAR-10", CIFAR, range(10), 5, CIFAR_TEST),
    PilotCase("CIFAR-10", CIFAR, range(10), 20, CIFAR_TEST),
    PilotCase("CIFAR-10", CIFAR, range(10), 100, CIFAR_TEST),
    PilotCase("CIFAR-10, cat and dog", CIFAR, ("cat", "dog"), 5, CIFAR_TEST),
    PilotCase("CIFAR-10, cat and dog", CIFAR, ("cat", "dog"), 500, CIFAR_TEST),
    PilotCase("CIFAR-10, vehicles", CIFAR, VEHICLES, 50, CIFAR_TEST),
    PilotCase("CIFAR-10, animals", CIFAR, ANIMALS, 30, CIFAR_TEST),
    PilotCase("Imagenette", NETTE, range(10), 5),
    PilotCase("Imagenette", NETTE, range(10), 54),
    PilotCase("Imagenette, first three", NETTE, range(3), 200),
    PilotCase("Imagenette, last two", NETTE, range(8, 10), 20),
    PilotCase("Tiny ImageNet", TINY, range(40), 5),
    PilotCase("Tiny ImageNet", TINY, range(40), 25),
    PilotCase("Tiny ImageNet, last twenty", TINY, range(20, 40), 10),
    PilotCase("Tiny ImageNet, second ten", TINY, range(10, 20), 25),
    PilotCase("Tiny ImageNet, first five", TINY, range(5), 30),
    PilotCase("parts, one camera", PARTS, range(30), 25, cameras=("top",)),
    PilotCase("parts, one camera, last ten", PARTS, range(20, 30), 10, cameras=("left",)),
    PilotCase("parts, four cameras", PARTS, range(30), 8, cameras=CAMERAS),
    PilotCase("parts, four cameras, first ten", PARTS, range(10), 20, cameras=CAMERAS),
    PilotCase("parts, four cameras, four", PARTS, range(10, 14), 5, cameras=CAMERAS),
    PilotCase("Tiny ImageNet", TINY_TRAIN, range(40), 25, TINY, known=True),
    PilotCase("Tiny ImageNet, first ten", TINY_TRAIN, _LEARNT, 54, TINY, known=True),
    PilotCase("Imagenette", NETTE_TRAIN, range(10), 54, NETTE_VAL, known=True),
)


@dataclass(frozen=True, slots=True)
class Part:
    """Some pictures of a pool: their rows there, classes and scenes, both counted from 0."""

    rows: Index
    targets: Index
    groups: Index
    #: The camera of each picture; empty without scenes.
    cameras: Sequence[str]

    def rows_of_camera(self, camera: str | None) -> Index:
        """Places of the pictures of a camera, ascending by scene; all of them for None."""
        if camera is None:
            return np.arange(len(self.rows))
        return np.flatnonzero(np.array(self.cameras) == camera)


def part_of(
    pictures: PoolPictures,
    chosen: Sequence[int],
    random: np.random.Generator,
    cameras: Sequence[str],
    part: slice,
) -> Part:
    """The pictures of `part` of each class's groups in a drawn order, of all classes equally many.

    Were a class more frequent in the test than for the pilot, the two would have to differ.
    """
    rows, targets, groups = list[Index](), list[Index](), list[Index]()
    orders = [
        random.permutation(np.unique(pictures.groups[pictures.targets == place]))
        for place in chosen
    ]
    least, count = min(len(order) for order in orders), 0
    for target, order in enumerate(orders):
        for group in np.sort(order[:least][part]):
            found = np.flatnonzero(pictures.groups == group)
            if cameras:
                found = found[[CAMERAS.index(camera) for camera in sorted(cameras)]]
            rows.append(found)
            targets.append(np.full(len(found), target))
            groups.append(np.full(len(found), count))
            count += 1
    names = [sorted(cameras)[k % len(cameras)] for k in range(count * len(cameras))]
    return Part(np.concatenate(rows), np.concatenate(targets), np.concatenate(groups), names)


def devices_of(case: PilotCase, some: Sequence[FrozenNetwork]) -> dict[str, list[int]]:
    """The candidates of each device: three unequal ones, or for each camera all."""
    if len(case.cameras) > 1:
        return {camera: list(range(len(some))) for camera in case.cameras}
    small = [row for row, one in enumerate(some) if one.spec.image_size == SMALL_PX]
    middle = [row for row, one in enumerate(some) if 0 < one.depth <= _MIDDLE]
    return {"small": small, "middle": sorted({*small, *middle}), "large": list(range(len(some)))}


@dataclass(frozen=True, slots=True)
class Truth:
    """Answers of a classifier fitted to the pilot's pictures, to those of the test."""

    features: Mapping[int, Features]
    part: Part
    learnt: Mapping[int, Features]
    pilot: Part
    num_classes: int

    def answers(self, row: int, left_out: HeldOutPredictions) -> Array:
        """Log-probabilities `[T, C]` of a candidate."""
        classifier = fit(
            np.asarray(self.learnt[row][self.pilot.rows]), self.pilot.targets, self.num_classes,
            penalty=left_out.penalty, sharpness=left_out.sharpness,
        )  # fmt: skip
        return log_softmax(classifier.logits(np.asarray(self.features[row][self.part.rows])))


def share(answers: Array, targets: Index) -> float:
    """The share of right answers."""
    return float((answers.argmax(axis=1) == targets).mean())


def measure_draw(
    case: PilotCase, store: FeatureStore, some: Sequence[FrozenNetwork], draw: int
) -> dict[str, Any]:
    """Predictions of the pilot for one draw of pictures, and the truth."""
    pictures, features = store.load(case.learnt, some)
    labels = case.classes
    if isinstance(labels, range):
        labels = [pictures.labels[place] for place in labels]
    chosen = [pictures.labels.index(label) for label in labels]
    seed = [draw, len(chosen), case.each]
    pilot = part_of(pictures, chosen, np.random.default_rng(seed), case.cameras, slice(case.each))
    tested, truth_features = pictures, features
    if case.tested is not None:
        tested, truth_features = store.load(case.tested, some)
    test = part_of(
        tested,
        [tested.labels.index(label) for label in labels],
        np.random.default_rng(seed),
        case.cameras,
        slice(None) if case.tested else slice(case.each, None),
    )
    begin, processor = time.perf_counter(), time.process_time()
    left_out = [
        leave_groups_out(
            np.asarray(features[row][pilot.rows]), pilot.targets, pilot.groups, len(chosen)
        )
        for row in range(len(some))
    ]
    camera_of = {camera: camera for camera in case.cameras} if len(case.cameras) > 1 else {}
    only = case.cameras[0] if case.cameras else None

    def rows_of(part: Part, device: str) -> Index:
        return part.rows_of_camera(camera_of.get(device, only))

    targets = pilot.targets[pilot.rows_of_camera(only)]
    choice = choose(
        devices_of(case, some),
        lambda device, row: left_out[row].answers[rows_of(pilot, device)],
        targets,
    )
    took = {"seconds": time.perf_counter() - begin, "processor_s": time.process_time() - processor}
    truth = Truth(truth_features, test, features, pilot, len(chosen))
    answers = [truth.answers(row, one) for row, one in enumerate(left_out)]
    own = {device: answers[row][rows_of(test, device)] for device, row in choice.rows.items()}
    right, total = test.targets[test.rows_of_camera(only)], np.sum(list(own.values()), axis=0)
    return {
        "pictures": len(targets),
        "tested": len(right),
        "together": [choice.together, share(total, right)],
        "alone": {
            device: [choice.alone[device], share(own[device], right)] for device in choice.rows
        },
        "without": {
            device: [choice.without[device], share(total - own[device], right)]
            for device in choice.rows
        },
        "candidates": [
            [share(one.answers, pilot.targets), share(answers[row], test.targets)]
            for row, one in enumerate(left_out)
        ],
        "single_pictures": len(pilot.targets),
        "chosen": {device: some[row].words for device, row in choice.rows.items()},
        **took,
    }


def rows(store: FeatureStore, draws: int) -> Iterator[dict[str, Any]]:
    """One for each draw of each data set."""
    names = list(store.weights)
    some = [
        one
        for one in candidates(names, plain_shapes(names))
        if one.spec.image_size in ((SMALL_PX, LARGE_PX) if one.depth else (LARGE_PX,))
        and one.depth % 2 == 0
    ]
    for draw in range(draws):
        for case in CASES:
            if draw and case.uses_all:
                continue
            row = {
                "data": case.name, "classes": len(case.classes), "each": case.each,
                "cameras": len(case.cameras), "known": case.known, "draw": draw,
                **measure_draw(case, store, some, draw),
            }  # fmt: skip
            print(row["data"], row["classes"], row["each"], row["together"], flush=True)
            yield row


def holds(row: Mapping[str, Any]) -> bool:
    """Tell whether the measured share lies in the interval stated for so large a test."""
    predicted, true = row["together"]
    low, high = interval(round(predicted * row["pictures"]), row["pictures"], row["tested"])
    return bool(low <= true <= high)


def of_case(row: Mapping[str, Any]) -> tuple[str, int, bool]:
    """The data set of a row."""
    return row["data"], row["each"], row["known"]


def figures() -> str:
    """Each data set, the errors, and what their intervals hold."""
    result = read_result("pilot-predictions")
    by_case: dict[tuple[str, int, bool], list[Any]] = {}
    for row in result["rows"]:
        by_case.setdefault(of_case(row), []).append(row)
    unseen = [row for row in result["rows"] if not row["known"]]
    passes = {
        (one["network"], one["image_size"]): [
            other for other in result["passes"]
            if (other["network"], other["image_size"]) == (one["network"], one["image_size"])
        ]
        for one in result["passes"]
    }  # fmt: skip
    columns = (
        ("pictures", lambda rows: rows[0]["data"]),
        ("classes", lambda rows: rows[0]["classes"]),
        ("of each", lambda rows: rows[0]["each"]),
        ("tested", lambda rows: f"{rows[0]['tested']:,}"),
        ("predicted, %", lambda rows: _shares(rows, 0)),
        ("measured, %", lambda rows: _shares(rows, 1)),
        ("held", lambda rows: f"{sum(map(holds, rows))} of {len(rows)}"),
    )
    small, large = ([r for r in unseen if (r["pictures"] >= 200) == many] for many in (False, True))
    return "\n\n".join((
        f"{len({of_case(row) for row in unseen})} data sets, {len(unseen)} predictions; "
        f"{format_machine(result['machine'])}.",
        table(
            [("all", unseen), ("from 200 pictures or scenes on", large), ("fewer", small)],
            ("predictions", lambda pair: f"{pair[0]}: {len(pair[1])}"),
            ("median error, points", lambda pair: f"{_median(pair[1], np.abs):.1f}"),
            ("median of predicted less measured", lambda pair: f"{_median(pair[1]):+.1f}"),
            ("in the interval for the test", lambda pair: f"{np.mean([*map(holds, pair[1])]):.0%}"),
        ),
        table([rows for key, rows in by_case.items() if not key[2]], *columns),
        "Networks trained on the pilot's pictures, and not on those of the test:",
        table([rows for key, rows in by_case.items() if key[2]], *columns),
        table(
            passes.items(),
            ("features of", lambda pair: f"{pair[0][0]} at {pair[0][1]} px"),
            ("candidates", lambda pair: pair[1][0]["candidates"]),
            ("processor ms a picture", lambda pair: _milliseconds(pair[1])),
        ),
    ))  # fmt: skip


def _shares(rows: Sequence[Mapping[str, Any]], place: int) -> str:
    return ", ".join(f"{100 * row['together'][place]:.1f}" for row in rows)


def _median(rows: Sequence[Mapping[str, Any]], of: Any = np.asarray) -> float:
    errors = [100 * (row["together"][0] - row["together"][1]) for row in rows]
    return float(np.median(of(np.array(errors))))


def _milliseconds(passes: Sequence[Mapping[str, Any]]) -> str:
    total = sum(one["processor_s"] for one in passes)
    return f"{1000 * total / sum(one['pictures'] for one in passes):.1f}"


PAGE = Page("benchmarks.pilot.predictions", figures)


def main() -> None:
    asked = arguments(__doc__, data=Path, weights=Path, cache=Path, draws=DRAWS)
    use_threads(2)
    machine = describe_machine()
    asked.cache.mkdir(exist_ok=True)
    store = FeatureStore(asked.data, weights_in(asked.weights), asked.cache, Progress())
    found = list(rows(store, asked.draws))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    write_json(
        RESULT, {"machine": machine, "passes": store.seconds(), "peak_mib": peak_mib, "rows": found}
    )


if __name__ == "__main__":
    main()
