"""Commands that find no room: one line, the documented exit code, and nothing half-written."""

import os
import subprocess
from pathlib import Path

import pytest

from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.machine_faults import fill, mounting_works, small_disk
from tests.support.fleet import BIN, ROOT

NO_ROOM = "cannot be written: No space left on device\n"


def mdp(*arguments: object, out: Path | None = None, buffered: bool = True) -> tuple[int, str]:
    """Exit code and stderr of an `mdp` command that prints into `out`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    command = [str(BIN / "mdp"), *map(str, arguments)]
    with (out or Path(os.devnull)).open("wb") as stdout:
        done = subprocess.run(
            command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        )
    return done.returncode, done.stderr


@pytest.fixture
def fleet_new(tmp_path: Path) -> list[object]:
    bundle = write_bundle(tmp_path / "bundle")
    return ["fleet", "new", "--bundle", bundle, "--device", f"{DEVICES[0]}=tcp://127.0.0.1:7500"]


@pytest.mark.parametrize(("form", "buffered"), [([], True), (["--json"], False)])
def test_standard_output_on_a_full_disk(
    fleet_new: list[object], tmp_path: Path, form: list[str], buffered: bool
) -> None:
    asked = [*fleet_new, *form, "--out", tmp_path / "fleet.toml"]
    assert mdp(*asked, out=Path("/dev/full"), buffered=buffered) == (2, f"mdp: {NO_ROOM}")


def test_files_on_a_full_disk(fleet_new: list[object], tmp_path: Path) -> None:
    if why := mounting_works():
        pytest.skip(why)
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        (disk / "keys").mkdir()
        full = fill(disk)
        path = disk / "fleet.toml"
        assert mdp(*fleet_new, "--out", path) == (2, f"mdp: {path}: {NO_ROOM}")
        secret = disk / "keys" / "n100.secret"
        new_keys = ["keys", "new", "--out", disk / "keys", "--name", "n100"]
        assert mdp(*new_keys) == (2, f"mdp: {secret}: {NO_ROOM}")
        assert sorted(disk.rglob("*")) == [full, disk / "keys"]
        # With room again, the same command works.
        full.unlink()
        assert mdp(*fleet_new, "--out", path) == (0, "")
