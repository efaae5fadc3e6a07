"""The folder of kept items, as it is written: whole items, within a bound, also on a full disk."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.errors import InputError
from mdp.line.keeper import KeptFolder
from mdp.line.kept import RECORD, list_kept
from mdp.testing.machine_faults import fill, mounting_works, small_disk

PICTURE = b"\xff\xd8" + bytes(10_000)


def record(item: str, second: int = 0) -> bytes:
    told: dict[str, Any] = {
        "item": item, "time": f"2026-11-25T22:{second // 60:02}:{second % 60:02}+00:00",
        "why_kept": "unsure", "answer": {"class": "nut"},
    }  # fmt: skip
    return json.dumps(told).encode()


def on_disk(folder: Path) -> int:
    """Bytes of files, in blocks, and of folders."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    blocks = sum(-(-file.stat().st_size // 4096) * 4096 for file in files)
    return blocks + 4096 * len([one for one in folder.iterdir() if one.is_dir()])


def test_items_are_kept_with_their_pictures(tmp_path: Path) -> None:
    kept = KeptFolder(tmp_path / "kept", 1_000_000)
    kept.write("a/1", record("a/1"), {"pi": PICTURE, "pi/attic": PICTURE})
    (item,) = list_kept(tmp_path / "kept")
    assert item.record.item == "a/1"
    assert {device: file.read_bytes() for device, file in item.pictures.items()} == {
        "pi": PICTURE, "pi/attic": PICTURE,
    }  # fmt: skip
    assert kept.total_bytes == on_disk(tmp_path / "kept")


def test_the_oldest_make_room(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not an item")
    (tmp_path / ".9.01234567.partial").mkdir()
    kept = KeptFolder(tmp_path, 50_000)
    assert not (tmp_path / ".9.01234567.partial").exists()
    for number in range(5):
        kept.write(str(number), record(str(number), number), {"pi": PICTURE})
        assert on_disk(tmp_path) - 4096 <= 50_000
    # 20,480 bytes each.
    assert [one.record.item for one in list_kept(tmp_path, order="oldest")] == ["3", "4"]
    # Another watcher goes on with what is there; somebody has taken one away.
    again = KeptFolder(tmp_path, 50_000)
    assert again.total_bytes == kept.total_bytes
    newest = list_kept(tmp_path, order="oldest")[-1]
    for file in newest.folder.iterdir():
        file.unlink()
    newest.folder.rmdir()
    again.write("5", record("5", 5), {"pi": PICTURE})
    again.write("6", record("6", 6), {"pi": PICTURE})
    assert "6" in [one.record.item for one in list_kept(tmp_path)]
    assert on_disk(tmp_path) - 4096 <= 50_000
    assert (tmp_path / "notes.txt").exists()


def test_an_item_whose_id_was_kept_before(tmp_path: Path) -> None:
    kept = KeptFolder(tmp_path, 1_000_000)
    folders = {kept.write("17", record("17"), {"pi": PICTURE}).name for _ in range(3)}
    assert len(folders) == 3
    assert [one.record.item for one in list_kept(tmp_path)] == ["17"] * 3


def test_what_is_no_item_but_has_its_name_stays(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "own.jpg").write_bytes(PICTURE)
    kept = KeptFolder(tmp_path, 1_000_000)
    # A folder that comes later, too.
    (tmp_path / "later").mkdir()
    for item in ("photos", "later"):
        assert kept.write(item, record(item), {"pi": PICTURE}).name != item
    assert [one.name for one in (tmp_path / "photos").iterdir()] == ["own.jpg"]
    assert [*(tmp_path / "later").iterdir()] == []
    assert {one.record.item for one in list_kept(tmp_path)} == {"photos", "later"}


def test_a_record_is_measured_with_its_line_end(tmp_path: Path) -> None:
    kept = KeptFolder(tmp_path, 1_000_000)
    kept.write("1", record("1").ljust(4096), {})
    assert kept.total_bytes == on_disk(tmp_path)


def test_what_cannot_be_kept_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="expected a folder or nothing, found a file"):
        KeptFolder(file, 1000)
    kept = KeptFolder(tmp_path / "kept", 10_000)
    with pytest.raises(InputError, match=r"item 1 has 20,480 bytes: expected at most 10,000"):
        kept.write("1", record("1"), {"pi": PICTURE})
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file/kept"
    with pytest.raises(InputError) as refused:
        KeptFolder(folder, 1000)
    assert str(refused.value) == f"{folder}: cannot be made: Not a directory"


def test_a_folder_that_cannot_be_written_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InputError) as refused:
        KeptFolder(tmp_path, 1000)
    assert str(refused.value) == f"{tmp_path}: cannot be written"


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as while_full:
        while_full.setattr(Path, "mkdir", full)
        kept = KeptFolder(tmp_path / "kept", 1_000_000)
    kept.write("1", record("1"), {"pi": PICTURE})
    assert [one.record.item for one in list_kept(tmp_path / "kept")] == ["1"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFolder(tmp_path / "kept", 1_000_000)
    kept.write("1", record("1"), {"pi": PICTURE})
    real = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.suffix == ".jpg":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        kept.write("2", record("2"), {"pi": PICTURE})
    monkeypatch.undo()
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["1"]
    kept.write("2", record("2"), {"pi": PICTURE})
    assert len(list_kept(tmp_path / "kept")) == 2


def test_a_full_disk(tmp_path: Path) -> None:
    if why := mounting_works():
        pytest.skip(why)
    with small_disk(tmp_path / "disk", 2**18) as disk:
        kept = KeptFolder(disk / "kept", 10_000_000)
        kept.write("1", record("1"), {"pi": PICTURE})
        fill(disk)
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            kept.write("2", record("2"), {"pi": PICTURE})
        assert [one.name for one in (disk / "kept").iterdir()] == ["1"]
        assert (disk / "kept" / "1" / RECORD).read_bytes() == record("1") + b"\n"


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30_000), max_size=15), st.integers(30_000, 100_000))
def test_the_bound_holds_whatever_comes(sizes: list[int], most_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = KeptFolder(folder, most_bytes)
        for number, size in enumerate(sizes):
            try:
                kept.write(str(number), record(str(number), number), {"pi": bytes(size)})
            except InputError:
                assert size + 12_288 > most_bytes
            assert on_disk(folder) <= most_bytes
            assert kept.total_bytes == on_disk(folder)
