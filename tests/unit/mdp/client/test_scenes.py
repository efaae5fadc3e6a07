"""Scenes as folders, and cameras that cannot be right."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from unittest import mock

import pytest

from mdp.client.scenes import Scene, SceneFolder, Suspicions, Tally, name_of
from mdp.errors import InputError

AT = datetime(2026, 11, 23, 10, 15, 4, 250_000, tzinfo=UTC)
BOTH = {"alpha": b"a", "beta/yard": b"b"}


def read_tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def test_a_scene_is_a_folder_named_by_utc_time(tmp_path: Path) -> None:
    path = SceneFolder(tmp_path / "scenes", "part-a").write(AT, BOTH)
    assert path == tmp_path / "scenes" / "part-a" / "2026-11-23T10-15-04.250"
    assert read_tree(path) == {"alpha.jpg": b"a", "beta+yard.jpg": b"b"}
    east = timezone(timedelta(hours=2))
    assert name_of(AT.astimezone(east)) == path.name


def test_scenes_that_are_there_stay(tmp_path: Path) -> None:
    folder = SceneFolder(tmp_path, "part-a")
    first, second = folder.write(AT, BOTH), folder.write(AT, {"alpha": b"c"})
    assert second.name == "2026-11-23T10-15-04.251"
    assert read_tree(first) == {"alpha.jpg": b"a", "beta+yard.jpg": b"b"}


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), OSError(28, "No space left on device")]
)
def test_a_scene_that_cannot_be_written_leaves_nothing(tmp_path: Path, error: OSError) -> None:
    folder = SceneFolder(tmp_path / "scenes", "part-a")
    with (
        mock.patch.object(Path, "write_bytes", side_effect=error),
        pytest.raises(InputError, match=f"04.250: cannot be written: {error.strerror}"),
    ):
        folder.write(AT, BOTH)
    assert list(tmp_path.iterdir()) == []
    folder.write(AT, BOTH)


@pytest.mark.parametrize("label", ["", " ", ".", "..", ".hidden", "a/b", "a\n", "train", "test"])
def test_a_label_that_is_no_class(tmp_path: Path, label: str) -> None:
    with pytest.raises(InputError, match=r"^--label "):
        SceneFolder(tmp_path, label)


def test_a_camera_that_stands_still_is_said_once() -> None:
    suspicions = Suspicions()
    told = [suspicions.of({"alpha": b"a", "beta": bytes([number])}) for number in range(6)]
    assert told == [[], [], ["alpha: the same picture 3 times in a row"], [], [], []]
    # Without a picture in between, it still is the same.
    suspicions = Suspicions()
    told = [suspicions.of(pictures) for pictures in ({"alpha": b"a"}, {}) * 3]
    assert told[4:] == [["alpha: the same picture 3 times in a row"], []]
    suspicions = Suspicions()
    assert not any(suspicions.of({"alpha": picture}) for picture in (b"a", b"a", b"b") * 2)


def test_two_agents_with_one_camera_are_said_once() -> None:
    suspicions = Suspicions()
    pictures = [{"beta": b"%d" % n, "alpha": b"%d" % n, "gamma": b"g%d" % n} for n in range(3)]
    told = [suspicions.of(each) for each in pictures]
    assert told == [["alpha and beta: the same picture: expected a camera for each"], [], []]


def test_what_was_recorded_is_counted() -> None:
    tally = Tally()
    for pictures, missing in ((BOTH, {}), ({"alpha": b"a"}, {"beta": "gone"}), ({}, {"beta": "x"})):
        tally.add(Scene(pictures=pictures, missing=missing))
    assert tally.moments == 3
    assert str(tally) == "1 scene, 2 left out with fewer than 2 cameras, 2 without beta"
