"""What tests change of a bundle that mdp.testing.bundles has written."""

import json
from pathlib import Path

import msgspec

from mdp.files import read_json, write_json
from mdp.formats.bundle import MANIFEST, Manifest, file_entry
from mdp.fusion.early_exit import EarlyBounds, Pull, early_pairs


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


def with_early_bounds(folder: Path, most: float) -> Path:
    """Let the bundle in `folder` say that no awaited member pulled harder than `most`."""
    manifest = read_json(folder / MANIFEST, Manifest)
    pulls = tuple(
        Pull(members=members, arrived=arrived, boosted=most, stacked=most, bagged=most)
        for members, arrived in early_pairs(len(manifest.plan.assignments))
    )
    early = EarlyBounds(pictures=1000, pulls=pulls)
    write_json(folder / MANIFEST, msgspec.structs.replace(manifest, early=early))
    return folder
