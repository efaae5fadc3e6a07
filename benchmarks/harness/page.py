"""Documents with figures between two marks, written from kept results."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError
from mdp.files import write_bytes

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end of the figures -->"


def begin(writer: str) -> str:
    """The mark before the figures of `writer`."""
    return f"<!-- figures: written by {writer} -->"


def find(name: str, holding: str = "") -> Path:
    """The only document of this name in docs/ that holds this text; raises InputError."""
    found = [page for page in DOCS.rglob(name) if holding in page.read_text(encoding="utf-8")]
    if len(found) != 1:
        what = f"{name} with {holding!r}" if holding else name
        raise InputError(f"{DOCS}: expected one {what} in it or below, found {len(found)}")
    return found[0]


def fill(page: Path, writer: str, figures: str) -> bytes:
    """The page's content with `figures` between its two marks; raises InputError without these."""
    mark = begin(writer)
    before, found, rest = page.read_text(encoding="utf-8").partition(mark)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise InputError(f"{page}: expected a line {mark!r} and a line {END!r} after it")
    return f"{before}{mark}\n\n{figures.strip()}\n\n{END}{after}".encode()


@dataclass(frozen=True, slots=True)
class Page:
    """A document's figures, and a picture beside it, as functions of kept results."""

    #: The mark names it; the document is the one with that mark.
    writer: str
    figures: Callable[[], str]
    #: The content of an SVG file with the document's name, and how that file's name ends.
    picture: Callable[[], bytes] | None = None
    ending: str = ".svg"

    def files(self) -> dict[Path, bytes]:
        """Content of the document and of the picture, if any; raises InputError."""
        files = {self.path: fill(self.path, self.writer, self.figures())}
        if self.picture:
            files[self.path.with_name(f"{self.path.stem}{self.ending}")] = self.picture()
        return files

    @property
    def path(self) -> Path:
        """The document; raises InputError."""
        return find("*.md", begin(self.writer))

    def write(self) -> None:
        for path, content in self.files().items():
            write_bytes(path, content)
            print(f"wrote {os.path.relpath(path)}")
