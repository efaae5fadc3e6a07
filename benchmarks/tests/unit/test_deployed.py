"""The page of what was deployed, and the figures that it is made of."""

import json
from pathlib import Path

import pytest

from benchmarks.deployed.__main__ import read_parts
from benchmarks.deployed.page import PARTS, figures, part_figures, written
from mdp.errors import InputError

PART = {
    "date": "2026-11-27",
    "load": [1.0, 2.5],
    "engines": {"podman": "4.3.1", "systemd": "252"},
    "values": {"commands": 6, "installed_s": 15.25, "rebooted_s": 8.04},
}
MACHINE = {"cores": 2, "processor": "AMD EPYC"}


def leave(folder: Path, name: str, part: object) -> None:
    """Write a part as the targets do."""
    (folder / f"{name}.json").write_text(json.dumps(part))


def test_a_figure_has_the_unit_of_its_name() -> None:
    assert written("back_s", 4.26) == "4.3 s"
    assert written("agent_built_s", 93.6) == "94 s"
    assert written("answer_ms", 214.4) == "214 ms"
    assert written("gateway_added_mb", 169.2) == "169 MB"
    assert written("exposure", 1.4) == "1.4"
    assert written("commands", 6.0) == "6"


def test_a_part_tells_its_set_up() -> None:
    said = part_figures("walk", {"machine": MACHINE, **PART})
    assert (
        "podman 4.3.1, systemd 252, 2 virtual cores, AMD EPYC, load 1 to 2.5, 2026-11-27." in said
    )
    assert "| until READY | 15 s |" in said
    assert "| and after a reboot until READY | 8.0 s |" in said


def test_figures_that_nobody_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected figures of walk or compose, found none"):
        read_parts(tmp_path, ["walk", "compose"])
    leave(tmp_path, "walk", PART)
    leave(tmp_path, "systemd", {**PART, "values": {}})
    # A part that was skipped has left none, and another target's is not taken.
    assert read_parts(tmp_path, ["walk", "compose"]) == {"walk": PART}
    leave(tmp_path, "walk", {**PART, "values": {"walked_s": 1}})
    with pytest.raises(InputError, match=r"walk\.json: walked_s: expected a figure that"):
        read_parts(tmp_path, ["walk"])
    with pytest.raises(InputError, match=r"expected some of containers, .*, got 'flight'"):
        read_parts(tmp_path, ["flight"])


def test_kept_figures_are_all_shown() -> None:
    said = figures()
    for heading, _ in PARTS.values():
        assert said.count(f"### {heading}\n") <= 1
    assert "### " in said
