"""Environments in which another project has a package `mdp`: one line, and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mdp_start import another_mdp

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "folders",
    [
        # The other one comes first on the path, and its files among ours.
        ("hinet", "nodes"),
        ("hinet", "nodes", "cli"),
        # None of ours, and of no known project.
        ("elsewhere",),
    ],
)
@pytest.mark.parametrize("command", ["mdp", "mdp_agent", "mdp_partition"])
def test_the_other_one_is_named(tmp_path: Path, folders: tuple[str, ...], command: str) -> None:
    for folder in folders:
        (tmp_path / "mdp" / folder).mkdir(parents=True)
    (tmp_path / "mdp/__init__.py").write_text("raise ImportError('of the other project')\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import mdp_start; mdp_start.{command}()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"{command.replace('_', '-')}: {tmp_path}/mdp has files of another project of this name "
        "(`pip uninstall mdp`, Debian's python3-mdp): install mdp-edge into an environment of its "
        "own\n"
    )


def test_this_one_is_no_other() -> None:
    assert another_mdp() is None
