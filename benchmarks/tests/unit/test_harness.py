"""Tables, pages and pictures that all benchmarks share."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.harness import page
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.errors import InputError

MARKED = f"before\n{page.begin('here')}\n\nold\n\n{page.END}\nafter\n"


def test_the_best_cells_are_bold_and_empty_ones_stay_empty() -> None:
    rows = [{"ms": {"p50": 1200.0}, "who": "a"}, {"ms": {"p50": 7.04}, "who": "b"},
            {"ms": {"p50": 7.0}, "who": "c"}, {"ms": {"p50": None}, "who": "|"}]  # fmt: skip

    def cell(row: dict[str, dict[str, float]]) -> str:
        return "" if row["ms"]["p50"] is None else f"{row['ms']['p50']:,.1f} ± 3"

    assert table(rows, ("", "{who}"), ("p50, ms", cell, min), title="Times").splitlines() == [
        "### Times", "", "|  | p50, ms |", "|---|---|",
        "| a | 1,200.0 ± 3 |", "| b | **7.0 ± 3** |", "| c | **7.0 ± 3** |", r"| \| |  |",
    ]  # fmt: skip


def test_figures_take_the_place_of_former_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "one.md"
    path.write_text(MARKED)
    made = page.Page("here", lambda: "new\n", lambda: b"<svg/>")
    made.write()
    assert path.read_text() == MARKED.replace("old", "new")
    assert path.with_suffix(".svg").read_bytes() == b"<svg/>"
    assert made.files()[path] == path.read_bytes()


@pytest.mark.parametrize("text", ["no marks", MARKED.replace(page.END, "")])
def test_a_page_without_marks_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "one.md"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(f"{path}: expected a line")):
        page.filled(path, "here", "new")
    assert path.read_text() == text


def test_a_document_has_to_be_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    with pytest.raises(InputError, match=r"expected one one\.md in it or below, found 0"):
        page.find("one.md")
    with pytest.raises(
        InputError, match=r"expected one \*\.md with '<!-- figures: written by me -->'"
    ):
        page.Page("me", str).write()


@pytest.mark.parametrize("room", ["end_to_end", "faults", "serving", "simulator", "soak"])
def test_documents_say_what_the_kept_results_say(room: str) -> None:
    own: page.Page = import_module(f"benchmarks.{room}.page").PAGE
    expected = page.filled(own.path, own.writer, own.figures())
    assert own.path.read_bytes() == expected, f"python -m benchmarks writes {own.path} anew"


def test_pictures_are_the_same_every_time_and_have_dark_colours() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.harness import figure

    def draw(canvas: "figure.Figure") -> None:
        axes = canvas.subplots()
        for height in (1.0, 1.01, 5.0):
            axes.plot([0, 1], [0, height], label=f"to {height}")
        figure.name_lines(axes)

    made = figure.drawn(4, 3, draw)
    assert made == figure.drawn(4, 3, draw)
    text = made.decode()
    assert "prefers-color-scheme: dark" in text
    heights = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>to ', text)]
    assert len(heights) == 3
    assert heights[0] - heights[1] > figure.SMALL, "names lie on each other"


def test_each_gets_its_turn_in_every_round_and_warming_up_is_not_counted() -> None:
    calls: list[str] = []
    ticks = iter(range(1000))
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = in_turns(runs, 2, least=2, seconds=3.0, clock=lambda: float(next(ticks)))
    assert found == {"a": [[1e3] * 3] * 2, "b": [[1e3] * 3] * 2}
    assert "".join(calls) == "aaaabbbb" * 2
