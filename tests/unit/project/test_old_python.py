"""A Python that is too old is told so in one line, and the Makefile asks before it installs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.old_python import LEAST, complaint

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "old"), [((2, 7), 1), ((3, 10, 13), 1), ((3, 11), 0), ((4, 0), 0)]
)
def test_only_an_old_one_is_refused(version: tuple[int, ...], old: bool) -> None:
    told = complaint(version)  # type: ignore[no-untyped-call]
    assert bool(told) == old
    if old:
        assert told.startswith("expected Python 3.11 or newer, got ")


def test_the_least_is_the_distribution_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*LEAST)


def test_make_stops_before_anything_is_installed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    script = (ROOT / "tools/old_python.py").read_text().replace("LEAST = (3, 11)", "LEAST = (9, 0)")
    (tmp_path / "tools/old_python.py").write_text(script)
    for target in ("demo", "demo-build"):
        command = ["make", target, f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "make: expected Python 9.0 or newer, got 3." in done.stderr
        assert not list(tmp_path.glob(".venv*"))
