"""Fusion fitted to few scenes or pictures, and the gain by twice as many: predicted, measured.

    python -m benchmarks.scenes.few --parts parts/ --tiny tinyimagenet40/ --weights VIT \
        --scratch FOLDER

PARTS has scenes of four cameras, `<class>/<scene>/<camera>.jpg` of 128 px, TINY the folders train/
and val/, VIT is a .safetensors of vit_tiny_patch16_224. Members are its first layers, frozen, with
linear classifiers fitted to their features. Classes, the cameras' depths and the scenes that fusion
is fitted to are drawn. Writes benchmarks/results/scenes-few.json.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, weights_for
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import PictureSet
from partitioner.data.memmaps import Views
from partitioner.fusion.stacking import fit_subset
from partitioner.pilot.features import cut_features
from partitioner.pilot.learning_curve import CurveMember, learning_curve
from partitioner.pilot.linear import fit, leave_groups_out, log_softmax
from partitioner.run.progress import Progress

RESULT = RESULTS / "scenes-few.json"
NETWORK = "vit_tiny_patch16_224"
CAMERAS = ("top", "left", "right", "back")
#: Layers of the four cameras' networks, dealt anew in every draw.
DEPTHS = (12, 9, 6, 3)
#: Cuts on the pictures of --tiny: pixels and layers.
CUTS = ((64, 5), (96, 9), (128, 9))
#: Classes in a draw, and draws.
CLASSES, DRAWS = 8, 12
#: Scenes of a class that fusion is fitted to.
FITTED = (1, 2, 4, 10)
#: Of these the page shows some.
SHOWN = (1, 4, 10)
#: Members of the largest subsets.
SHOWN_MEMBERS = {
    "cameras": 4, "cameras, logits of unlike sizes": 4, "cuts on one picture": 3,
}  # fmt: skip
#: Standard deviation of the logarithm of the sizes of logits, where they are unlike.
UNLIKE = 1.0
#: Ways to answer, beside the best member alone in hindsight.
WAYS = ("chosen", "equal", "fitted", "with_learned")
#: Learning curves: classes in a draw, scenes of a class, and layers.
CURVES, LEARNED, CURVE_DEPTH = (8, 16, 30), (5, 8, 16, 32), 9

Floats = NDArray[np.floating]
Logits = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SceneSplit:
    """Places of a class's scenes: to learn from, to fit fusion to, to test."""

    learned: range
    fitted: range
    tested: range


SPLIT = SceneSplit(range(40), range(40, 50), range(50, 75))
TINY_SPLIT = SceneSplit(range(25), range(25, 50), range(50, 75))


def views_of(files: Sequence[Sequence[Path]], side: int, name: str, cache: Path) -> Views:
    """Views `[C * S, side, side, 3]` of as many files of every class, which `name` tells apart."""
    flat = [file for one in files for file in one]
    pictures = PictureSet(
        sources=list(flat),
        names=tuple(str(number) for number in range(len(flat))),
        targets=np.repeat(np.arange(len(files)), len(files[0])),
        digest=name,
    )
    cache.mkdir(parents=True, exist_ok=True)
    return load_views(pictures, [View(side)], cache, Progress(), name)[0]


def features(
    files: Sequence[Sequence[Path]],
    side: int,
    depths: Sequence[int],
    name: str,
    options: argparse.Namespace,
) -> dict[int, Floats]:
    """Features `[C, S, D]` after each of `depths` layers, of `files` by class; kept."""
    path: Path = options.scratch / f"features-{name}.npz"
    if not path.exists():
        pixels = views_of(files, side, f"few-{name}", options.scratch / "cache")
        found = cut_features(NETWORK, side, options.weights, depths, pixels, lambda *_: None)
        arrays: dict[str, Any] = {str(depth): one for depth, one in found.items()}
        np.savez(path, **arrays)
    with np.load(path) as stored:
        return {
            depth: stored[str(depth)].reshape(len(files), len(files[0]), -1) for depth in depths
        }


