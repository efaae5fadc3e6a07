"""Check the place where a bundle is to be written."""

from pathlib import Path

from mdp.errors import InputError
from mdp.files import read_json
from mdp.formats.bundle import MANIFEST, Manifest


def check_target(out: Path) -> None:
    """Raise InputError if something other than a bundle or an empty folder stands at `out`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise InputError(f"{out}: expected a new folder or a bundle to replace, found neither")
    read_json(out / MANIFEST, Manifest)
