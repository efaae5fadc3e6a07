"""What tests change of a bundle that mdp.testing.bundles has written."""

import json
from pathlib import Path

import msgspec

from mdp.files import read_json, write_json
from mdp.formats.bundle import MANIFEST, CascadeAccuracy, Manifest, PerRule, file_entry
from mdp.fusion.cascade import Cascade

#: What a bundle of `with_cascade` says that its cascade was measured to do.
A_QUARTER = PerRule(boosted=0.25, stacked=0.25, bagged=0.25)
CASCADE_ACCURACY = PerRule(boosted=0.875, stacked=0.875, bagged=0.875)


def change_assignment(folder: Path, **changes: object) -> None:
    """Change what a bundle's manifest says of its first device."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    content["plan"]["assignments"][0].update(changes)
    path.write_text(json.dumps(content))


def listed(folder: Path, name: str) -> None:
    """Put the hash and size that a file has now into its bundle's manifest."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    content["files"][name] = msgspec.to_builtins(file_entry(folder / name))
    path.write_text(json.dumps(content))


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
