"""Bundles that come with the distribution, found by their names."""

import hashlib
import os
import shutil
from importlib import resources
from pathlib import Path
from tempfile import mkdtemp

from mdp.errors import InputError
from mdp.files import read_json
from mdp.formats.bundle import MANIFEST, Manifest

#: Of a manifest's digest, in the name of its bundle's folder in the cache.
_DIGITS = 12


def bundles_in_package() -> dict[str, Path]:
    """Name -> folder of the bundles that are there; some may lack files that are others' copies."""
    installed = Path(str(resources.files("mdp"))) / "bundles"
    checkout = Path(__file__).resolve().parents[2] / "examples/bundles"
    folder = installed if installed.is_dir() else checkout
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))}


def bundle_in_package(name: str) -> Path:
    """The folder of the bundle `name`; raises InputError with the names that there are."""
    found = bundles_in_package()
    if name not in found:
        raise InputError(f"{name}: expected a bundle's folder, or one of {', '.join(found)}")
    return found[name]


def bundle_by_name(given: Path | None) -> Path | None:
    """The folder `given`, or where there is none the packaged bundle of that name.

    A packaged one that lacks copies of files is made whole in the user's cache, once for each
    content. Raises InputError where that cannot be written, and for a name of neither.
    """
    # What is no single name can only be a folder, whose reader says what it lacks.
    if given is None or given.exists() or given.name != str(given):
        return given
    source = bundle_in_package(str(given))
    # Of all that a bundle says of itself, as an upgrade may change its numbers alone.
    digest = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdp" / "bundles"
    out = cache / f"{given}-{digest[:_DIGITS]}"
    if (out / MANIFEST).is_file():
        return out
    try:
        cache.mkdir(parents=True, exist_ok=True)
        making = Path(mkdtemp(prefix=f".{given}.", dir=cache))
        try:
            if unpack_bundle(source, making / "whole") == source:
                return source
            (making / "whole").rename(out)
        except OSError:
            # Another process may have been first.
            if not (out / MANIFEST).is_file():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{cache}: cannot be written: {error.strerror or error}") from error
    return out


def unpack_bundle(source: Path, out: Path) -> Path:
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
