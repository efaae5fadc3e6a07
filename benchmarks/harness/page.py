"""Documents whose figures are written by the benchmark that measured them."""

from pathlib import Path

from mdp.errors import InputError
from mdp.files import write_bytes

END = "<!-- end of the figures -->"


def begin(writer: str) -> str:
    """The line after which the figures of `writer` stand."""
    return f"<!-- figures: written by {writer} -->"


def write_figures(page: Path, writer: str, figures: str) -> None:
    """Put `figures` between the page's two marks; raises InputError where these are missing."""
    mark = begin(writer)
    before, found, rest = page.read_text(encoding="utf-8").partition(mark)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise InputError(f"{page}: expected a line {mark!r} and a line {END!r} after it")
    write_bytes(page, f"{before}{mark}\n\n{figures.strip()}\n\n{END}{after}".encode())
