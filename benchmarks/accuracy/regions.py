"""What parts of the picture at real detail bring, against other networks of the whole picture.

    python -m benchmarks.accuracy.regions --data imagenette --weights FOLDER --scratch FOLDER

EfficientNet-Lite of public weights, rows cut by name, nothing trained: all members take about as
long. WEIGHTS has lite0.safetensors to lite2.safetensors and imagenet1k.txt. Fusion is fitted on the
calibration split, accuracy is that of the test split. Writes benchmarks/results/regions.json.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from mdp.files import write_bytes, write_json
from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution, fuse
from mdp.runtimes.onnxruntime import open_session
from partitioner.assembly.imported import HEADS, timm_module
from partitioner.assembly.members import Model, read_names, rows_of
from partitioner.data.crops import WHOLE, View, load_views
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.export.evaluate import accuracy
from partitioner.export.sessions import run_session
from partitioner.export.write import to_onnx
from partitioner.fusion.stacking import fit_subset
from partitioner.run.progress import Progress

#: Parts of 75 % of each side, which a device sees a third finer than the whole, and a wider one.
REGIONS = {
    "whole": WHOLE,
    "centre, 88 %": Region(left=0.0625, top=0.0625, right=0.9375, bottom=0.9375),
    "centre": Region(left=0.125, top=0.125, right=0.875, bottom=0.875),
    "top left": Region(right=0.75, bottom=0.75),
    "bottom right": Region(left=0.25, top=0.25),
    "top right": Region(left=0.25, bottom=0.75),
    "bottom left": Region(right=0.75, top=0.25),
}
SIZES = {"lite0": 128, "lite1": 112, "lite2": 104}
#: Member -> weights and region.
MEMBERS = {f"{kind} {name}": (kind, region) for kind in SIZES for name, region in REGIONS.items()}
#: Kinds of fleets -> the members they may have. Of each the best three on the calibration split.
KINDS: dict[str, Callable[[Sequence[str]], bool]] = {
    "whole pictures": lambda members: all(name.endswith(" whole") for name in members),
    "one region for all": lambda members: len({MEMBERS[name][1] for name in members}) == 1,
    "one network, regions of its own": lambda members: len({MEMBERS[m][0] for m in members}) == 1,
    "any network, any region": lambda members: True,
}


def contributions(
    name: str, data: Dataset, weights: Path, scratch: Path
) -> tuple[Contribution, Contribution]:
    """A member's logits on the calibration and the test split."""
    kind, region = MEMBERS[name]
    size, file, labels = SIZES[kind], scratch / f"{kind}.onnx", "imagenet1k.txt"
    if not file.is_file():
        source = weights / f"{kind}.safetensors"
        names = read_names(weights / labels)
        model = Model(
            device=kind, labels=labels, timm=f"tf_efficientnet_{kind}", weights=source.name,
            image_size=size,
        )  # fmt: skip
        rows = rows_of(names, data.labels, {}, labels)
        write_bytes(file, to_onnx(timm_module(model, source, len(names), rows), size, HEADS, {}))
    session, found = open_session(file), []
    for split in ("calibration", "test"):
        pictures = data.calibration if split == "calibration" else data.test
        views = load_views(pictures, [View(size, region)], scratch / "views", Progress(), name)[0]
        found.append(Contribution.of(run_session(session, views, HEADS)))
    return found[0], found[1]


def measured(data: Dataset, weights: Path, scratch: Path) -> list[dict[str, Any]]:
    """The best single network and the best three of each kind, chosen on the calibration split."""
    logits = {name: contributions(name, data, weights, scratch) for name in MEMBERS}

    @cache
    def right(members: tuple[str, ...]) -> tuple[float, NDArray[np.bool_]]:
        calibration = {k: logits[name][0] for k, name in enumerate(members)}
        weights = fit_subset(calibration, tuple(range(len(members))), data.calibration.targets)
        fused = fuse({k: logits[name][1] for k, name in enumerate(members)}, weights)
        return (
            accuracy(fuse(calibration, weights), data.calibration.targets),
            fused.argmax(axis=1) == data.test.targets,
        )

    def best(choices: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return max(choices, key=lambda members: right(members)[0])

    single = best((name,) for name in MEMBERS)
    rows = {"one network, the whole picture": best((m,) for m in MEMBERS if m.endswith(" whole"))}
    rows |= {"one network, any region": single}
    for kind, allowed in KINDS.items():
        rows[f"three: {kind}"] = best(filter(allowed, itertools.combinations(MEMBERS, 3)))
    against = right(single)[1]
    return [
        {
            "kind": kind,
            "members": members,
            "share": float(right(members)[1].mean()),
            "missing": [
                float(right(tuple(m for m in members if m != out))[1].mean()) for out in members
            ] if len(members) > 1 else [],
            "gain": float((right(members)[1] * 1.0 - against).mean()),
            "error": float((right(members)[1] * 1.0 - against).std() / len(against) ** 0.5),
        }
        for kind, members in rows.items()
    ]  # fmt: skip


def figures() -> str:
    """The table of the page."""
    return table(
        kept("regions")["fleets"],
        ("chosen", "{kind}"),
        ("members", lambda row: ", ".join(row["members"])),
        ("all in", lambda row: f"{row['share']:.1%}"),
        ("one missing", lambda row: ", ".join(f"{share:.1%}" for share in row["missing"])),
        ("over one network, any region",
         lambda row: f"{row['gain'] * 100:+.1f} ± {row['error'] * 100:.1f}"),
    )  # fmt: skip


PAGE = Page("benchmarks.accuracy.regions", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.regions")
    for option in ("--data", "--weights", "--scratch"):
        parser.add_argument(option, type=Path, required=True)
    asked = parser.parse_args()
    data = open_dataset(str(asked.data))
    fleets = measured(data, asked.weights, asked.scratch)
    write_json(RESULTS / "regions.json", {"test_pictures": len(data.test), "fleets": fleets})
    PAGE.write()


if __name__ == "__main__":
    main()
