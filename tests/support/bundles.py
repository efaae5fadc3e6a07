"""Changes that tests make to a bundle that mdp.testing.bundles has written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mdp.files import read_json, write_json
from mdp.formats.bundle import (
    FUSION,
    MANIFEST,
    CascadeAccuracy,
    Manifest,
    PerRule,
    Rejection,
    SubsetRejection,
    file_entry,
)
from mdp.fusion.anomaly_table import MAXIMUM, Anomaly, ScoreTail, SubsetAnomaly
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import FusionWeights, list_subsets
from mdp.fusion.novelty_table import Novelty, SubsetNovelty

#: What a bundle of `with_cascade` says that its cascade was measured to do.
A_QUARTER = PerRule(boosted=0.25, stacked=0.25, bagged=0.25)
CASCADE_ACCURACY = PerRule(boosted=0.875, stacked=0.875, bagged=0.875)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a bundle's manifest by a function of its content."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_assignment(folder: Path, **changes: object) -> None:
    """Change what a bundle's manifest says of its first device."""
    change_manifest(folder, lambda manifest: manifest["plan"]["assignments"][0].update(changes))


def relist(folder: Path, name: str) -> None:
    """Put the hash and size that a file has now into its bundle's manifest."""
    entry = msgspec.to_builtins(file_entry(folder / name))
    change_manifest(folder, lambda manifest: manifest["files"].update({name: entry}))


def with_cascade(folder: Path, threshold: float, first: tuple[int, ...] = (0,)) -> Path:
    """Let the bundle in `folder` ask `first` before the others, and say how sure that has to be."""
    manifest = read_json(folder / MANIFEST, Manifest)
    cascade = Cascade(
        first=first,
        pictures=1000,
        boosted=threshold,
        stacked=threshold,
        bagged=threshold,
        escalated=0.25,
    )
    evaluation = manifest.evaluation
    assert evaluation is not None
    measured = CascadeAccuracy(first=first, escalated=A_QUARTER, accuracy=CASCADE_ACCURACY)
    evaluation = msgspec.structs.replace(evaluation, cascade=measured)
    write_json(
        folder / MANIFEST, msgspec.structs.replace(manifest, cascade=cascade, evaluation=evaluation)
    )
    return folder


def with_novelty(folder: Path, threshold: float = -2.0, rejected: float | None = 0.04) -> Path:
    """Let the bundle in `folder` take answers for unknown whose energy is above a threshold.

    `threshold` is that of a rate of 0.05; it is 1 higher for 0.01. `rejected` is the share of known
    test items that the first member alone takes for unknown, each further one 0.01 less.
    """
    manifest = read_json(folder / MANIFEST, Manifest)
    subsets = list_subsets(range(len(manifest.plan.assignments)))
    novelty = Novelty(
        rates=(0.01, 0.05),
        default=0.05,
        pictures=99,
        subsets=[
            SubsetNovelty(
                size=len(members),
                weights={"energy": 1.0},
                thresholds=(threshold + 1.0, threshold),
                members=members,
            )
            for members in subsets
        ],
    )
    weights = read_json(folder / FUSION, FusionWeights)
    write_json(folder / FUSION, msgspec.structs.replace(weights, novelty=novelty))
    evaluation = manifest.evaluation
    if rejected is not None and evaluation is not None:
        shares = {s: round(rejected - 0.01 * (len(s) - 1), 4) for s in subsets}
        rejection = Rejection(
            rate=0.05,
            subsets=[
                SubsetRejection(size=len(s), known=share, members=s) for s, share in shares.items()
            ],
        )
        evaluation = msgspec.structs.replace(evaluation, rejection=rejection)
        write_json(folder / MANIFEST, msgspec.structs.replace(manifest, evaluation=evaluation))
    relist(folder, FUSION)
    return folder


def with_anomaly(folder: Path, found: float = 0.75) -> Path:
    """Let the bundle in `folder` expect anomaly scores, which its models do not give.

    Of a score above 1, the surprise is the score; from 2 on an item differs, to all subsets, which
    find the share `found` of defects.
    """
    manifest = read_json(folder / MANIFEST, Manifest)
    count = len(manifest.plan.assignments)
    weights = read_json(folder / FUSION, FusionWeights)
    anomaly = Anomaly(
        tails=(ScoreTail(scores=(0.0, 0.3, 0.7, 1.0), decade=1.0),) * count,
        power=MAXIMUM,
        rates=(0.01,),
        default=0.01,
        good=99,
        subsets=[
            SubsetAnomaly(size=len(one), thresholds=(2.0,), members=one, found=(found,))
            for one in list_subsets(range(count))
        ],
        defective=20,
    )
    write_json(folder / FUSION, msgspec.structs.replace(weights, anomaly=anomaly))
    relist(folder, FUSION)
    return folder
