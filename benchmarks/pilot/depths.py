"""Cuts of a vision transformer: accuracy against milliseconds, alone and as a fleet.

    python -m benchmarks.pilot.depths --data FOLDER --weights FOLDER --scratch FOLDER --seeds 3

DATA has DRAW/SET-10-classes/train|test/LABEL for each draw from 0 on and each set of `SETS`, and
parts/LABEL/SCENE/CAMERA.jpg; WEIGHTS has files by timm's names. Networks stay frozen. A classifier
is fitted to the training pictures by the functions of `mdp-partition build`, which also choose
networks by predictions for pictures left out of the fit; nothing is chosen by test pictures.

Every candidate is exported as an agent serves it, and timed on one thread in turns with the
teacher, the whole vision transformer at its own size: processor time, so that work beside it counts
less, and its ratio to the teacher's in the same round. A budget is a share of the teacher's time.
SCRATCH keeps features, exports, times and rows, so that a run that was broken off goes on.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.harness.turns import in_turns
from benchmarks.pilot.pools import CAMERAS, FeatureStore, PicturePool, PoolPictures
from mdp.errors import InputError
from mdp.files import write_bytes, write_json
from mdp.fusion.fuse import Contribution, fuse, weights_for
from mdp.runtimes.onnxruntime import open_session
from partitioner.assembly.class_rows import rows_by_network
from partitioner.export.write import ServedMember, to_onnx
from partitioner.fusion.stacking import fit_fusion
from partitioner.networks.families import FamilyMember
from partitioner.networks.members import to_served_form
from partitioner.pilot.blend import find_blend
from partitioner.pilot.candidates import FrozenNetwork, candidates
from partitioner.pilot.choice import ChosenNetworks, choose
from partitioner.pilot.features import Features, own_rows
from partitioner.pilot.linear import Array, Classifier, Index, fit, leave_groups_out, log_softmax
from partitioner.pilot.measure import COMPARED, backbone_of, plain_shapes
from partitioner.run.progress import Progress
from partitioner.run.weights import weights_in
from partitioner.training.compute import use_threads

RESULT = RESULTS / "depth-cuts.json"
#: Sides of pictures in pixels that every network is tried at.
SIZES = (64, 96, 128, 160, 224)
#: Shares of the teacher's time within which a fleet answers.
BUDGETS = (1 / 8, 1 / 4, 1 / 2, 1.0)
#: Three unequal devices, and how quick they are.
SPEEDS = {"quick": 1.0, "half as quick": 1 / 2, "a quarter": 1 / 4}
#: Rounds in which networks take turns, and runs of each in a round.
ROUNDS, RUNS = 20, 3
#: Layers of the cuts that are timed at each size; all others lie on lines between them, as every
#: layer is the same work.
TIMED = (1, 6, 12)
SETS = {"tinyimagenet": "Tiny ImageNet", "imagenette": "Imagenette", "cifar10": "CIFAR-10"}
PARTS, CAMERAS_FUSED = "parts, one picture", "parts, four cameras"
#: Of every data set; of parts the first ones by the alphabet, five pairs of near twins.
CLASSES = 10
#: More than a class of a draw has.
_EACH = 1000
#: The first and last of 40 scenes of parts to learn from, and of 25 of the test, in each draw; of
#: the third the scenes to learn from are the last 25 and the first 15.
PARTS_DRAWS = (
    (("s000", "s039"), ("s050", "s074")),
    (("s025", "s064"), ("s000", "s024")),
    (("s050", "s014"), ("s025", "s049")),
)


@dataclass(frozen=True, slots=True)
class AnsweredPictures:
    """Answers of every candidate to pictures: log-probabilities `[N, C]` by its place."""

    answers: Sequence[Array]
    targets: Index

    def of_camera(self, camera: str | None) -> "AnsweredPictures":
        """The pictures of one camera, which stand in the order of `CAMERAS`; all for None."""
        if camera is None:
            return self
        rows = slice(CAMERAS.index(camera), None, len(CAMERAS))
        return AnsweredPictures([one[rows] for one in self.answers], self.targets[rows])

    def fused(self) -> "AnsweredPictures":
        """Of every candidate the sum of its answers to all pictures of a scene."""
        parts = [self.of_camera(camera) for camera in CAMERAS]
        sums = [np.sum(some, axis=0) for some in zip(*(one.answers for one in parts), strict=True)]
        return AnsweredPictures(sums, parts[0].targets)

    def accuracies(self) -> list[float]:
        """The share of right answers of each candidate."""
        return [share(one, self.targets) for one in self.answers]


def share(answers: Array, targets: Index) -> float:
    """The share of right answers."""
    return float((answers.argmax(axis=1) == targets).mean())


def compared_rows(pictures: PoolPictures, limit: int) -> Index:
    """Places of the first groups of each class, equally many, and at most `limit` pictures.

    One group of each in any case: as many as a build compares candidates on.
    """
    classes = len(np.unique(pictures.targets))
    of_group = len(pictures.targets) // len(np.unique(pictures.groups))
    each = max(1, limit // (classes * of_group))
    kept = np.concatenate([
        np.unique(pictures.groups[pictures.targets == target])[:each]
        for target in np.unique(pictures.targets)
    ])  # fmt: skip
    return np.flatnonzero(np.isin(pictures.groups, kept))


def teacher_of(some: Sequence[FrozenNetwork]) -> int:
    """The place of the whole vision transformer at its largest size; raises InputError."""
    cuts = [row for row, one in enumerate(some) if one.depth]
    if not cuts:
        raise InputError("--weights: expected those of a plain vision transformer, found none")
    return max(cuts, key=lambda row: (some[row].depth, some[row].spec.image_size))


def within(ratios: Sequence[float], budget: float) -> list[int]:
    """Places of the candidates that take at most so much of the teacher's time.

    Raises InputError where there are none.
    """
    found = [row for row, ratio in enumerate(ratios) if ratio <= budget]
    if not found:
        raise InputError(
            f"a budget of {budget:g} of the teacher's time: expected one that some candidate "
            f"keeps, and the quickest takes {min(ratios):.3f}"
        )
    return found


def ratios_to(
    teacher: int, blocks: Mapping[int, Sequence[Sequence[float]]]
) -> dict[int, tuple[float, float]]:
    """Median milliseconds of each, and the median of its rounds' ratios to the `teacher`'s."""
    medians = {row: np.median(np.array(rounds), axis=1) for row, rounds in blocks.items()}
    return {
        row: (float(np.median(one)), float(np.median(one / medians[teacher])))
        for row, one in medians.items()
    }


def interpolate(some: Sequence[FrozenNetwork], known: Mapping[int, float]) -> list[float]:
    """Values of all candidates: the `known` ones, and on lines between those for other depths.

    A cut lies between the next known ones of its network and size with fewer and more layers.
    """
    found = []
    for row, one in enumerate(some):
        like = [
            (some[other].depth, value)
            for other, value in known.items()
            if (some[other].name, some[other].spec.image_size) == (one.name, one.spec.image_size)
        ]
        depths, values = zip(*sorted(like), strict=True)
        found.append(known.get(row, float(np.interp(one.depth, depths, values))))
    return found


def score(answers: Array, teacher: Array, targets: Index) -> dict[str, float]:
    """Accuracy, and points behind the teacher with their standard error, picture by picture."""
    right, expected = (one.argmax(axis=1) == targets for one in (answers, teacher))
    behind = expected.astype(np.float64) - right
    return {
        "accuracy": float(right.mean()),
        "behind": float(behind.mean()),
        "error": float(behind.std() / math.sqrt(len(targets))),
    }


def score_devices(
    choice: ChosenNetworks,
    learnt: tuple[Mapping[str, Array], Index],
    tested: tuple[Mapping[str, Array], Index],
    teacher: Array,
) -> dict[str, Any]:
    """Scores of the devices' fused answers, and of the worst ones without one of them.

    Answers and classes of the pictures that fusion weights are fitted to, as those of a bundle, and
    of those of the test.
    """
    names, (answers, targets) = list(choice.rows), tested
    weights = fit_fusion(_contributions(learnt[0], names), learnt[1])
    parts = _contributions(answers, names)

    def fused(members: Sequence[int]) -> dict[str, float]:
        answered = fuse(parts, weights_for(members, "stacked", weights))
        return score(answered.astype(np.float64), teacher, targets)

    every = range(len(names))
    without = {
        name: fused([other for other in every if other != k])
        for k, name in enumerate(names)
        if len(names) > 1
    }
    return {
        "rows": choice.rows,
        "predicted": choice.together,
        "alone": {name: share(answers[name], targets) for name in names},
        "together": fused(every),
        "without": {name: one["accuracy"] for name, one in without.items()},
        "one_missing": min(without.values(), key=lambda one: one["accuracy"], default=None),
    }


def _contributions(answers: Mapping[str, Array], names: Sequence[str]) -> dict[int, Contribution]:
    return {
        k: Contribution.of([np.asarray(answers[name], dtype=np.float32)])
        for k, name in enumerate(names)
    }


@dataclass(frozen=True, slots=True)
class Contest:
    """Candidates, the parts of the teacher's time that they take, and answers of all."""

    some: Sequence[FrozenNetwork]
    ratios: Sequence[float]
    #: By which networks are chosen, and by which they are measured.
    learnt: AnsweredPictures
    tested: AnsweredPictures

    def measure_pictures(self, budget: float) -> dict[str, Any]:
        """The best within a budget: cut, network of any family, and three unequal devices.

        All see the same picture. A device that is half as quick has half of the budget.
        """
        names = {row: one.name for row, one in enumerate(self.some)}
        learnt, tested = self.learnt, self.tested
        teacher = tested.answers[teacher_of(self.some)]

        def together(allowed: Mapping[str, Sequence[int]]) -> dict[str, Any]:
            choice = choose(
                allowed, lambda _, row: learnt.answers[row], learnt.targets, networks=names
            )
            fitted, own = (
                {device: one.answers[row] for device, row in choice.rows.items()}
                for one in (learnt, tested)
            )
            return score_devices(choice, (fitted, learnt.targets), (own, tested.targets), teacher)

        fitting = within(self.ratios, budget)
        of_all = within(self.ratios, budget * sum(SPEEDS.values()))
        allowed = {device: within(self.ratios, budget * speed) for device, speed in SPEEDS.items()}
        cuts = {device: self._cuts(rows) for device, rows in allowed.items()}
        return {
            "budget": budget,
            "cut": together({"": self._cuts(fitting)}),
            "single": together({"": fitting}),
            "single_of_all_time": together({"": of_all}),
            "cuts": together(cuts),
            "fleet": together(allowed),
        }

    def measure_cameras(self, budget: float) -> dict[str, Any]:
        """The same where each of four like devices sees a scene by a camera of its own.

        The teacher answers every view as well; the single networks see the best one of theirs.
        """
        learnt = {camera: self.learnt.of_camera(camera) for camera in CAMERAS}
        tested = {camera: self.tested.of_camera(camera) for camera in CAMERAS}
        teacher = self.tested.fused().answers[teacher_of(self.some)]

        def together(rows: Sequence[int], cameras: Sequence[str] = CAMERAS) -> dict[str, Any]:
            choice = choose(
                dict.fromkeys(cameras, rows),
                lambda camera, row: learnt[camera].answers[row],
                learnt[CAMERAS[0]].targets,
            )
            fitted, own = (
                {camera: one[camera].answers[row] for camera, row in choice.rows.items()}
                for one in (learnt, tested)
            )
            targets, expected = (one[CAMERAS[0]].targets for one in (learnt, tested))
            return score_devices(choice, (fitted, targets), (own, expected), teacher)

        def alone(rows: Sequence[int]) -> dict[str, Any]:
            found = [together(rows, [camera]) for camera in CAMERAS]
            return max(found, key=lambda one: float(one["predicted"]))

        fitting = within(self.ratios, budget)
        cuts = self._cuts(fitting)
        return {
            "budget": budget,
            "cut": alone(cuts),
            "single": alone(fitting),
            "cuts": together(cuts),
            "fleet": together(fitting),
        }

    def _cuts(self, rows: Sequence[int]) -> list[int]:
        return [row for row in rows if self.some[row].depth]


