"""Defects found by one to four cameras, beside rivals with the same layers and pictures.

    python -m benchmarks.inspection.measure --scenes inspection/ --out inspection.json

reads what `benchmarks.inspection.render` has written. The bundle's own networks are the backbone.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.inspection.patchcore import Memory, patches
from mdp.formats.bundle import Bundle
from mdp.fusion.anomaly import fuse_surprises, surprises_of
from mdp.fusion.anomaly_table import MAXIMUM, MEAN, Anomaly
from mdp.requests.inspection import Inspector
from mdp.runtimes.base import INPUT
from mdp.runtimes.onnxruntime import import_onnxruntime
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import open_scenes
from partitioner.export import anomaly_head as heads
from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
from partitioner.export.sessions import open_member
from partitioner.fusion.anomaly_fit import fit_tails, tail_thresholds
from partitioner.fusion.novelty_fit import area_under_curve
from partitioner.run.progress import Progress

Values = NDArray[np.float64]
#: Of one set of scenes: scores `[N]` by member.
Scores = Mapping[int, Values]
RATE = 0.01
#: Share of a view's pixels from which on a defect is visible in it.
VISIBLE = 0.001
CHANGES = ("light", "background", "pose", "moved")
_BATCH = 16
#: Draws of good items that calibrate.
DRAWS = 40


def by_count(members: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Each number of cameras with all sets of so many."""
    for size in range(1, len(members) + 1):
        yield size, list(combinations(members, size))


def ranked(
    good: Scores, strange: Scores, power: int | None = None, table: Anomaly | None = None
) -> dict[str, Any]:
    """Area under the ROC curve and share found at `RATE` of the good ones, by number of cameras.

    Each is the mean over all sets of so many. Without `power`, which takes a `table`, scores are
    compared as they are, by their maximum, as of rivals that know no rates.
    """
    found = {}
    usual: Mapping[int, Values] = good
    other: Mapping[int, Values] = strange
    if power is not None:
        assert table
        usual, other = surprises_of(good, table.tails), surprises_of(strange, table.tails)
    for size, sets in by_count(sorted(good)):
        areas, shares = [], []
        for one in sets:
            fuse = MAXIMUM if power is None else power
            known = fuse_surprises([usual[k] for k in one], fuse)
            odd = fuse_surprises([other[k] for k in one], fuse)
            areas.append(area_under_curve(known, odd))
            shares.append(float((odd > limit_of(known)).mean()))
        found[str(size)] = {
            "auc": round(float(np.mean(areas)), 4),
            "found": round(float(np.mean(shares)), 4),
            "found_by_set": {
                "+".join(map(str, s)): round(v, 4) for s, v in zip(sets, shares, strict=True)
            },
        }
    return found


def limit_of(known: Values, rate: float = RATE) -> float:
    """The score that at most `rate` of good items are above."""
    order = np.sort(known)[::-1]
    return float(order[int(rate * len(order) + 1e-9)])


def served(table: Anomaly, scores: Scores) -> dict[str, float]:
    """The share of items called different at the stated rate, of each set of cameras."""
    surprises = surprises_of(scores, table.tails)
    shares = {}
    for one in table.subsets:
        fused = fuse_surprises([surprises[k] for k in one.members], table.power)
        share = float((fused > one.thresholds[table.place]).mean())
        shares["+".join(map(str, one.members))] = round(share, 4)
    return shares


def resampled(good: Scores, strange: Scores, draws: int = DRAWS) -> dict[str, Any]:
    """Good items called different and defects found, over draws of the good ones that calibrate.

    In each draw half of the good items calibrates, at the rate of one in so many and one more, and
    the other half is judged: by tails and thresholds as `inspect` fits them, and by the plain
    maximum of scores with the largest calibrating one as its threshold. By number of cameras, the
    mean over all sets of so many; one draw decides little between ways that are nearly alike.
    """
    random, count = np.random.default_rng(0), len(next(iter(good.values())))
    sums: dict[str, dict[str, list[Values]]] = {}
    for _ in range(draws):
        rows = random.permutation(count)
        parts = [{k: one[half] for k, one in good.items()} for half in np.array_split(rows, 2)]
        tails = fit_tails(parts[0])
        ways: dict[str, list[Scores]] = {
            "fitted": [surprises_of(one, tails) for one in (*parts, strange)],
            "plain": [*parts, strange],
        }
        for size, sets in by_count(sorted(good)):
            for name, scores in ways.items():
                shares = []
                for one in sets:
                    known, judged, odd = (
                        fuse_surprises([each[k] for k in one], MAXIMUM) for each in scores
                    )
                    limit = tail_thresholds(known, [1])[0] if name == "fitted" else known.max()
                    shares.append([(judged > limit).mean(), (odd > limit).mean()])
                sums.setdefault(str(size), {}).setdefault(name, []).append(np.mean(shares, axis=0))
    return {
        "stated": round(1 / (count // 2 + 1), 6),
        **{
            size: {
                name: dict(
                    zip(("rejected", "found"), np.mean(one, axis=0).round(4).tolist(), strict=True)
                )
                for name, one in ways_of.items()
            }
            for size, ways_of in sums.items()
        },
    }


def score_scenes(bundle: Bundle, folder: Path, cache: Path) -> Scores:
    """Scores of a folder's scenes by a bundle with anomaly heads, as its devices compute them."""
    assignments = bundle.manifest.plan.assignments
    pictures = open_scenes(str(folder), sorted({a.camera or "" for a in assignments}))
    views = load_views(pictures, [view_of(a) for a in assignments], cache, Progress(), folder.name)
    found = {}
    for part, pixels in zip(assignments, views, strict=True):
        runtime = open_member(bundle.model(part.k), part, len(bundle.manifest.labels))
        rows = [
            runtime.run(np.ascontiguousarray(pixels[start : start + _BATCH])).anomaly
            for start in range(0, len(pixels), _BATCH)
        ]
        found[part.k] = np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])
    return found


