"""Packages of another commit, to be measured in turns with those of this one."""

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of `commit` into `folder`, which is made; returns it."""
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder
