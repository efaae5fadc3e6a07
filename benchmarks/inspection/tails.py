"""Tails and thresholds of anomaly scores, over draws of the good scenes that calibrate.

    python -m benchmarks.inspection.tails --scenes inspection/ --scores scores/ --out tails.json

reads what `benchmarks.inspection.render` has written. Scores are kept as `scores/PRODUCT.npz`, and
not made anew where they are there: good ones by folds, and those of further good and of defective
scenes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.inspection.measure import Scores, score_scenes, seen_by
from mdp.formats.bundle import Bundle
from mdp.fusion.anomaly import fuse_surprises, surprises_of
from mdp.fusion.anomaly_table import MAXIMUM
from mdp.runtimes.base import INPUT
from mdp.runtimes.onnxruntime import import_onnxruntime
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import open_scenes
from partitioner.export import anomaly_head as heads
from partitioner.export.inspect_bundle import FOLDS, InspectRequest, inspect_bundle
from partitioner.fusion.anomaly_fit import fit_tails, tail_thresholds
from partitioner.fusion.novelty_fit import area_under_curve
from partitioner.run.progress import Progress

Values = NDArray[np.float64]
#: Makes the scores of members comparable, by good ones.
Comparing = Callable[[Scores], Callable[[Scores], Mapping[int, Values]]]
#: Good scenes that calibrate, and draws of them.
COUNTS, DRAWS = (120, 40), 30
#: Factors of the members' scores: as they are, and as of networks with other units.
UNITS = {"alike": (1.0, 1.0, 1.0, 1.0), "other units": (1.0, 2.0, 3.0, 0.5)}
_BATCH = 16


def own_tails(good: Scores) -> Callable[[Scores], Mapping[int, Values]]:
    """A tail of each member alone."""
    tails = [fit_tails({0: good[k]})[0] for k in sorted(good)]
    return lambda scores: surprises_of(scores, tails)


def shared_tail(good: Scores) -> Callable[[Scores], Mapping[int, Values]]:
    """The tail that all members share."""
    tails = fit_tails(good)
    return lambda scores: surprises_of(scores, tails)


def no_tail(good: Scores) -> Callable[[Scores], Mapping[int, Values]]:
    """Scores as they are."""
    return lambda scores: scores


TAILS: Mapping[str, Comparing] = {"own": own_tails, "shared": shared_tail, "none": no_tail}


def compare(good: Scores, strange: Scores, count: int, draws: int = DRAWS) -> dict[str, Any]:
    """Area under the curve, good items rejected and defects found by all members, by tail.

    In each draw `count` good items calibrate, at the rate of one in so many and one more, and the
    others are judged; thresholds are the `largest` good one, or `by_tail`. `possible` is what is
    found where one in a hundred of the others is above.
    """
    random, whole = np.random.default_rng(0), len(next(iter(good.values())))
    rows: dict[str, list[list[float]]] = {name: [] for name in TAILS}
    for _ in range(draws):
        order = random.permutation(whole)
        parts = [{k: one[r] for k, one in good.items()} for r in np.split(order, [count])]
        for name, fit in TAILS.items():
            compared = fit(parts[0])
            known, judged, odd = (
                fuse_surprises([each[k] for k in sorted(good)], MAXIMUM)
                for each in map(compared, (*parts, strange))
            )
            possible = np.sort(judged)[::-1][len(judged) // 100]
            row = [area_under_curve(judged, odd), float((odd > possible).mean())]
            for limit in (known.max(), tail_thresholds(known, [1])[0]):
                row += [float((judged > limit).mean()), float((odd > limit).mean())]
            rows[name].append(row)
    keys = ("auc", "possible", "largest_rejected", "largest_found", "tail_rejected", "tail_found")
    return {
        "stated": round(1 / (count + 1), 6),
        **{
            name: dict(zip(keys, np.mean(found, axis=0).round(4).tolist(), strict=True))
            for name, found in rows.items()
        },
    }


def scores_of(bundle: Bundle, folder: Path) -> dict[str, Values]:
    """Scores of one product's scenes: `good`, `test` and visible `defects`, each `[members, N]`."""
    with TemporaryDirectory(prefix="mdp-inspection-") as name:
        cache = Path(name)
        request = InspectRequest(good=str(folder / "good"), all_good=True)
        made = inspect_bundle(bundle, cache / "bundle", request, cache, Progress())
        found = {
            "good": _good_by_folds(made, folder / "good", cache),
            "test": score_scenes(made, folder / "test", cache),
            "defects": score_scenes(made, folder / "defects", cache),
        }
    stacked = {key: np.stack([one[k] for k in sorted(one)]) for key, one in found.items()}
    visible = np.array(seen_by(folder / "defects")) > 0
    return {**stacked, "defects": stacked["defects"][:, visible]}


def _good_by_folds(bundle: Bundle, folder: Path, cache: Path) -> Scores:
    assignments = bundle.manifest.plan.assignments
    pictures = open_scenes(str(folder), sorted({a.camera or "" for a in assignments}))
    views = load_views(pictures, [view_of(a) for a in assignments], cache, Progress(), folder.name)
    found = {}
    for part, pixels in zip(assignments, views, strict=True):
        plain = heads.without_head(bundle.model(part.k).content)
        layers = heads.choose_layers(plain, "model")
        session = import_onnxruntime().InferenceSession(
            heads.with_features(plain, layers), providers=["CPUExecutionProvider"]
        )
        batches = [*_features(session, layers, pixels)]
        fits = heads.fit_folds(batches, layers, FOLDS)
        maps = heads.maps_by_folds(batches, layers, fits)
        found[part.k] = heads.scores_of(maps).astype(np.float64)
    return found


def _features(
    session: Any, layers: Sequence[heads.Layer], pixels: NDArray[np.uint8]
) -> Iterator[list[heads.Floats]]:
    for start in range(0, len(pixels), _BATCH):
        some = np.ascontiguousarray(pixels[start : start + _BATCH])
        values = session.run(heads.feature_names(layers), {INPUT: some})
        yield [layer.places(value) for layer, value in zip(layers, values, strict=True)]


def main(words: list[str]) -> int:
    """Score products that are not scored yet, compare all, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspection.tails")
    parser.add_argument("--scenes", type=Path, help="leave out where all scores are there")
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=Path("examples/bundles/parts"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    bundle = Bundle.open(options.bundle)
    options.scores.mkdir(parents=True, exist_ok=True)
    for folder in sorted(options.scenes.iterdir()) if options.scenes else ():
        kept = options.scores / f"{folder.name}.npz"
        if not kept.exists():
            np.savez(kept, **scores_of(bundle, folder))  # type: ignore[arg-type]
    products = {}
    for path in sorted(options.scores.glob("*.npz")):
        scores = np.load(path)
        good = np.concatenate([scores["good"], scores["test"]], axis=1)
        products[path.stem] = {
            name: {
                str(count): compare(_times(good, units), _times(scores["defects"], units), count)
                for count in COUNTS
            }
            for name, units in UNITS.items()
        }
    written = {"machine": describe_machine(), "bundle": bundle.digest, "products": products}
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _times(scores: Values, units: Sequence[float]) -> Scores:
    return {k: unit * one for k, (one, unit) in enumerate(zip(scores, units, strict=True))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