@dataclass(frozen=True, slots=True)
class FittedPool:
    """Training pictures of a data set, with features of all candidates, and their networks."""

    some: Sequence[FrozenNetwork]
    weights: Mapping[str, Path]
    pictures: PoolPictures
    features: Mapping[int, Features]

    def answer(
        self, tested: PoolPictures, features: Mapping[int, Features]
    ) -> tuple[AnsweredPictures, AnsweredPictures]:
        """Answers to pictures left out of the fit, as many as a build compares, and to a test."""
        class_rows = rows_by_network(self.weights, self.pictures.labels, None)
        compared = compared_rows(self.pictures, COMPARED)
        left_out, answers = list[Array](), list[Array]()
        for row in range(len(self.some)):
            learnt = np.asarray(self.features[row])
            own = self._own_rows(row, class_rows)
            part, classifier = self._fit(learnt, own, compared)
            left_out.append(part)
            answers.append(log_softmax(classifier.logits(np.asarray(features[row], np.float64))))
        return (
            AnsweredPictures(left_out, self.pictures.targets[compared]),
            AnsweredPictures(answers, tested.targets),
        )

    def _own_rows(self, row: int, class_rows: Mapping[str, Sequence[int]]) -> Classifier | None:
        one = self.some[row]
        if (places := class_rows.get(one.name)) is None:
            return None
        return own_rows(one.name, one.depth, self.weights[one.name], places)

    def _fit(self, learnt: Any, own: Any, compared: Index) -> tuple[Array, Any]:
        """Log-probabilities of the `compared` pictures left out, and the classifier of all."""
        targets, classes = self.pictures.targets, len(self.pictures.labels)

        def predict(rows: Any) -> Any:
            found = leave_groups_out(
                learnt[rows], targets[rows], self.pictures.groups[rows], classes
            )
            if own is None:
                return found, None
            return find_blend(found, own, learnt[rows], targets[rows])

        every = predict(slice(None))
        part = every if len(compared) == len(targets) else predict(compared)
        classifier = fit(
            learnt, targets, classes, penalty=every[0].penalty, sharpness=every[0].sharpness
        )
        if every[1] is not None:
            classifier = every[1].with_fitted(classifier)
        return part[0].answers, classifier


