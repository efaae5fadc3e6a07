"""The first minutes of a newcomer: their commands, environment and bytes."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.newcomer.__main__ import WayFailed, environment, follow, used_bytes
from benchmarks.newcomer.ways import INSTALLED, TUTORIALS, Way, ways


def test_a_tutorial_is_followed_word_for_word() -> None:
    script = ways()["cameras"].script
    installation, _, rest = script.partition(f"echo {INSTALLED}")
    assert "pip install '.[agent,partition,weights]'" in installation
    steps = ("mdp keys new", "mdp record", "mdp-partition build", "mdp bundle push", "mdp look")
    places = [rest.index(step) for step in steps]
    assert places == sorted(places)
    assert "stacked from" not in script


def test_commands_over_several_lines_count_once_and_a_page_without_its_commands() -> None:
    way = Way("an example", f"one\necho {INSTALLED}\n\ntwo \\\n  three \\\n  four\nfive &\n")
    assert way.commands == 3
    found = ways()["pictures"]
    page = (TUTORIALS / "from-pictures-to-a-bundle.md").read_text()
    assert 0.5 * len(page.split()) < found.words < len(page.split())
    assert "kill -KILL $device" in found.script


def test_every_way_says_when_all_is_installed() -> None:
    for way in ways().values():
        assert f"echo {way.installed}" in way.script or way.tool


def test_an_environment_has_nothing_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("PIP_FIND_LINKS", "elsewhere")
    found = environment(tmp_path)
    assert {"PYTHONPATH", "PIP_FIND_LINKS", "VIRTUAL_ENV"}.isdisjoint(found)
    assert f"{Path(sys.prefix)}/bin" not in found["PATH"].split(os.pathsep)
    assert found["HOME"].startswith(str(tmp_path))


def test_files_of_two_names_count_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_bytes(b"x" * 1000)
    before = used_bytes(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "folder/a")
    assert used_bytes(tmp_path) == before


def test_a_way_is_timed_until_its_end(tmp_path: Path) -> None:
    way = Way("an example", f'echo {INSTALLED}\ntest -z "$PYTHONPATH"\nsleep 0 &\necho done')
    found = follow(way, tmp_path, environment(tmp_path))
    assert 0 < found["installed_s"] <= found["end_s"]


@pytest.mark.parametrize("script", ["echo before; false", f"echo {INSTALLED}; exit 3", "echo end"])
def test_a_way_that_fails_is_told_with_its_last_lines(script: str, tmp_path: Path) -> None:
    with pytest.raises(WayFailed, match=r"^ended with \d+:"):
        follow(Way("an example", script), tmp_path, environment(tmp_path))
