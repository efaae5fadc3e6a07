"""Progress with time left, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

#: Seconds between two lines of one task where there is no terminal.
LINE_EVERY_S = 10.0

#: Called with the number of further units that are done, and a text about them; it is empty where
#: another process did them.
Advance = Callable[[int, str], None]


class Progress:
    """Reports long steps: `note` prints a line, `task` shows progress."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock

    @property
    def stream(self) -> TextIO:
        """Stream that progress is written to."""
        return self._stream

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=self._stream, flush=True)

    @contextmanager
    def task(self, what: str, total: int, *, done: int = 0, pictures: int = 0) -> Iterator[Advance]:
        """Show a task of `total` units, of which `done` are already complete.

        pictures: how many all units train or answer, where they do.
        """
        follow = self._bar if self._stream.isatty() else self._lines
        with follow(what, total, done) as advance:
            yield advance

    @contextmanager
    def _bar(self, what: str, total: int, done: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Bars(*columns, console=Console(file=self._stream)) as bars:
            bar = bars.add_task(what, total=total, completed=done, said="")
            yield lambda more, said: bars.update(bar, advance=more, said=said)

    @contextmanager
    def _lines(self, what: str, total: int, done: int) -> Iterator[Advance]:
        started_s = spoken_s = self._clock()
        first = done

        def advance(more: int, said: str) -> None:
            nonlocal done, spoken_s
            done += more
            now_s = self._clock()
            if done < total and now_s - spoken_s >= LINE_EVERY_S:
                spoken_s = now_s
                left_s = (now_s - started_s) / max(done - first, 1) * (total - done)
                self.note(f"{what}: {done / total:.0%}, about {left_s:.0f} s left  {said}".rstrip())

        yield advance
        self.note(f"{what}: done in {self._clock() - started_s:.1f} s")
