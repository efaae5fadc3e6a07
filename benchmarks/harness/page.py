"""Documents whose figures are written by the benchmark that measured them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError
from mdp.files import write_bytes

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end of the figures -->"


def find(name: str) -> Path:
    """The document of this name in docs/ or below; raises InputError unless there is one."""
    found = [*DOCS.rglob(name)]
    if len(found) != 1:
        raise InputError(f"{DOCS}: expected one {name} in it or below, found {len(found)}")
    return found[0]


def link(name: str, page: str) -> str:
    """The way to document `name` from the document `page`."""
    return Path(os.path.relpath(find(name), find(page).parent)).as_posix()


def begin(writer: str) -> str:
    """The line after which the figures of `writer` stand."""
    return f"<!-- figures: written by {writer} -->"


def filled(page: Path, writer: str, figures: str) -> bytes:
    """The page with `figures` between its two marks; raises InputError where these are missing."""
    mark = begin(writer)
    before, found, rest = page.read_text(encoding="utf-8").partition(mark)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise InputError(f"{page}: expected a line {mark!r} and a line {END!r} after it")
    return f"{before}{mark}\n\n{figures.strip()}\n\n{END}{after}".encode()


def write_figures(page: Path, writer: str, figures: str) -> None:
    """Put `figures` between the page's two marks; raises InputError where these are missing."""
    write_bytes(page, filled(page, writer, figures))


@dataclass(frozen=True, slots=True)
class Page:
    """What is made of kept results: a document's figures, and a picture beside the document."""

    name: str
    writer: str
    figures: Callable[[], str]
    #: The content of an SVG file with the document's name.
    picture: Callable[[], bytes] | None = None

    def files(self) -> dict[Path, bytes]:
        """What the document, and the picture if there is one, have to be; raises InputError."""
        page = find(self.name)
        made = {page: filled(page, self.writer, self.figures())}
        return made | ({page.with_suffix(".svg"): self.picture()} if self.picture else {})

    def write(self) -> None:
        for path, content in self.files().items():
            write_bytes(path, content)
            print(f"wrote {os.path.relpath(path)}")
