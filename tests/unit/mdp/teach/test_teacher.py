"""What cannot be taught through the gateway."""

from pathlib import Path

import pytest

from mdp.errors import InputError
from mdp.teach.teacher import FleetTeacher, TeachOptions
from mdp.testing.bundles import DEVICES, write_bundle


def fleet_of(folder: Path, *, several: bool) -> Path:
    write_bundle(folder / "bundle", several=several)
    entries = "".join(
        f'[[devices]]\ndevice = "{device}"\naddress = "tcp://127.0.0.1:{k + 1}"\nk = {k}\n'
        for k, device in enumerate(DEVICES)
    )
    path = folder / "fleet.toml"
    path.write_text(f'bundle = "bundle"\n{entries}')
    return path


def options(folder: Path, *, several: bool) -> TeachOptions:
    fleet = fleet_of(folder, several=several)
    return TeachOptions(fleet=fleet, key=None, scenes=folder / "scenes", kept=None)


def test_scenes_teach_one_label_each(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    assert FleetTeacher(options(tmp_path / "one", several=False)).devices == list(DEVICES)
    with pytest.raises(InputError, match="--teach: expected a bundle with one label an item"):
        FleetTeacher(options(tmp_path / "several", several=True))
