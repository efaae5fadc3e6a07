"""Blind sides: how near the stated share of missed defects is, by how many measured it.

    python -m benchmarks.inspection.blind --scenes inspection/ \
        --out benchmarks/results/inspection-blind.json

reads what `benchmarks.inspection.render` has written, best with many defects of each kind. One
camera is missing; of the defects that at least one of all cameras sees, some are drawn to measure
which share the others miss, and the rest are the truth.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.inspection.measure import RATE, Scores, score_scenes, seen_by
from mdp.formats.bundle import Bundle
from mdp.fusion.anomaly import fuse_surprises, share_range, surprises_of
from mdp.fusion.anomaly_table import Anomaly
from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
from partitioner.run.progress import Progress

#: Defects that measure, and draws of them.
COUNTS, DRAWS = (15, 30, 60, 120, 180), 400
#: A stated share is right where the true one is at most so far away.
NEAR = 0.05

Flags = NDArray[np.bool_]


def missed_without(table: Anomaly, strange: Scores) -> dict[int, Flags]:
    """Of each camera, the defects `[N]` that the others miss at the stated rate."""
    surprises = surprises_of(strange, table.tails)
    found = {}
    for gone in sorted(strange):
        left = tuple(k for k in sorted(strange) if k != gone)
        fitted = table.of(left)
        assert fitted
        fused = fuse_surprises([surprises[k] for k in left], table.power)
        found[gone] = fused <= fitted.thresholds[table.place]
    return found


def over_draws(missed: Sequence[Flags], count: int, draws: int = DRAWS) -> dict[str, float]:
    """Statements by `count` defects about the rest, over draws and blind sides.

    `missed` has for each side which defects `[N]` pass. `near` is the share of sides that are
    stated within `NEAR`, `apart` the mean distance, `held` the share of ranges that hold the truth,
    `width` their mean width.
    """
    random = np.random.default_rng(0)
    rows = []
    for one in missed:
        for _ in range(draws):
            order = random.permutation(len(one))
            stated, true = (float(one[part].mean()) for part in np.split(order, [count]))
            low, high = share_range(stated, count)
            apart = abs(stated - true)
            rows.append((apart <= NEAR, apart, low <= true <= high, high - low))
    means = np.mean(rows, axis=0).round(4).tolist()
    return dict(zip(("near", "apart", "held", "width"), means, strict=True))


def by_kind(missed: Sequence[Flags], kinds: NDArray[np.str_]) -> dict[str, Any]:
    """Of each kind of defect, what all the other kinds state of it, over blind sides."""
    found = {}
    for kind in sorted(set(kinds.tolist())):
        own = kinds == kind
        rows = []
        for one in missed:
            stated, true = float(one[~own].mean()), float(one[own].mean())
            low, high = share_range(stated, int((~own).sum()))
            rows.append((stated, true, low <= true <= high))
        stated, true, held = np.mean(rows, axis=0).round(4).tolist()
        found[kind] = {"defects": int(own.sum()), "stated": stated, "true": true, "held": held}
    return found


def product(bundle: Bundle, folder: Path, cache: Path) -> dict[str, Any]:
    """All figures of one product."""
    request = InspectRequest(good=str(folder / "good"), rate=RATE, all_good=True)
    made = inspect_bundle(bundle, cache / "bundle", request, cache, Progress())
    table = made.fusion_weights().anomaly
    assert table
    scores = score_scenes(made, folder / "defects", cache)
    visible = np.array(seen_by(folder / "defects")) > 0
    files = sorted((folder / "defects").rglob("visible.json"), key=lambda f: f.parent.as_posix())
    kinds = np.array([file.parent.parent.name for file in files])[visible]
    sides = missed_without(table, {k: one[visible] for k, one in scores.items()})
    return summarise_sides(sides, kinds)


def summarise_sides(sides: Mapping[int, Flags], kinds: NDArray[np.str_]) -> dict[str, Any]:
    """Facts about the defects `[N]` that are missed without each camera, by their kinds."""
    missed = list(sides.values())
    return {
        "defects": len(kinds),
        "missed": {str(k): round(float(one.mean()), 4) for k, one in sides.items()},
        # As many again have to be left to be the truth.
        "counts": {
            str(count): over_draws(missed, count) for count in COUNTS if 2 * count <= len(kinds)
        },
        "kinds": by_kind(missed, kinds),
    }


def main(words: list[str]) -> int:
    """Measure every product, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspection.blind")
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=Path("examples/bundles/parts"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    bundle, machine, found = Bundle.open(options.bundle), describe_machine(), {}
    for folder in sorted(one for one in options.scenes.iterdir() if one.is_dir()):
        with TemporaryDirectory(prefix="mdp-inspection-") as cache:
            found[folder.name] = product(bundle, folder, Path(cache))
        print(folder.name, json.dumps(found[folder.name]["counts"]), flush=True)
    written = {"machine": machine, "bundle": bundle.digest, "products": found}
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