def keep(path: Path, measure: Callable[[], Any]) -> Any:
    """Content of the file `path`, which is measured and written where it does not exist."""
    if not path.exists():
        write_json(path, measure())
    return json.loads(path.read_text())


def rows(
    store: FeatureStore,
    some: Sequence[FrozenNetwork],
    ratios: Sequence[float],
    seeds: int,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """One for each draw of each data set, and two for each of the parts, kept in `folder`."""
    for draw, (name, shown) in product(range(seeds), SETS.items()):
        train, test = (
            PicturePool(f"{draw}/{name}-10-classes/{half}", _EACH, {}) for half in ("train", "test")
        )

        def measure(
            train: PicturePool = train, test: PicturePool = test, shown: str = shown,
            draw: int = draw,
        ) -> Any:  # fmt: skip
            facts, contest = _answers(store, some, ratios, train, test)
            return _row(shown, draw, facts, contest.tested, map(contest.measure_pictures, BUDGETS))

        yield keep(folder / f"{name}-{draw}.json", measure)
    for draw in range(min(seeds, len(PARTS_DRAWS))):
        measure_parts = partial(_measure_parts, store, some, ratios, draw)
        yield from keep(folder / f"parts-{draw}.json", measure_parts)


def _measure_parts(
    store: FeatureStore, some: Sequence[FrozenNetwork], ratios: Sequence[float], draw: int
) -> list[dict[str, Any]]:
    """The parts as single pictures of all cameras, and as scenes."""
    parts = PicturePool("parts", _EACH, {}, classes=CLASSES)
    learnt, tested = (replace(parts, names=names) for names in PARTS_DRAWS[draw])
    facts, contest = _answers(store, some, ratios, learnt, tested)
    scenes = {key: count // len(CAMERAS) for key, count in facts.items()}
    fused = contest.tested.fused()
    return [
        _row(PARTS, draw, facts, contest.tested, map(contest.measure_pictures, BUDGETS)),
        _row(CAMERAS_FUSED, draw, scenes, fused, map(contest.measure_cameras, BUDGETS)),
    ]


def _row(
    name: str,
    draw: int,
    facts: Mapping[str, int],
    tested: AnsweredPictures,
    budgets: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    measured = list(budgets)
    print(name, draw, [round(one["fleet"]["together"]["accuracy"], 3) for one in measured])
    return {
        "data": name,
        "draw": draw,
        **facts,
        "accuracy": tested.accuracies(),
        "budgets": measured,
    }


def _answers(
    store: FeatureStore,
    some: Sequence[FrozenNetwork],
    ratios: Sequence[float],
    learnt: PicturePool,
    tested: PicturePool,
) -> tuple[dict[str, int], Contest]:
    """Counts of pictures learned from, compared and tested, and the answers to them."""
    pictures, features = store.load(learnt, some)
    test, test_features = store.load(tested, some)
    if pictures.labels != test.labels:
        raise InputError(f"{tested.folder}: expected the classes of {learnt.folder}")
    found = FittedPool(some, store.weights, pictures, features).answer(test, test_features)
    facts = {
        "learnt": len(pictures.targets),
        "compared": len(found[0].targets),
        "tested": len(test.targets),
    }
    return facts, Contest(some, ratios, *found)


def export(one: FrozenNetwork, weights: Path, classes: int, folder: Path) -> Path:
    """The ONNX file of a candidate as an agent serves it, made once."""

    path = folder / f"{one.name}-{one.spec.image_size}-{one.depth}.onnx"
    if not path.exists():
        member = FamilyMember(backbone_of(one), classes, weights)
        served = to_served_form(ServedMember(member))
        write_bytes(path, to_onnx(served, one.spec.image_size, member.heads, {}))
    return path


def time_networks(
    files: Mapping[int, Path], sides: Mapping[int, int], teacher: int
) -> dict[int, tuple[float, float]]:
    """Milliseconds of each on one thread, and their ratio to the teacher's, all in turns."""
    random = np.random.default_rng(0)
    runs = {
        row: partial(
            open_session(path, threads=1).run,
            None,
            {"images": random.integers(0, 256, (1, sides[row], sides[row], 3), dtype=np.uint8)},
        )
        for row, path in files.items()
    }
    return ratios_to(teacher, in_turns(runs, ROUNDS, least=RUNS, clock=time.process_time))


def main() -> None:
    asked = arguments(__doc__, data=Path, weights=Path, scratch=Path, seeds=3)
    use_threads(1)

    weights = weights_in(asked.weights)
    names = list(weights)
    some = [one for one in candidates(names, plain_shapes(names)) if one.spec.image_size in SIZES]
    for folder in ("cache", "onnx", "rows"):
        (asked.scratch / folder).mkdir(parents=True, exist_ok=True)
    timed = keep(asked.scratch / "times.json", lambda: _time(some, weights, asked.scratch / "onnx"))
    times = {row: (one["ms"], one["ratio"]) for row, one in enumerate(timed["candidates"]) if one}
    milliseconds, ratios = (
        interpolate(some, {row: pair[place] for row, pair in times.items()}) for place in (0, 1)
    )
    store = FeatureStore(asked.data, weights, asked.scratch / "cache", Progress())
    with threadpool_limits(1, user_api="blas"):
        found = list(rows(store, some, ratios, asked.seeds, asked.scratch / "rows"))
    listed = [
        {
            "network": one.name,
            "image_size": one.spec.image_size,
            "depth": one.depth,
            "ms": milliseconds[row],
            "ratio": ratios[row],
            "timed": row in times,
        }
        for row, one in enumerate(some)
    ]
    write_json(RESULT, {"machine": timed["machine"], "candidates": listed, "rows": found})


def _time(
    some: Sequence[FrozenNetwork], weights: Mapping[str, Path], folder: Path
) -> dict[str, Any]:
    """The machine, and milliseconds and ratio of each candidate, None for those not timed."""
    machine = describe_machine()
    files = {
        row: export(one, weights[one.name], CLASSES, folder)
        for row, one in enumerate(some)
        if not one.depth or one.depth in TIMED
    }
    found = time_networks(
        files, {row: some[row].spec.image_size for row in files}, teacher_of(some)
    )
    return {
        "machine": machine,
        "candidates": [
            {"ms": found[row][0], "ratio": found[row][1]} if row in found else None
            for row in range(len(some))
        ],
    }


if __name__ == "__main__":
    main()
