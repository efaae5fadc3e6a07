"""Kept items become scenes: whole, once, and back again."""

import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mdp.errors import InputError
from mdp.line.kept import RECORD
from mdp.teach.review import GoneError, Review
from mdp.teach.taught import TaughtClass, count_classes, remove_scenes

JPEG, PNG = b"\xff\xd8one", b"\x89PNG\r\ntwo"
SCENE = "2026-11-25T22-00-01.500"


def keep(kept: Path, item: str = "17", time: str = "2026-11-25T22:00:01.5+00:00") -> Path:
    folder = kept / item
    folder.mkdir(parents=True)
    (folder / "top.jpg").write_bytes(JPEG)
    (folder / "left+attic.png").write_bytes(PNG)
    record = {"item": item, "time": time, "why_kept": "unsure", "answer": {"class": "nut"}}
    (folder / RECORD).write_text(json.dumps(record))
    return folder


def test_an_item_becomes_a_scene_and_back(tmp_path: Path) -> None:
    kept, scenes = tmp_path / "kept", tmp_path / "scenes"
    before = {path.name: path.read_bytes() for path in keep(kept).iterdir()}
    review = Review(kept, scenes)
    assert [item.record.item for item in review.items()] == ["17"]
    assert review.picture("17", "left/attic") == (PNG, ".png")
    move = review.put_right("17", "cap nut")
    assert (move.label, move.scene, review.last) == ("cap nut", scenes / "cap nut" / SCENE, move)
    found = {path.name: path.read_bytes() for path in move.scene.iterdir()}
    # As `mdp record` writes it; the record is none of its pictures.
    assert found == {"top.jpg": JPEG, "left+attic.png": PNG}
    assert list(kept.iterdir()) == []
    cameras = {"left/attic": 1, "top": 1}
    assert count_classes(scenes) == [TaughtClass(label="cap nut", scenes=1, cameras=cameras)]
    review.undo()
    assert {path.name: path.read_bytes() for path in (kept / "17").iterdir()} == before
    # A class without a scene would be refused.
    assert list(scenes.iterdir()) == []
    with pytest.raises(GoneError, match="nothing was put right"):
        review.undo()


def test_what_a_full_disk_refuses_is_undone_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keep(tmp_path / "kept")
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    move = review.put_right("17", "nut")
    with monkeypatch.context() as context:
        context.setattr(shutil, "copytree", full)
        with pytest.raises(InputError, match="No space left"):
            review.undo()
    assert review.last == move
    assert review.undo() == move
    assert [item.folder.name for item in review.items()] == ["17"]


def test_what_can_never_be_undone_is_forgotten(tmp_path: Path) -> None:
    for item in ("1", "2"):
        keep(tmp_path / "kept", item)
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    first = review.put_right("1", "nut")
    remove_scenes([review.put_right("2", "nut").scene])
    with pytest.raises(GoneError, match="its scene was changed meanwhile"):
        review.undo()
    assert review.undo() == first


def test_items_of_one_moment_are_scenes_each(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for item in ("1", "2"):
        keep(kept, item)
    review = Review(kept, tmp_path / "scenes")
    scenes = {review.put_right(item, "nut").scene.name for item in ("1", "2")}
    assert scenes == {SCENE, "2026-11-25T22-00-01.501"}
    assert review.put_right(keep(kept, "3", "no time").name, "nut").scene.is_dir()


@pytest.mark.parametrize("label", ["a/b", ".hidden", "", " ", "test", "x" * 81, "a\nb"])
def test_a_label_that_is_none_leaves_the_item(tmp_path: Path, label: str) -> None:
    keep(tmp_path / "kept")
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    with pytest.raises(InputError):
        review.put_right("17", label)
    assert len(review.items()) == 1
    assert not (tmp_path / "scenes").exists()


def test_what_cannot_be_written_leaves_the_item(tmp_path: Path) -> None:
    keep(tmp_path / "kept")
    (tmp_path / "scenes").write_text("a file")
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    with pytest.raises((InputError, OSError)):
        review.put_right("17", "nut")
    assert [item.folder.name for item in review.items()] == ["17"]
    # Nor one without a picture.
    for file in (tmp_path / "kept" / "17").glob("*.*g"):
        file.unlink()
    with pytest.raises(InputError, match="expected pictures, found none"):
        review.put_right("17", "nut")
    assert [item.folder.name for item in review.items()] == ["17"]


def test_a_folder_that_may_not_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "kept")
    review = Review(tmp_path / "kept", tmp_path / "scenes")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    for move in (lambda: review.put_right("17", "bolt"), lambda: review.discard("17")):
        with pytest.raises(InputError, match=r"^17: cannot be moved: Permission denied"):
            move()


def test_an_item_is_moved_once(tmp_path: Path) -> None:
    keep(tmp_path / "kept")
    one, other = (Review(tmp_path / "kept", tmp_path / "scenes") for _ in range(2))
    one.put_right("17", "nut")
    for again in (lambda: other.put_right("17", "bolt"), lambda: other.discard("17")):
        with pytest.raises(GoneError, match=r"^17: was put right already"):
            again()
    assert [found.label for found in count_classes(tmp_path / "scenes")] == ["nut"]


def test_a_move_that_broke_off_is_there_again(tmp_path: Path) -> None:
    folder = keep(tmp_path / "kept")
    folder.rename(folder.with_name(".teaching.17"))
    assert Review(tmp_path / "kept", tmp_path / "scenes").items()[0].folder == folder


@pytest.mark.parametrize("name", ["../scenes", "..", ".teaching.17", "", "a/b", "18"])
def test_names_that_are_no_item(tmp_path: Path, name: str) -> None:
    keep(tmp_path / "kept")
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    for work in (
        lambda: review.put_right(name, "nut"),
        lambda: review.discard(name),
        lambda: review.picture(name, "top"),
    ):
        with pytest.raises(GoneError):
            work()
    with pytest.raises(GoneError):
        review.picture("17", "../17/top")
    assert len(review.items()) == 1


def test_scenes_are_removed_with_a_class_that_has_none_left(tmp_path: Path) -> None:
    paths = [tmp_path / "nut" / "a", tmp_path / "nut" / "b"]
    for path in paths:
        path.mkdir(parents=True)
        (path / "top.jpg").write_bytes(JPEG)
    assert remove_scenes(paths[:1]) == 1
    assert [found.scenes for found in count_classes(tmp_path)] == [1]
    assert remove_scenes(paths) == 1
    assert count_classes(tmp_path) == count_classes(tmp_path / "nowhere") == []


def test_two_who_undo_at_once_take_back_one_move(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in keep(tmp_path / "kept").iterdir()}
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    for _ in range(20):
        review.put_right("17", "nut")
        with ThreadPoolExecutor(2) as pool:
            undone = [pool.submit(review.undo) for _ in range(2)]
        refused = [type(one.exception()) for one in undone if one.exception() is not None]
        assert refused == [GoneError]
        there = {path.name: path.read_bytes() for path in (tmp_path / "kept" / "17").iterdir()}
        assert there == before
