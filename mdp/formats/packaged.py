"""Bundles that come with the distribution, found by their names."""

import shutil
from importlib import resources
from pathlib import Path

from mdp.errors import InputError
from mdp.files import read_json
from mdp.formats.bundle import MANIFEST, Manifest


def packaged_bundles() -> dict[str, Path]:
    """Name -> folder of the bundles that are there; some may lack files that are others' copies."""
    installed = Path(str(resources.files("mdp"))) / "bundles"
    checkout = Path(__file__).resolve().parents[2] / "examples/bundles"
    folder = installed if installed.is_dir() else checkout
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))}


def packaged_bundle(name: str) -> Path:
    """The folder of the bundle `name`; raises InputError with the names that there are."""
    found = packaged_bundles()
    if name not in found:
        raise InputError(f"{name}: expected a bundle's folder, or one of {', '.join(found)}")
    return found[name]


def unpacked_bundle(source: Path, out: Path) -> Path:
    """A folder with all files of the packaged bundle `source`: itself, or a copy in `out`.

    Members of equal models need one file in a package: the others are copies of it.
    """
    entries = read_json(source / MANIFEST, Manifest).files
    there = {entry.sha256: path for path, entry in entries.items() if (source / path).is_file()}
    lacking = [path for path in entries if not (source / path).is_file()]
    if not lacking:
        return source
    shutil.copytree(source, out, dirs_exist_ok=True)
    for path in lacking:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / there[entries[path].sha256], out / path)
    return out
