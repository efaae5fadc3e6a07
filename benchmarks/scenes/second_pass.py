"""A second pass over kept items: those put right unsure first, against as many drawn at random.

    python -m benchmarks.scenes.second_pass --parts parts/ --weights LITE0 --scratch FOLDER

PARTS has scenes of four cameras, `<class>/<scene>/<camera>.jpg` of 128 px in classes of near twins,
LITE0 is a .safetensors of tf_efficientnet_lite0. It stays as it is; one linear classifier of its
features is fitted for all cameras, and fusion and thresholds of unknown items to a class's
calibration scenes. Of each class few scenes are taught; the classifier answers the items of a line,
of which fifty are put right: the first ones in the order of the page (`mdp.line.kept`), or others.
Then everything is fitted again with them, and answers the test scenes. Writes
benchmarks/results/line-second-pass.json.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import nn

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.scenes.unknown import CAMERAS, READ, Floats, features
from mdp.files import write_json
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, weights_for
from mdp.fusion.novelty import NoveltyScore
from mdp.fusion.novelty_table import Novelty
from mdp.line.rules import SURE_FROM
from partitioner.fusion.novelty_fit import fit_novelty
from partitioner.fusion.stacking import fit_fusion
from partitioner.networks.feature_distance import DistanceClassifier, StageOutput
from partitioner.pilot.linear import fit, leave_groups_out, log_softmax

RESULT = RESULTS / "line-second-pass.json"
#: Scenes of a class that are taught at first, and that come by on the line.
TAUGHT, LINE = (5, 10), 20
CALIBRATED, TESTED = 10, 25
#: Items that are put right.
MENDED = 50
DRAWS = 10
MEMBERS = tuple(range(len(CAMERAS)))

Index = NDArray[np.int64]
Logits = Mapping[int, Contribution]


class TaughtLine:
    """Classifier, fusion and thresholds that were fitted to taught scenes."""

    def __init__(
        self, taught: Floats, targets: Index, calibration: Floats, calibrated: Index
    ) -> None:
        """Features `[K, S, D + E]` of four cameras and classes `[S]`."""
        count = int(calibrated.max()) + 1
        flat = taught.reshape(-1, taught.shape[-1])[:, :READ]
        every, groups = (
            np.tile(targets, len(CAMERAS)),
            np.tile(np.arange(len(targets)), len(CAMERAS)),
        )
        found = leave_groups_out(flat, every, groups, count)
        fitted = fit(flat, every, count, penalty=found.penalty, sharpness=found.sharpness)
        layer = nn.Linear(READ, count)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(fitted.weight))
            layer.bias.copy_(torch.from_numpy(fitted.bias))
        self._outputs = [StageOutput() for _ in CAMERAS]
        self._layers = [
            DistanceClassifier(layer, torch.from_numpy(one[:, READ:]).float(), output).eval()
            for one, output in zip(taught, self._outputs, strict=True)
        ]
        logits = self.logits(calibration)
        self.fusion: FusionWeights = fit_fusion(dict(logits), calibrated)
        self.novelty: Novelty = fit_novelty(dict(logits), self.fusion, distance=True)

    def logits(self, seen: Floats) -> Logits:
        """Logits of each camera for features `[K, S, D + E]`."""
        found = {}
        with torch.no_grad():
            for k, one in enumerate(torch.from_numpy(seen).float()):
                self._outputs[k].mean = one[:, READ:]
                found[k] = Contribution(None, self._layers[k](one[:, :READ]).numpy())
        return found

    def answers(self, seen: Floats) -> Floats:
        """Fused probabilities `[S, C]` by all cameras."""
        return np.exp(
            log_softmax(
                fuse(dict(self.logits(seen)), weights_for(MEMBERS, "stacked", self.fusion)).astype(
                    np.float64
                )
            )
        )

    def strangeness(self, seen: Floats) -> tuple[Floats, float]:
        """Scores `[S]` of all cameras, and the threshold above which an item is unknown."""
        subset = self.novelty.of(MEMBERS)
        assert subset is not None
        scores = NoveltyScore(MEMBERS, self.fusion).of(dict(self.logits(seen)), subset.weights)
        return scores, subset.thresholds[self.novelty.place(None)]


def orders(line: TaughtLine, seen: Floats, random: np.random.Generator) -> dict[str, Index]:
    """Ways to look through the items `seen`: their places, first ones first.

    `page` is the order of `mdp.line.kept`: unknown items, the strangest first, then the least
    probable answers. `kept at random` draws of what is kept: unknown, or less probable than
    `SURE_FROM`.
    """
    probability = line.answers(seen).max(axis=1)
    scores, threshold = line.strangeness(seen)
    unknown = scores > threshold
    kept = np.flatnonzero(unknown | (probability < SURE_FROM))
    others = np.setdiff1d(np.arange(len(probability)), kept)
    return {
        "page": np.lexsort((probability, np.where(unknown, -scores, 0.0), ~unknown)),
        "least probable": np.argsort(probability, kind="stable"),
        "kept at random": np.concatenate([random.permutation(kept), random.permutation(others)]),
        "at random": random.permutation(len(probability)),
    }


def rows_of(parts: Floats, each: int, seed: int) -> list[dict[str, Any]]:
    """Points gained by each order in one draw of features `[K, C, S, D + E]` by class and scene."""
    random = np.random.default_rng([seed, each])
    classes, scenes = parts.shape[1:3]
    places = np.stack([random.permutation(scenes) for _ in range(classes)])

    def take(begin: int, count: int) -> tuple[Floats, Index]:
        some = places[:, begin : begin + count]
        found = parts[:, np.arange(classes)[:, None], some]
        return found.reshape(len(CAMERAS), -1, parts.shape[-1]), np.repeat(
            np.arange(classes), count
        )

    calibration, calibrated = take(0, CALIBRATED)
    tested, right = take(CALIBRATED, TESTED)
    seen, truth = take(CALIBRATED + TESTED, LINE)
    taught, targets = take(CALIBRATED + TESTED + LINE, each)

    def accuracy(more: Index) -> tuple[float, TaughtLine]:
        line = TaughtLine(
            np.concatenate([taught, seen[:, more]], axis=1),
            np.concatenate([targets, truth[more]]),
            calibration,
            calibrated,
        )
        return float((line.answers(tested).argmax(axis=1) == right).mean()), line

    before, line = accuracy(np.zeros(0, dtype=np.int64))
    wrong = line.answers(seen).argmax(axis=1) != truth
    rows = []
    for way, order in orders(line, seen, random).items():
        chosen = order[:MENDED]
        rows.append({
            "each": each, "seed": seed, "way": way, "before": before,
            "wrong": int(wrong[chosen].sum()), "after": accuracy(chosen)[0],
        })  # fmt: skip
    return rows


def main() -> None:
    asked = arguments(__doc__, parts=Path, weights=Path, scratch=Path)
    machine = describe_machine()
    asked.scratch.mkdir(parents=True, exist_ok=True)
    parts = read_parts(asked)
    # Several threads wait on each other in such small products.
    with threadpool_limits(1, user_api="blas"):
        rows = [
            row for each in TAUGHT for seed in range(DRAWS) for row in rows_of(parts, each, seed)
        ]
    write_json(
        RESULT,
        {
            "machine": machine,
            "classes": parts.shape[1],
            "line": LINE * parts.shape[1],
            "mended": MENDED,
            "rows": rows,
        },
    )


def read_parts(asked: argparse.Namespace) -> Floats:
    """Features `[K, C, S, D + E]` of all scenes, kept in --scratch."""
    folders = sorted(path for path in asked.parts.iterdir() if path.is_dir())
    return np.stack([
        features(
            [[scene / f"{camera}.jpg" for scene in sorted(one.iterdir())] for one in folders],
            camera,
            asked,
        )
        for camera in CAMERAS
    ])  # fmt: skip


if __name__ == "__main__":
    main()
