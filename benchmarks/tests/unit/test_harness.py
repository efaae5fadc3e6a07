"""Tables, pages and turns that all benchmarks share."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import PAGES, page_of
from benchmarks.harness import page
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.errors import InputError

MARKED = f"before\n{page.begin('here')}\n\nold\n\n{page.END}\nafter\n"


def test_the_best_cells_are_bold_and_empty_ones_stay_empty() -> None:
    rows = [{"ms": 1200.0, "who": "a"}, {"ms": 7.04, "who": "b"}, {"ms": None, "who": "|"}]

    def cell(row: dict[str, float | None]) -> str:
        return "" if row["ms"] is None else f"{row['ms']:,.1f} ± 3"

    assert table(rows, ("", "{who}"), ("ms", cell, min), title="Times").splitlines() == [
        "### Times", "", "|  | ms |", "|---|---|", "| a | 1,200.0 ± 3 |", "| b | **7.0 ± 3** |",
        r"| \| |  |",
    ]  # fmt: skip


def test_figures_replace_former_ones_between_the_marks_of_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    made = page.Page("here", lambda: "new\n", lambda: b"<svg/>")
    with pytest.raises(InputError, match="expected one"):
        made.write()
    path = tmp_path / "one.md"
    path.write_text(MARKED.replace(page.END, ""))
    with pytest.raises(InputError, match=re.escape(f"{path}: expected a line")):
        made.write()
    path.write_text(MARKED)
    made.write()
    assert path.read_text() == MARKED.replace("old", "new")
    assert path.with_suffix(".svg").read_bytes() == b"<svg/>"


@pytest.mark.parametrize("name", sorted({*PAGES} - {"planning"}))
def test_documents_hold_the_figures_of_the_kept_results(name: str) -> None:
    pytest.importorskip("torch")
    own = page_of(name)
    expected = page.fill(own.path, own.writer, own.figures())
    assert own.path.read_bytes() == expected, f"python -m benchmarks writes {own.path} again"


def test_pictures_are_reproducible_and_have_dark_colours() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.harness import figure

    def draw(canvas: "figure.Figure") -> None:
        canvas.subplots().plot([0, 1], [0, 1])

    made = figure.draw_svg(4, 3, draw)
    assert made == figure.draw_svg(4, 3, draw)
    assert b"prefers-color-scheme: dark" in made


def test_runs_take_turns_and_warming_up_is_not_counted() -> None:
    calls: list[str] = []
    ticks = iter(range(1000))
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = in_turns(runs, 2, least=2, seconds=3.0, clock=lambda: float(next(ticks)))
    assert found == {"a": [[1e3] * 3] * 2, "b": [[1e3] * 3] * 2}
    assert "".join(calls) == "aaaabbbb" * 2