class _Rival:
    """PatchCore on the layers that a bundle's heads read."""

    def __init__(self, bundle: Bundle, folder: Path, cache: Path) -> None:
        self._bundle, self._cache = bundle, cache
        self._memories: dict[int, Memory] = {}
        self._memories = {k: Memory(one) for k, one in self._features(folder).items()}

    @property
    def size_bytes(self) -> float:
        """Bytes of a camera's memory, the mean."""
        return float(np.mean([one.size_bytes for one in self._memories.values()]))

    def scores(self, folder: Path) -> Scores:
        return {k: self._memories[k].scores(one) for k, one in self._features(folder).items()}

    def search_ms(self, folder: Path) -> float:
        """Milliseconds of processor time of one picture's search, beside the network's."""
        (k, features) = next(iter(self._features(folder).items()))
        began_s = time.process_time()
        self._memories[k].scores(features[:20])
        return (time.process_time() - began_s) / len(features[:20]) * 1e3

    def _features(self, folder: Path) -> dict[int, NDArray[np.float32]]:
        assignments = self._bundle.manifest.plan.assignments
        pictures = open_scenes(str(folder), sorted({a.camera or "" for a in assignments}))
        views = load_views(
            pictures, [view_of(a) for a in assignments], self._cache, Progress(), folder.name
        )
        return {
            part.k: self._of(self._bundle.model(part.k).content, pixels)
            for part, pixels in zip(assignments, views, strict=True)
        }

    def _of(self, model: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        plain = heads.without_head(model)
        layers = heads.choose_layers(plain, "model")
        session = import_onnxruntime().InferenceSession(
            heads.with_features(plain, layers), providers=["CPUExecutionProvider"]
        )
        found = []
        for start in range(0, len(pixels), _BATCH):
            some = np.ascontiguousarray(pixels[start : start + _BATCH])
            values = session.run(heads.feature_names(layers), {INPUT: some})
            grids = [
                layer.places(value).reshape(len(value), layer.side, layer.side, layer.channels)
                for layer, value in zip(layers, values, strict=True)
            ]
            found.append(patches(grids))
        return np.concatenate(found)


def seen_by(folder: Path) -> list[int]:
    """Of each defective scene, in the order of `open_scenes`, how many cameras see the defect."""
    files = sorted(folder.rglob("visible.json"), key=lambda file: file.parent.as_posix())
    return [
        sum(share >= VISIBLE for share in json.loads(file.read_text()).values()) for file in files
    ]


def product(bundle: Bundle, folder: Path, cache: Path) -> dict[str, Any]:
    """All figures of one product."""
    began_s = time.process_time()
    made = inspect_bundle(
        bundle,
        cache / "bundle",
        InspectRequest(good=str(folder / "good"), rate=RATE, all_good=True),
        cache,
        Progress(),
    )
    learning_s = time.process_time() - began_s
    table = made.fusion_weights().anomaly
    inspection = made.manifest.inspection
    assert table
    assert inspection
    good = score_scenes(made, folder / "test", cache)
    strange = score_scenes(made, folder / "defects", cache)
    rival = _Rival(made, folder / "good", cache)
    rival_good, rival_strange = rival.scores(folder / "test"), rival.scores(folder / "defects")
    count = np.array(seen_by(folder / "defects"))
    visible = count > 0
    kinds = np.array([file.parent.parent.name for file in _ordered(folder / "defects")])
    seen = {k: one[visible] for k, one in strange.items()}
    rival_seen = {k: one[visible] for k, one in rival_strange.items()}
    everyone = tuple(sorted(good))
    surprises = surprises_of(strange, table.tails)
    fused = fuse_surprises([surprises[k] for k in everyone], table.power)
    changed = {one: score_scenes(made, folder / one, cache) for one in CHANGES}
    above = fused > table.subsets[-1].thresholds[table.place]
    return {
        "good": inspection.good,
        "test": len(good[0]),
        "defects": int(visible.sum()),
        "invisible": int((~visible).sum()),
        "learning_s": round(learning_s, 1),
        "added_bytes": inspection.members[0].added_bytes,
        "time_ratio": [one.time_ratio for one in inspection.members],
        "rate": table.default,
        "power": table.power,
        "fused": {
            name: ranked(good, seen, power, table)
            for name, power in (("chosen", table.power), ("mean", MEAN), ("maximum", MAXIMUM))
        },
        "padim_maximum": ranked(good, seen),
        "patchcore_maximum": ranked(rival_good, rival_seen),
        "patchcore_bytes": rival.size_bytes,
        "patchcore_search_ms": round(rival.search_ms(folder / "test"), 3),
        "alone": {str(k): round(area_under_curve(good[k], seen[k]), 4) for k in everyone},
        "rejected": served(table, good),
        "found": served(table, seen),
        "by_kind": {
            kind: [
                int(above[(kinds == kind) & visible].sum()),
                int(((kinds == kind) & visible).sum()),
            ]
            for kind in sorted(set(kinds.tolist()))
        },
        "by_seen": {
            str(n): [int(above[count == n].sum()), int((count == n).sum())] for n in range(5)
        },
        "auc_by_seen": areas_by_seen(
            surprises_of(good, table.tails), surprises, count, table.power
        ),
        "changed": {name: served(table, scores) for name, scores in changed.items()},
        "moved_after": looks_to_moved(table, good, changed["moved"]),
        "blind_sides": blind(table, seen),
        "resampled": resampled(good, seen),
    }


def areas_by_seen(
    good: Scores, strange: Scores, seen: NDArray[np.int64], power: int
) -> dict[str, dict[str, float]]:
    """Area under the ROC curve of one camera, the mean, and of all, by how many see the defect."""
    members, found = sorted(good), {}
    known = fuse_surprises([good[k] for k in members], power)
    odd = fuse_surprises([strange[k] for k in members], power)
    for number in sorted({*seen.tolist()} - {0}):
        mine = seen == number
        alone = [area_under_curve(good[k], strange[k][mine]) for k in members]
        found[str(number)] = {
            "alone": round(float(np.mean(alone)), 4),
            "all": round(area_under_curve(known, odd[mine]), 4),
        }
    return found


def looks_to_moved(table: Anomaly, good: Scores, moved: Scores) -> dict[str, Any]:
    """Looks until the first camera, which was moved, is named, and cameras named before that."""
    inspector = Inspector(table)
    devices = {k: str(k) for k in good}
    for scores in rows_of(good):
        inspector.saw(inspector.surprises(scores), devices)
    before = sorted(inspector.cameras_moved)
    for number, scores in enumerate(rows_of(moved), start=1):
        inspector.saw(inspector.surprises(scores), devices)
        if inspector.cameras_moved:
            return {"before": before, "looks": number, "named": sorted(inspector.cameras_moved)}
    return {"before": before, "looks": None, "named": []}


def rows_of(scores: Scores) -> Iterator[dict[int, float]]:
    """The scores of one scene after another."""
    for row in range(len(scores[0])):
        yield {k: float(one[row]) for k, one in scores.items()}


def blind(table: Anomaly, strange: Scores) -> dict[str, Any]:
    """The stated share that passes without one camera, by every second defect, and the true one."""
    everyone = tuple(sorted(strange))
    halves = [{k: one[start::2] for k, one in strange.items()} for start in (0, 1)]
    stated, true = (served(table, half) for half in halves)
    found = {}
    for gone in everyone:
        left = "+".join(str(k) for k in everyone if k != gone)
        found[str(gone)] = {"stated": round(1 - stated[left], 4), "true": round(1 - true[left], 4)}
    return found


def _ordered(folder: Path) -> list[Path]:
    return sorted(folder.rglob("visible.json"), key=lambda file: file.parent.as_posix())


def main(words: list[str]) -> int:
    """Measure every product, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspection.measure")
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=Path("examples/bundles/parts"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    bundle = Bundle.open(options.bundle)
    machine = describe_machine()
    found = {}
    for folder in sorted(one for one in options.scenes.iterdir() if one.is_dir()):
        with TemporaryDirectory(prefix="mdp-inspection-") as cache:
            found[folder.name] = product(bundle, folder, Path(cache))
        print(folder.name, json.dumps(found[folder.name]["fused"]["chosen"]), flush=True)
        written = {"machine": machine, "bundle": bundle.digest, "products": found}
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
