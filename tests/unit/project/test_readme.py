"""The README's first screen is short, and so is the whole."""

import re
from pathlib import Path

README = (Path(__file__).parents[3] / "README.md").read_text()
MOST_WORDS, MOST_LINES = 120, 120


def test_the_first_screen_is_read_at_once() -> None:
    first = README.partition("\n## ")[0]
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", first)
    assert len(shown.split()) <= MOST_WORDS
    assert "\n```\nmake demo PAGE=1\n```\n" in first


def test_all_of_it_is() -> None:
    assert len(README.splitlines()) <= MOST_LINES
