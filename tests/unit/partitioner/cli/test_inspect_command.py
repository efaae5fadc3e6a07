"""`mdp-partition inspect` in an environment of a board's size, which has no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdp.extras import INSPECT, PARTITION
from tests.support.inspection import PARTS, write_scenes

#: Runs the command as if the modules of its first word were not installed.
WITHOUT = (
    "import sys\n"
    "hidden = sys.argv.pop(1).split(',')\n"
    "sys.modules.update(dict.fromkeys(hidden))\n"
    "from partitioner.cli.main import main\n"
    "main()\n"
)


def run_without(hidden: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """The command's end in an interpreter where `hidden` cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(hidden), "inspect", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_good_items_are_learnt_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    good, out = write_scenes(tmp_path / "good", 20), tmp_path / "out"
    hidden = [name for name in PARTITION if name not in INSPECT]
    assert "torch" in hidden
    done = run_without(
        hidden, "--bundle", str(PARTS), "--data", str(good), "--out", str(out), "--json"
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["inspection"]["good"] == 20
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["inspection"]["members"]) == 4


@pytest.mark.parametrize("module", INSPECT)
def test_a_missing_module_is_named_with_the_least_that_brings_it(
    module: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    out = tmp_path / "out"
    done = run_without([module], "--bundle", str(PARTS), "--data", str(tmp_path), "--out", str(out))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mdp-partition: {module} is not installed; this command needs it: pip")
    assert "'.[inspect]'" in line
    assert not out.exists()
