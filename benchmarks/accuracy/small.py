"""What pretraining, a chained start, boosting and stacking distillation bring to a pair of members,
from the networks of `benchmarks.families.jobs --small`. Writes benchmarks/results/small-parts.json.

    python -m benchmarks.families.jobs JOBS --small
    python -m benchmarks.families.train JOBS PACK OUT --minutes 75
    python -m benchmarks.accuracy.small PACK OUT

PACK has `cifar10` as benchmarks.families.pack writes it.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.accuracy.compare import SEEDS, difference
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.fusion.fuse import Contribution, fuse
from partitioner.fusion.stacking import fit_subset

RESULT = RESULTS / "small-parts.json"
#: A part, the members without it and with it; {s} is the seed, {t} that of the second network.
PARTS = {
    "two families, against two seeds of one": (
        ("lite0-s{s}", "lite0-s{n}"), ("lite0-s{s}", "vit4-s{s}"),
    ),
    "pretraining of the second": (("lite0-s{s}", "vit4-scratch-s{s}"), ("lite0-s{s}", "vit4-s{s}")),
    "boosting of the second": (("lite0-s{s}", "vit4-s{s}"), ("lite0-s{s}", "vit4-boost-s{s}")),
    "stacking distillation beside it": (
        ("lite0-s{s}", "vit4-boost-s{s}"), ("lite0-s{s}", "vit4-stack-s{s}"),
    ),
    "a start from the first (Lite0)": (
        ("lite0-s{s}", "lite0-s{n}"), ("lite0-s{s}", "lite0-chain-s{t}"),
    ),
    "a start from the first (ViT)": (
        ("vit4-s{s}", "vit4-s{n}"), ("vit4-s{s}", "vit4-chain-s{t}"),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    meta = json.loads((asked.pack / "cifar10.json").read_text())
    targets = {split: np.array(meta[split]["targets"]) for split in ("calibration", "test")}

    def logits(name: str, split: str) -> Contribution:
        kept = np.load(asked.out / f"small-{name}.npz")
        boost, bag = (kept[split[0] + head].astype(np.float32) for head in "bg")
        return Contribution(boost, bag)

    def right(names: list[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        members = {k: logits(name, "calibration") for k, name in enumerate(names)}
        weights = fit_subset(members, tuple(members), targets["calibration"])
        fused = fuse({k: logits(name, "test") for k, name in enumerate(names)}, weights)
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = fused.argmax(axis=1) == targets["test"]
        return found

    rows = []
    for part, sides in PARTS.items():
        fleets = [
            [[name.format(s=s, n=(s + 1) % 3, t=s + 10) for name in side] for s in SEEDS]
            for side in sides
        ]
        without, having = ([right(names) for names in fleet] for fleet in fleets)
        alone = [[float(right(names[1:]).mean()) for names in fleet] for fleet in fleets]
        brings = difference(having, without)
        rows.append(
            {
                "part": part,
                "without": [float(one.mean()) for one in without],
                "with": [float(one.mean()) for one in having],
                "brings": brings,
                "second_alone": alone,
            }
        )
        print(part, brings)
    write_json(RESULT, rows)


if __name__ == "__main__":
    main()
