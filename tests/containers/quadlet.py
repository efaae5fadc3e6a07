"""Units that podman's own generator makes of deploy/quadlet: `make containers`.

The generator is podman's from 4.4 on; QUADLET names one that is elsewhere. Skipped without, and
where systemd does not check units. What it refuses is a line on its error output.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.engine import ROOT

FILES = ROOT / "deploy" / "quadlet"
GENERATOR = Path(os.environ.get("QUADLET", "/usr/libexec/podman/quadlet"))
#: What it has to make of each file, as words of the command.
CONFINED = ("--read-only", "--cap-drop all", "--security-opt=no-new-privileges",
            "--pids-limit 256", "--memory=1g", "--sdnotify=healthy")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not GENERATOR.is_file():
        pytest.skip(f"{GENERATOR}: podman's generator of units is not here")
    place = tmp_path / "containers"
    shutil.copytree(FILES, place)
    (place / "mdp-agent@n100.container").symlink_to("mdp-agent@.container")
    return place


def generated(folder: Path) -> dict[str, str]:
    """Name -> text of the units that the generator makes; fails where it warns."""
    done = subprocess.run(
        [str(GENERATOR), "--dryrun"],
        env=os.environ | {"QUADLET_UNIT_DIRS": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if "Loading source unit" not in line]
    assert (done.returncode, said) == (0, []), said
    parts = re.split(r"^---(.+)---$", done.stdout, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_units(folder: Path, tmp_path: Path) -> None:
    units = generated(folder)
    assert units.keys() == {"mdp-agent@.service", "mdp-agent@n100.service", "mdp-gateway.service"}
    for name, text in units.items():
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
        for words in CONFINED:
            assert words in command, name
        assert "Type=notify" in text
        (tmp_path / name).write_text(text)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; the generator was content")
    for name in ("mdp-agent@n100.service", "mdp-gateway.service"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_key_that_it_does_not_know(folder: Path) -> None:
    path = folder / "mdp-gateway.container"
    path.write_text(path.read_text().replace("ReadOnly=", "ReadOnli="))
    with pytest.raises(AssertionError, match="ReadOnli"):
        generated(folder)