def scenes(options: argparse.Namespace) -> dict[tuple[str, int], Floats]:
    """Features of --parts by camera and depth."""
    folders = sorted(path for path in options.parts.iterdir() if path.is_dir())
    found = {}
    for camera in CAMERAS:
        files = [[scene / f"{camera}.jpg" for scene in sorted(one.iterdir())] for one in folders]
        for depth, one in features(files, 128, DEPTHS[::-1], camera, options).items():
            found[camera, depth] = one
    return found


def pictures(options: argparse.Namespace) -> list[Floats]:
    """Features of --tiny for each of `CUTS`: 50 pictures of train/ and 25 of val/."""
    labels = sorted(path.name for path in (options.tiny / "train").iterdir())
    files = [
        [
            file
            for part, count in (("train", 50), ("val", 25))
            for file in sorted((options.tiny / part / label).iterdir())[:count]
        ]
        for label in labels
    ]
    return [features(files, side, [depth], f"tiny-{side}", options)[depth] for side, depth in CUTS]


@dataclass(frozen=True, slots=True)
class MemberAnswers:
    """One draw's members: logits `[C, S, C]` of all scenes, and of those learned by others."""

    logits: list[Logits]
    left_out: list[Logits]

    @classmethod
    def of(
        cls, members: Sequence[Floats], split: SceneSplit, sizes: Sequence[float]
    ) -> "MemberAnswers":
        """Each of `members`' features `[C, S, D]` with a classifier, logits times its size."""
        classes, count = members[0].shape[0], len(split.learned)
        targets = np.repeat(np.arange(classes), count)
        logits, left_out = [], []
        for member, size in zip(members, sizes, strict=True):
            learned = member[:, list(split.learned)].reshape(classes * count, -1)
            found = leave_groups_out(learned, targets, np.arange(len(targets)), classes)
            classifier = fit(
                learned, targets, classes, penalty=found.penalty, sharpness=found.sharpness
            )
            flat = np.asarray(member.reshape(-1, member.shape[-1]), np.float64)
            logits.append(size * classifier.logits(flat).reshape(*member.shape[:2], classes))
            left_out.append(size * found.answers)
        return cls(logits, left_out)


def share(logits: Mapping[int, Logits], weights: Any, targets: Index) -> float:
    """Percent right of fused `logits` `[N, C]`."""
    parts = {k: Contribution(None, one.astype(np.float32)) for k, one in logits.items()}
    return 100 * float((fuse(parts, weights).argmax(axis=1) == targets).mean())


def fuse_ways(
    answers: MemberAnswers, split: SceneSplit, fitted: Sequence[int], members: Sequence[int]
) -> dict[str, float]:
    """Percent right of test scenes by every way, fused on the scenes `fitted` of each class."""
    classes = answers.logits[0].shape[0]

    def rows(places: Sequence[int]) -> tuple[dict[int, Logits], Index]:
        logits = {k: answers.logits[k][:, list(places)].reshape(-1, classes) for k in members}
        return logits, np.repeat(np.arange(classes), len(places))

    (known, right), (asked, targets) = rows(fitted), rows(split.tested)
    learned = np.repeat(np.arange(classes), len(split.learned))
    more = {k: np.concatenate([known[k], answers.left_out[k]]) for k in members}
    alone = {k: 100 * float((asked[k].argmax(axis=1) == targets).mean()) for k in members}
    seen = {k: float((known[k].argmax(axis=1) == right).mean()) for k in members}

    def contributions(logits: Mapping[int, Logits]) -> dict[int, Contribution]:
        return {k: Contribution(None, one.astype(np.float32)) for k, one in logits.items()}

    own = fit_subset(contributions(known), members, right)
    both = fit_subset(contributions(more), members, np.concatenate([right, learned]))
    plain = weights_for(members, "bagged", FusionWeights(classes, [own]))
    return {
        "best": max(alone.values()),
        "chosen": alone[max(members, key=lambda k: seen[k])],
        "equal": share(asked, plain, targets),
        "fitted": share(asked, own, targets),
        "with_learned": share(asked, both, targets),
    }


