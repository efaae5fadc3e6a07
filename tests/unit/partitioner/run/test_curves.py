"""Learning curves become a picture: every network and loss by name, the same bytes every time."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

pytest.importorskip("matplotlib")

from mdp.errors import InputError
from partitioner.run.curves import draw_curves
from partitioner.run.folder import RunFolder

SVG = "{http://www.w3.org/2000/svg}"
TEACHER = [{"loss": 2.0, "seconds": 1.5}, {"loss": 1.0, "seconds": 1.25}]
MEMBER = [{"loss": 3.0, "boost": 1.0, "bag": 2.0, "validation": 2.5, "seconds": 1.0}]


def texts(drawn: bytes) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def lines(drawn: bytes) -> list[str]:
    """The drawn curves' paths: those of axes' lines that are neither ticks nor legends."""
    axes = [g for g in ElementTree.fromstring(drawn).iter(f"{SVG}g") if "axes_" in g.get("id", "")]
    assert axes
    return [
        path.get("d", "")
        for panel in axes
        for group in panel
        if group.get("id", "").startswith("line2d_")
        for path in group.iter(f"{SVG}path")
    ]


def test_every_network_has_a_panel_and_every_loss_a_name() -> None:
    found = texts(draw_curves({"teacher": TEACHER, "member-0": MEMBER}))
    assert {"teacher", "member-0", "loss", "boost", "bag", "validation", "epoch"} <= set(found)
    assert found.count("loss") == 2
    assert "seconds" not in found


def test_the_line_falls_as_the_loss_does() -> None:
    (path,) = lines(draw_curves({"teacher": TEACHER}))
    numbers = [float(part) for part in path.split() if part not in ("M", "L")]
    assert numbers[0] < numbers[2]
    assert numbers[1] < numbers[3], "y grows downwards in an SVG"


def test_a_single_epoch_can_be_seen() -> None:
    drawn = draw_curves({"teacher": TEACHER[:1]})
    marked = drawn.decode().count("<use ")
    assert marked > draw_curves({"teacher": []}).decode().count("<use ")


def test_the_place_of_the_legend_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.legend import Legend

    def search(*_: object) -> None:
        raise AssertionError("the best place was searched, which takes its time on busy cores")

    monkeypatch.setattr(Legend, "_find_best_position", search)
    assert "loss" in texts(draw_curves({"teacher": TEACHER}))


def test_many_networks_and_a_loss_that_comes_later_fit() -> None:
    late = [*TEACHER, {"loss": 0.5, "stack": 0.25, "seconds": 1.0}]
    found = texts(draw_curves({f"member-{k}": late for k in range(9)}))
    assert [f"member-{k}" in found for k in range(9)] == [True] * 9
    assert found.count("stack") == 9


def test_the_same_curves_are_the_same_bytes_without_state_of_pyplot() -> None:
    curves, before = {"teacher": TEACHER, "member-0": MEMBER}, "matplotlib.pyplot" in sys.modules
    assert draw_curves(curves) == draw_curves(curves)
    assert b"<dc:date>" not in draw_curves(curves)
    assert draw_curves(curves) != draw_curves({"teacher": TEACHER})
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_the_picture_lies_beside_the_numbers_and_is_drawn_anew(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.keep_curve("teacher", TEACHER)
    assert "teacher" in texts((run.path / "curves.svg").read_bytes())
    run.keep_curve("member-0", MEMBER)
    assert {"teacher", "member-0"} <= set(texts((run.path / "curves.svg").read_bytes()))
    kept = {"teacher": TEACHER, "member-0": MEMBER}
    assert msgspec.json.decode(run.curves.read_bytes()) == kept
    assert not list(run.path.glob(".*.partial"))


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (run.path / "curves.svg").mkdir()
    with pytest.raises(InputError, match=r"curves\.svg: cannot be written: Is a directory"):
        run.keep_curve("teacher", TEACHER)
