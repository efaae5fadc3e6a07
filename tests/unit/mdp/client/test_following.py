"""A fleet file and its bundle as they change, are away, and stay wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdp.client.following import FollowedFiles
from mdp.errors import ConfigError
from mdp.formats.fleet import Fleet


class Followed:
    """A fleet file with a bundle, and whoever follows them."""

    def __init__(self, folder: Path) -> None:
        self.file, self.manifest = folder / "fleet.toml", folder / "bundle" / "manifest.json"
        self.manifest.parent.mkdir()
        self.file.write_text("1")
        self.manifest.write_text("1")
        self.client: Any = SimpleNamespace(fleet=Fleet(bundle="bundle", devices=[]))
        self.said: list[str] = []
        self.wrong = ""
        self.files = FollowedFiles(self.file, self.client, self.said.append)

    def follow(self) -> bool:
        """Tell whether the files were read again."""
        with self.files.following() as changed:
            if changed and self.wrong:
                raise ConfigError(self.wrong)
            return changed
        return False


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_files_are_read_again_once_for_each_change(followed: Followed) -> None:
    for file in (followed.file, followed.manifest):
        assert not followed.follow()
        file.write_text("changed")
        assert followed.follow()
    assert not followed.follow()


def test_another_bundle_is_read_once(followed: Followed) -> None:
    other = followed.file.parent / "other" / "manifest.json"
    other.parent.mkdir()
    other.write_text("another")
    entry = '[[devices]]\ndevice = "alpha"\naddress = "tcp://127.0.0.1:1"\nk = 0\n'
    followed.file.write_text(f'bundle = "other"\n{entry}')
    assert followed.follow()
    followed.client.fleet = Fleet(bundle="other", devices=[])
    assert not followed.follow()
    other.write_text("and again")
    assert followed.follow()


def test_what_is_wrong_for_a_moment_is_not_said(followed: Followed) -> None:
    followed.file.write_text("half a f")
    followed.wrong = "fleet.toml: expected TOML"
    assert not followed.follow()
    followed.wrong = ""
    assert followed.follow()
    followed.file.unlink()
    assert not followed.follow()
    followed.file.write_text("whole again")
    assert followed.follow()
    assert followed.said == []


def test_what_stays_wrong_is_said_once(followed: Followed) -> None:
    followed.file.write_text("wrong")
    followed.wrong = "fleet.toml: expected TOML"
    assert [followed.follow() for _ in range(4)] == [False] * 4
    assert followed.said == ["fleet.toml: expected TOML; going on with what was read before"]
    # Something else is wrong with it, and then the same again after it was right.
    followed.wrong = "fleet.toml: expected devices"
    followed.follow()
    assert len(followed.said) == 2
    followed.wrong = ""
    assert followed.follow()
    followed.file.write_text("wrong again")
    followed.wrong = "fleet.toml: expected devices"
    for _ in range(3):
        followed.follow()
    assert len(followed.said) == 3
    followed.file.unlink()
    followed.follow()
    assert followed.said[3].startswith(f"{followed.file}: cannot be read: No such file")


def test_a_bundle_that_is_gone_keeps_no_file_from_naming_another(followed: Followed) -> None:
    followed.manifest.unlink()
    followed.file.write_text("another bundle")
    assert followed.follow()