def rows_of(
    name: str, draws: Iterator[tuple[list[Floats], list[float]]], split: SceneSplit, seed: int
) -> Iterator[dict[str, Any]]:
    """For each count of fitted scenes and each number of members the means over the draws."""
    random = np.random.default_rng([seed, 1])
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for members, sizes in draws:
        answers = MemberAnswers.of(members, split, sizes)
        for count in FITTED:
            fitted = random.choice(np.array(split.fitted), count, replace=False).tolist()
            for size in range(2, len(members) + 1):
                for subset in combinations(range(len(members)), size):
                    one = fuse_ways(answers, split, fitted, subset)
                    found.setdefault((count, size), []).append(one)
    for (count, size), results in sorted(found.items()):
        over = {way: np.array([one[way] - one["best"] for one in results]) for way in WAYS}
        yield {
            "of": name, "fitted": count, "members": size, "subsets": len(results),
            "best": float(np.mean([one["best"] for one in results])),
            "over": {way: float(points.mean()) for way, points in over.items()},
            "low": {way: float(np.quantile(points, 0.1)) for way, points in over.items()},
        }  # fmt: skip


def scene_draws(
    cameras: Mapping[tuple[str, int], Floats], unlike: float
) -> Iterator[tuple[list[Floats], list[float]]]:
    """Members of every draw: twin classes, the cameras' depths and sizes of their logits."""
    random = np.random.default_rng(0)
    for _ in range(DRAWS):
        pairs = random.choice(15, CLASSES // 2, replace=False)
        classes = np.sort(np.concatenate([2 * pairs, 2 * pairs + 1]))
        depths = random.permutation(DEPTHS).tolist()
        sizes = np.exp(unlike * random.normal(size=len(CAMERAS))).tolist()
        members = [cameras[pair][classes] for pair in zip(CAMERAS, depths, strict=True)]
        yield members, sizes


def picture_draws(cuts: Sequence[Floats]) -> Iterator[tuple[list[Floats], list[float]]]:
    """Members of every draw of ten classes of --tiny."""
    random = np.random.default_rng(0)
    for _ in range(DRAWS):
        classes = np.sort(random.choice(len(cuts[0]), 10, replace=False))
        yield [cut[classes] for cut in cuts], [1.0] * len(cuts)


def curves(of: str, members: Sequence[Floats], learned: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The gain by twice as many scenes, predicted from each count and measured on other scenes."""
    random = np.random.default_rng(0)
    for classes in CURVES:
        for count in learned:
            for _ in range(2):
                chosen = np.sort(random.choice(len(members[0]), classes, replace=False))
                order = random.permutation(members[0].shape[1])
                drawn = [member[chosen][:, order] for member in members]
                yield {"of": of, "classes": classes, "learned": count} | _curve(drawn, count)


def _curve(members: Sequence[Floats], count: int) -> dict[str, float]:
    """Predicted from the first `count` scenes of each class; measured with twice as many."""
    classes = len(members[0])
    right = np.repeat(np.arange(classes), members[0].shape[1] - 2 * count)

    def learn(many: int) -> tuple[list[CurveMember], Index, NDArray[np.bool_]]:
        targets, fitted = np.repeat(np.arange(classes), many), []
        total = np.zeros((len(right), classes))
        for member in members:
            known = member[:, :many].reshape(classes * many, -1)
            left_out = leave_groups_out(known, targets, np.arange(len(targets)), classes)
            one = CurveMember(known, np.arange(len(targets)), left_out.penalty, left_out.sharpness)
            classifier = fit(known, targets, classes, penalty=one.penalty, sharpness=one.sharpness)
            asked = member[:, 2 * count :].reshape(len(right), -1)
            total += log_softmax(classifier.logits(np.asarray(asked, np.float64)))
            fitted.append(one)
        return fitted, targets, total.argmax(axis=1) == right

    fitted, targets, before = learn(count)
    _, _, after = learn(2 * count)
    curve = learning_curve(fitted, targets, np.arange(len(targets)), classes)
    assert curve is not None
    gained = after.astype(np.float64) - before
    return {
        "gain": 100 * curve.gain, "low": 100 * curve.low, "high": 100 * curve.high,
        "measured": 100 * float(gained.mean()),
        "error": 100 * float(gained.std() / np.sqrt(len(gained))),
    }  # fmt: skip


def figures() -> str:
    result = read_result(RESULT.stem)
    fusion = [
        {
            "of": row["of"], "count": row["fitted"], "members": row["members"],
            "best": f"{row['best']:.1f}",
        }
        | {way: f"{row['over'][way]:+.1f} ({row['low'][way]:+.1f})" for way in row["over"]}
        for row in result["fusion"]
        if row["members"] in (2, SHOWN_MEMBERS[row["of"]]) and row["fitted"] in SHOWN
    ]  # fmt: skip
    columns = (
        ("members", "{of}"), ("together", "{members}"), ("fitted to, of a class", "{count}"),
        ("best alone, %", "{best}"), ("best of those", "{chosen}"), ("equal", "{equal}"),
        ("**fitted**", "{fitted}"), ("with learned ones left out", "{with_learned}"),
    )  # fmt: skip
    lines = []
    for key in sorted({(row["of"], row["learned"]) for row in result["curves"]}):
        rows = [row for row in result["curves"] if (row["of"], row["learned"]) == key]
        lines.append(
            {
                "of": key[0], "learned": key[1], "count": len(rows),
                "gain": f"{np.mean([row['gain'] for row in rows]):.1f}",
                "measured": f"{np.mean([row['measured'] for row in rows]):.1f}",
                "off": f"{np.median([abs(row['gain'] - row['measured']) for row in rows]):.1f}",
                "inside": f"{sum(map(is_inside, rows))} of {len(rows)}",
            }
        )  # fmt: skip
    curve = (
        ("members", "{of}"), ("learned from, of a class", "{learned}"),
        ("points predicted", "{gain}"), ("measured", "{measured}"),
        ("median difference", "{off}"), ("inside the range", "{inside}"),
    )  # fmt: skip
    return f"{table(fusion, *columns)}\n\n{table(lines, *curve)}"


def is_inside(row: Mapping[str, float]) -> bool:
    """Tell whether a measured gain lies in the predicted range, which its own error widens."""
    middle, half = (row["high"] + row["low"]) / 2, (row["high"] - row["low"]) / 2
    return bool(abs(row["measured"] - middle) <= np.hypot(half, 1.645 * row["error"]))


PAGE = Page("benchmarks.scenes.few", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.few")
    for name in ("parts", "tiny", "weights", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    cameras, cuts = scenes(options), pictures(options)
    draws = {
        "cameras": (scene_draws(cameras, 0.0), SPLIT),
        "cameras, logits of unlike sizes": (scene_draws(cameras, UNLIKE), SPLIT),
        "cuts on one picture": (picture_draws(cuts), TINY_SPLIT),
    }
    fusion = [
        row
        for seed, (name, (draw, split)) in enumerate(draws.items())
        for row in rows_of(name, draw, split, seed)
    ]
    views = [cameras[camera, CURVE_DEPTH] for camera in CAMERAS]
    found = [
        *curves("one camera", views[:1], LEARNED),
        *curves("four cameras", views, LEARNED),
        *curves("one cut on one picture", cuts[2:], (5, 12, 25)),
    ]
    write_json(RESULT, {"fusion": fusion, "curves": found})
    PAGE.write()


if __name__ == "__main__":
    main()
