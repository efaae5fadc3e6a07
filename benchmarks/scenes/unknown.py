"""Items that are none of the classes, found by one to four cameras: near twins and other things.

    python -m benchmarks.scenes.unknown --parts parts/ --tiny tinyimagenet40/val \
        --weights LITE0 --scratch FOLDER

PARTS has scenes of four cameras, `<class>/<scene>/<camera>.jpg` of 128 px, classes in pairs of near
twins, TINY a folder for each class of other things, LITE0 is a .safetensors of
tf_efficientnet_lite0. It stays as it is; one linear classifier of its features is fitted for all
cameras. Draws take one class of each pair and leave the twins unknown, or both classes of ten pairs
and leave the other five pairs unknown. Writes benchmarks/results/scenes-unknown.json.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.scenes.few import views_of
from mdp.files import write_json
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, weights_for
from mdp.fusion.novelty import NoveltyScore
from mdp.fusion.novelty_table import Novelty, Signal, SubsetNovelty
from partitioner.fusion.novelty_fit import area_under_curve, fit_novelty, thresholds
from partitioner.fusion.stacking import fit_fusion
from partitioner.networks.feature_distance import DistanceClassifier, StageOutput
from partitioner.pilot.features import network_features
from partitioner.pilot.linear import fit, leave_groups_out

RESULT = RESULTS / "scenes-unknown.json"
NETWORK, SIDE = "tf_efficientnet_lite0", 128
#: Width of the feature that its classifier reads: its own, and the means of three stages.
READ = 1280 + 40 + 112 + 320
CAMERAS = ("top", "left", "right", "back")
#: Scenes of a class to learn from, to calibrate, to test.
LEARNED, CALIBRATED, TESTED = slice(0, 40), slice(40, 50), slice(50, 75)
#: Training pictures of a camera that its distance is measured from.
TAUGHT = 500
#: Pictures of a class of --tiny: four of them stand for what four cameras see.
OTHERS = 48
DRAWS, PAIRS, BOTH = 3, 15, 10
#: Scores, by the signals that they are the sum of, each over its spread on known items.
SCORES: Mapping[str, tuple[Signal, ...]] = {
    "energy": ("energy",),
    "doubt": ("doubt",),
    "disagreement": ("disagreement",),
    "distance": ("distance",),
    "without distance": ("energy", "doubt", "disagreement"),
    "with distance": ("energy", "doubt", "distance"),
}
#: What is fitted by pictures of no class, half of each kind; the other half is measured.
FITTED = "fitted to unknown/"

Floats = NDArray[np.floating[Any]]
Logits = dict[int, Contribution]


def features(files: Sequence[Sequence[Path]], name: str, options: argparse.Namespace) -> Floats:
    """Features `[C, S, D + E]` of files by class; kept.

    What the classifier reads, and what the distance is measured of, side by side.
    """
    path: Path = options.scratch / f"features-{name}.npy"
    if not path.exists():
        pixels = views_of(files, SIDE, f"unknown-{name}", options.scratch / "cache")
        found = network_features(NETWORK, SIDE, options.weights, pixels, lambda *_: None)
        np.save(path, np.hstack(found).reshape(len(files), len(files[0]), -1))
    stored: Floats = np.load(path)
    return stored


@dataclass(frozen=True, slots=True)
class ClassDraw:
    """Logits of one draw by four cameras."""

    calibration: Logits
    targets: NDArray[np.int64]
    known: Logits
    known_targets: NDArray[np.int64]
    #: By kind.
    unknown: Mapping[str, Logits]


def draw(seed: int, both: bool, parts: Floats, tiny: Floats) -> ClassDraw:
    """Classes drawn by `seed`.

    Features of `parts` are `[K, C, S, D + E]`, those of others `[K, N, D + E]`.
    """
    random = np.random.default_rng([seed, both])
    pairs = random.permutation(PAIRS)
    if both:
        taught = sorted(c for pair in pairs[:BOTH] for c in (2 * pair, 2 * pair + 1))
    else:
        taught = [2 * pair + int(random.integers(2)) for pair in range(PAIRS)]
    left_out = [c for c in range(2 * PAIRS) if c not in taught]
    count = len(taught)

    def part(classes: list[int], scenes: slice) -> Floats:
        return parts[:, classes, scenes].reshape(len(CAMERAS), -1, parts.shape[-1])

    learned = part(taught, LEARNED)
    flat = learned.reshape(-1, learned.shape[-1])[:, :READ]
    targets = np.tile(np.repeat(np.arange(count), 40), len(CAMERAS))
    groups = np.tile(np.arange(40 * count), len(CAMERAS))
    found = leave_groups_out(flat, targets, groups, count)
    fitted = fit(flat, targets, count, penalty=found.penalty, sharpness=found.sharpness)
    layer = nn.Linear(flat.shape[1], count)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(fitted.weight))
        layer.bias.copy_(torch.from_numpy(fitted.bias))
    rows = np.linspace(0, learned.shape[1] - 1, TAUGHT).astype(int)
    outputs = [StageOutput() for _ in learned]
    told = [
        DistanceClassifier(layer, torch.from_numpy(one[rows, READ:]), output).eval()
        for one, output in zip(learned, outputs, strict=True)
    ]

    def logits_of(k: int, seen: Tensor) -> Tensor:
        outputs[k].mean = seen[:, READ:]
        found: Tensor = told[k](seen[:, :READ])
        return found

    def logits(seen: Floats) -> Logits:
        with torch.no_grad():
            return {
                k: Contribution(None, logits_of(k, torch.from_numpy(one).float()).numpy())
                for k, one in enumerate(seen)
            }

    kind = "other parts" if both else "near twins"
    return ClassDraw(
        calibration=logits(part(taught, CALIBRATED)),
        targets=np.repeat(np.arange(count), 10),
        known=logits(part(taught, TESTED)),
        known_targets=np.repeat(np.arange(count), 25),
        unknown={kind: logits(part(left_out, slice(None))), "other things": logits(tiny)},
    )


def half(parts: Logits, which: int) -> Logits:
    """Every other item."""
    return {k: Contribution(None, part.bag[which::2]) for k, part in parts.items()}


def sum_signals(one: ClassDraw, fusion: FusionWeights, signals: Sequence[Signal]) -> Novelty:
    """Thresholds of the sum of `signals`, for every subset."""
    novelty = fit_novelty(one.calibration, fusion)
    subsets = []
    places = [round(rate * (len(one.targets) + 1)) for rate in novelty.rates]
    for subset in novelty.subsets:
        scored = NoveltyScore(subset.members, fusion)
        spreads = {s: float(scored.of(one.calibration, {s: 1.0}).std()) for s in signals}
        weights: dict[Signal, float] = {s: 1 / v for s, v in spreads.items() if v > 1e-4}
        if weights:
            values = thresholds(scored.of(one.calibration, weights), places)
            subsets.append(
                SubsetNovelty(
                    size=subset.size, weights=weights, thresholds=tuple(values),
                    members=subset.members,
                )
            )  # fmt: skip
    return replace(novelty, subsets=subsets)


def rows_of(setting: str, one: ClassDraw) -> Iterator[dict[str, Any]]:
    """For each score, kind of unknown items and subset of cameras what is found."""
    fusion = fit_fusion(one.calibration, one.targets)
    tables = {name: sum_signals(one, fusion, signals) for name, signals in SCORES.items()}
    fitted_to = {
        k: Contribution(
            None, np.concatenate([half(parts, 0)[k].bag for parts in one.unknown.values()])
        )
        for k in range(len(CAMERAS))
    }
    tables[FITTED] = fit_novelty(one.calibration, fusion, unknown=fitted_to, distance=True)
    for size in range(1, len(CAMERAS) + 1):
        for members in combinations(range(len(CAMERAS)), size):
            weights = weights_for(members, "stacked", fusion)
            right = fuse(one.known, weights).argmax(axis=1) == one.known_targets
            for name, novelty in tables.items():
                subset = novelty.of(members)
                if subset is None:
                    continue
                scored = NoveltyScore(members, fusion)
                known = scored.of(one.known, subset.weights)
                threshold = subset.thresholds[novelty.place(None)]
                for kind, parts in one.unknown.items():
                    strange = scored.of(half(parts, 1), subset.weights)
                    yield {
                        "setting": setting, "score": name, "unknown": kind, "cameras": size,
                        "auc": area_under_curve(known, strange),
                        "known_rejected": float((known > threshold).mean()),
                        "rejected": float((strange > threshold).mean()),
                        "accuracy": float(right.mean()),
                    }  # fmt: skip


def measure_means(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Means over draws and subsets of one size."""
    folders = sorted(path for path in options.parts.iterdir() if path.is_dir())
    parts = np.stack([
        features(
            [[scene / f"{camera}.jpg" for scene in sorted(one.iterdir())] for one in folders],
            camera, options,
        )
        for camera in CAMERAS
    ])  # fmt: skip
    others = [
        sorted(path.iterdir())[:OTHERS] for path in sorted(options.tiny.iterdir()) if path.is_dir()
    ]
    seen = features(others, "tiny", options)
    fours = seen.reshape(len(others), -1, len(CAMERAS), seen.shape[-1]).transpose(2, 0, 1, 3)
    tiny = fours.reshape(len(CAMERAS), -1, seen.shape[-1])
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for both, setting in ((False, "one of each pair"), (True, "ten pairs")):
        for seed in range(DRAWS):
            for row in rows_of(setting, draw(seed, both, parts, tiny)):
                key = tuple(str(row[name]) for name in ("setting", "score", "unknown", "cameras"))
                found.setdefault(key, []).append(row)
    numbers = ("auc", "known_rejected", "rejected", "accuracy")
    return [
        {**rows[0], **{name: float(np.mean([row[name] for row in rows])) for name in numbers}}
        for rows in found.values()
    ]


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]
    counts = range(1, len(CAMERAS) + 1)

    def lines(kind: str, *names: str) -> list[dict[str, Any]]:
        found = []
        for name in dict.fromkeys(row["score"] for row in rows):
            # Of things that both settings have, those of the second one.
            some = {r["cameras"]: r for r in rows if (r["score"], r["unknown"]) == (name, kind)}
            line: dict[str, Any] = {"score": f"**{name}**" if name == "with distance" else name}
            for count in counts:
                one = some.get(count)
                for key in names:
                    line[f"{key}{count}"] = "-" if one is None else (
                        f"{one[key]:.3f}" if key == "auc" else f"{100 * one[key]:.1f}"
                    )  # fmt: skip
            found.append(line)
        return found

    def columns(key: str) -> list[tuple[str, str]]:
        return [(f"{n} camera{'s' * (n > 1)}", f"{{{key}{n}}}") for n in counts]

    blocks = []
    for kind in ("near twins", "other parts", "other things"):
        blocks.append(f"Area under the ROC curve, {kind}:")
        blocks.append(table(lines(kind, "auc"), ("score", "{score}"), *columns("auc")))
    for kind in ("other parts", "other things"):
        blocks.append(f"Per cent of {kind} rejected with thresholds for 2 % of known items:")
        blocks.append(table(lines(kind, "rejected"), ("score", "{score}"), *columns("rejected")))
    blocks.append("Per cent of known test items rejected by the same thresholds:")
    blocks.append(
        table(lines("other things", "known_rejected"), ("score", "{score}"),
              *columns("known_rejected"))
    )  # fmt: skip
    return "\n\n".join(blocks)


PAGE = Page("benchmarks.scenes.unknown", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.unknown")
    for name in ("parts", "tiny", "weights", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    write_json(RESULT, {"network": NETWORK, "image_size": SIDE, "rows": measure_means(options)})
    PAGE.write()


if __name__ == "__main__":
    main()
