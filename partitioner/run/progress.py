"""Progress with time left, on stderr: a bar on a terminal, a line now and then elsewhere.

While something is under way, a thread looks whether a line is due: nothing is silent for longer
than ten seconds, however long one unit takes.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

#: Seconds of silence after which a line is due.
LINE_EVERY_S = 8.5
#: Seconds between two looks at whether one is.
LOOK_EVERY_S = 0.25

#: Called with the number of further units that are done, and a text about them; it is empty where
#: another process did them.
Advance = Callable[[int, str], None]


@dataclass(slots=True, eq=False)
class Activity:
    """A task or step under way; a step has no units."""

    what: str
    started_s: float
    total: int = 0
    done: int = 0
    #: Units that were complete at the start.
    before: int = 0
    #: About the latest units.
    said: str = ""

    def line(self, now_s: float) -> str:
        """Share and time left once a unit is done, until then how long it has taken."""
        took_s = now_s - self.started_s
        if self.done <= self.before:
            return f"{self.what}: {took_s:.0f} s so far"
        left_s = took_s / (self.done - self.before) * (self.total - self.done)
        share = self.done / self.total
        return f"{self.what}: {share:.0%}, about {left_s:.0f} s left  {self.said}".rstrip()


class Progress:
    """Reports long steps: `note` prints a line, `task` shows progress, `step` ends silence."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        #: Guards what follows, of which the thread that looks reads.
        self._lock = threading.RLock()
        self._works: list[Activity] = []
        self._spoken_s = 0.0
        #: Whether a line was printed since the thread has looked.
        self._noted = False
        #: How many bars or tables are on the terminal, into which no line may go.
        self._displays = 0

    @property
    def stream(self) -> TextIO:
        """Stream that progress is written to."""
        return self._stream

    def note(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            self._noted = True
            print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Print lines about a step without units while nothing else is printed."""
        with self._under_way(Activity(what, self._clock())):
            yield

    @contextmanager
    def task(self, what: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """Show a task of `total` units, of which `done` are already complete."""
        follow = self._bar if self._stream.isatty() else self._lines
        with follow(what, total, done) as advance:
            yield advance

    def count(self, pictures: int) -> None:
        """Take in that this process has trained or answered so many pictures; shows nothing."""

    @contextmanager
    def display(self) -> Iterator[None]:
        """Leave the stream to a bar or table that is redrawn by itself."""
        with self._lock:
            self._displays += 1
        try:
            yield
        finally:
            with self._lock:
                self._displays -= 1
                self._noted = True

    def look(self) -> None:
        """Print a line about what began last, if none came for `LINE_EVERY_S`."""
        now_s = self._clock()
        with self._lock:
            if self._noted or self._displays:
                self._spoken_s, self._noted = now_s, False
            elif self._works:
                self._speak(self._works[-1], now_s)

    def _speak(self, work: Activity, now_s: float) -> None:
        with self._lock:
            if now_s - self._spoken_s >= LINE_EVERY_S:
                self.note(work.line(now_s))
                self._spoken_s, self._noted = now_s, False

    @contextmanager
    def _under_way(self, work: Activity) -> Iterator[None]:
        """Follow `work`, beside the first with a thread that ends with it."""
        with self._lock:
            first = not self._works
            self._works.append(work)
            if first:
                self._spoken_s, self._noted = work.started_s, False
        ending = threading.Event()

        def look_until_the_end() -> None:
            while not ending.wait(LOOK_EVERY_S):
                self.look()

        thread = threading.Thread(target=look_until_the_end, name="progress", daemon=True)
        if first:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            if first:
                thread.join()
            with self._lock:
                self._works.remove(work)

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
        with self.display(), Bars(*columns, console=Console(file=self._stream)) as bars:
            bar = bars.add_task(what, total=total, completed=done, said="")
            yield lambda more, said: bars.update(bar, advance=more, said=said)

    @contextmanager
    def _lines(self, what: str, total: int, done: int) -> Iterator[Advance]:
        work = Activity(what, self._clock(), total, done, done)

        def advance(more: int, said: str) -> None:
            work.done += more
            work.said = said
            now_s = self._clock()
            if work.done < total:
                self._speak(work, now_s)

        with self._under_way(work):
            yield advance
        self.note(f"{what}: done in {self._clock() - work.started_s:.1f} s")
