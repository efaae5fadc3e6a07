"""The folder of kept items, as it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.errors import ConfigError
from mdp.line.kept import RECORD, folder_name, list_kept, picture_name, read_kept


def keep(folder: Path, item: str, *devices: str, why: str = "unsure", **answer: Any) -> Path:
    kept = folder / folder_name(item)
    kept.mkdir(parents=True)
    record = {
        "item": item, "time": f"2026-11-25T22:00:0{len(item)}+00:00", "why_kept": why,
        "answer": {"class": "nut", "probability": 0.5, "known": True, **answer}, "passed": False,
    }  # fmt: skip
    (kept / RECORD).write_text(json.dumps(record))
    for device in devices:
        (kept / picture_name(device)).write_bytes(b"\xff\xd8")
    return kept


@given(st.text(max_size=300), st.text(max_size=300))
def test_every_item_has_a_folder_of_its_own(one: str, other: str) -> None:
    name = folder_name(one)
    assert 0 < len(name.encode()) <= 100
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".")
    assert (name == folder_name(other)) == (one == other)


def test_plain_ids_are_their_folders() -> None:
    assert folder_name("17") == "17"
    assert folder_name("belt-2_0.17") == "belt-2_0.17"
    assert folder_name("../17").startswith("_._17_")


def test_the_most_unsure_come_first(tmp_path: Path) -> None:
    keep(tmp_path, "1", why="unsure", probability=0.4)
    keep(tmp_path, "22", why="disagreement", probability=0.9)
    keep(tmp_path, "333", why="unknown", known=False, novelty=0.5)
    keep(tmp_path, "4444", why="unknown", known=False, novelty=2.0)
    keep(tmp_path, "55555", why="unsure", probability=None)
    assert [one.record.item for one in list_kept(tmp_path)] == ["4444", "333", "55555", "1", "22"]
    oldest = list_kept(tmp_path, order="oldest")
    assert [one.record.item for one in oldest] == ["1", "22", "333", "4444", "55555"]


def test_pictures_have_their_devices_names(tmp_path: Path) -> None:
    answer: dict[str, Any] = {"devices": {"a": {"class": "nut", "probability": 0.7}}}
    kept = read_kept(keep(tmp_path, "a/b", "pi", "pi/attic", **answer))
    assert set(kept.pictures) == {"pi", "pi/attic"}
    assert kept.record.item == "a/b"
    assert kept.record.answer.devices["a"].label == "nut"


def test_others_are_left_out(tmp_path: Path) -> None:
    assert list_kept(tmp_path / "none") == []
    keep(tmp_path, "1")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RECORD).write_text("{")
    (tmp_path / ".hidden").mkdir()
    assert [one.record.item for one in list_kept(tmp_path)] == ["1"]
    with pytest.raises(ConfigError, match=r"record\.json: expected the record of a kept item"):
        read_kept(tmp_path / "broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        list_kept(tmp_path / "notes.txt")


def test_items_that_differ_come_before_unsure_ones_the_most_different_first(tmp_path: Path) -> None:
    keep(tmp_path, "a", why="unsure", probability=0.1)
    keep(tmp_path, "b", why="different", anomaly=0.5)
    keep(tmp_path, "c", why="different", anomaly=4.0)
    keep(tmp_path, "d", why="unknown", novelty=0.1)
    assert [one.record.item for one in list_kept(tmp_path)] == ["d", "c", "b", "a"]
