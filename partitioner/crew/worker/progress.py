"""Present work of trainers: told to the coordinator once a second, shown there in one table."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from partitioner.crew.messages import AnyAction, AnyEvent, Rank, State, TrainerControl
from partitioner.run.progress import LINE_EVERY_S, Advance, Progress

#: Seconds between two looks at what trainers tell.
LOOK_S = 1.0
COLUMNS = ("trainer", "job", "done", "pictures/s", "now", "MB sent")
#: Columns of a terminal that has no room for these of the table.
NARROW, _WIDE = 64, ("pictures/s", "MB sent")


class WorkAccount:
    """The work of one trainer and its costs; written by its main thread, read by another.

    Sent are the bytes of means, and those that `sent` counts, of rows and files: all that others
    get.
    """

    def __init__(
        self, sent: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._job, self._said, self._waits = "", "", False
        self._share = self._pictures = self._since_s = 0.0
        self._waited_s = 0.0
        #: Bytes of synchronisers that came before, and up to the last report.
        self._earlier_bytes = self._reported_bytes = 0
        self._sent = sent
        self._mean_bytes: Callable[[], int] = lambda: 0

    def begin(self, job: str) -> None:
        """Count for a job from here on."""
        self._job, self._said, self._share, self._pictures = job, "", 0.0, 0.0
        self._since_s, self._waited_s = self._clock(), 0.0

    def end(self) -> tuple[float, int]:
        """The job has ended; returns its seconds of waiting, and bytes since the last such end."""
        self._job = ""
        before, self._reported_bytes = self._reported_bytes, self.bytes_sent
        return self._waited_s, self._reported_bytes - before

    def count(self, pictures: float) -> None:
        """Add pictures that this trainer has trained or answered."""
        self._pictures += pictures

    def follow(self, mean_bytes: Callable[[], int]) -> None:
        """Add the bytes that a synchroniser counts, until the next one is followed."""
        self._earlier_bytes += self._mean_bytes()
        self._mean_bytes = mean_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in all jobs."""
        return self._earlier_bytes + self._mean_bytes() + self._sent()

    def step(self, share: float, said: str) -> None:
        """The step in hand is done by so much."""
        self._share, self._said = share, said

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of a block as waited."""
        started_s, self._waits = self._clock(), True
        try:
            yield
        finally:
            self._waits = False
            self._waited_s += self._clock() - started_s

    def state(self) -> State:
        """State as others see it."""
        seconds = self._clock() - self._since_s
        return State(
            job=self._job,
            share=self._share,
            pictures=self._pictures,
            pictures_per_s=self._pictures / seconds if self._pictures and seconds else 0.0,
            said=self._said,
            waits=self._waits,
            sent_bytes=self.bytes_sent,
        )


class ControlAround:
    """A trainer's end of the control that hands everything on to another one."""

    def __init__(self, control: TrainerControl) -> None:
        self._control = control

    @property
    def rank(self) -> Rank:
        """The own rank."""
        return self._control.rank

    def report(self, event: AnyEvent) -> None:
        """Append to the log."""
        self._control.report(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action for this trainer, None when there is none within `timeout_s`."""
        return self._control.poll(timeout_s)

    def claim(self, counter: str) -> int:
        """The next number, from 0, of a counter that all trainers share."""
        return self._control.claim(counter)


class Patient(ControlAround):
    """A trainer's end of the control whose waits are counted."""

    def __init__(self, control: TrainerControl, account: WorkAccount) -> None:
        super().__init__(control)
        self._account = account

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action for this trainer, None when there is none within `timeout_s`."""
        if not timeout_s:
            return super().poll()
        with self._account.waiting():
            return super().poll(timeout_s)


class Told(Progress):
    """Progress that is also sent to the coordinator. Without `shown`, only notes are displayed."""

    def __init__(self, account: WorkAccount, note: Callable[[str], None], shown: Progress | None):
        super().__init__()
        self._account, self._note, self._shown = account, note, shown

    def note(self, text: str) -> None:
        """Print one line."""
        self._note(text)

    def count(self, pictures: int) -> None:
        """Own pictures."""
        self._account.count(pictures)

    @contextmanager
    def task(self, what: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """Follow a task."""
        self._account.step(done / max(total, 1), what)

        def advance(more: int, said: str) -> None:
            nonlocal done
            done += more
            self._account.step(done / max(total, 1), said or what)

        if self._shown is None:
            yield advance
            return
        with self._shown.task(what, total, done=done) as show:

            def both(more: int, said: str) -> None:
                advance(more, said)
                show(more, said)

            yield both


def rows(states: Mapping[str, State | None]) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each trainer, by name; None is one that is not there."""
    found = list[tuple[str, ...]]()
    for name, state in states.items():
        if state is None:
            found.append((name, "", "", "", "not there", ""))
            continue
        now = "waits for others" if state.waits else state.said
        done = f"{state.share:.0%}" if state.job and state.share else ""
        rate = f"{state.pictures_per_s:,.0f}" if state.job and state.pictures_per_s else ""
        sent = f"{state.sent_bytes / 1e6:,.1f}"
        found.append((name, state.job, done, rate, now if state.job else "waits for a job", sent))
    return found


def lines(table: Sequence[tuple[str, ...]]) -> list[str]:
    """The same, a line each, for where there is no terminal."""
    said = []
    for name, job, done, rate, now, sent in table:
        parts = [f"{job} {done}".strip(), f"{rate} pictures/s" if rate else "", now]
        parts.append(f"{sent} MB sent" if sent else "")
        said.append(f"{name}: {', '.join(part for part in parts if part)}")
    return said


@contextmanager
def board(
    states: Callable[[], Mapping[str, State]], names: Sequence[str], to: Progress
) -> Iterator[Callable[[str], None]]:
    """Show what the trainers `names` do, until the end of the block; yields how to print a line.

    A table on a terminal, elsewhere now and then a line for each trainer that changed.
    `states` are of the trainers that are there, by name.
    """
    ending = threading.Event()
    live: Live | None = None
    if to.stream.isatty():
        live = Live(console=Console(file=to.stream), auto_refresh=False, transient=True)
    spoken_s, spoken = time.monotonic(), list[str]()

    def look() -> None:
        nonlocal spoken_s, spoken
        found = states()
        table = rows({name: found.get(name) for name in names})
        if live is not None:
            live.update(_draw(table, live.console.width), refresh=True)
        elif time.monotonic() - spoken_s >= LINE_EVERY_S:
            said = lines(table)
            for line in said:
                if line not in spoken:
                    to.note(line)
            spoken_s, spoken = time.monotonic(), said

    def serve() -> None:
        while not ending.wait(LOOK_S):
            look()

    thread = threading.Thread(target=serve, name="crew-board", daemon=True)

    def note(text: str) -> None:
        if live is None:
            to.note(text)
        else:
            live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    with ExitStack() as shown:
        if live is not None:
            shown.enter_context(to.display())
            live.start()
        thread.start()
        try:
            yield note
        finally:
            ending.set()
            thread.join()
            if live is not None:
                live.stop()


def _draw(table: Sequence[tuple[str, ...]], width: int) -> Table:
    """A line for each trainer; what it does now is cut off where `width` is too small."""
    shown = [i for i, column in enumerate(COLUMNS) if width >= NARROW or column not in _WIDE]
    drawn = Table(box=None)
    for column in (COLUMNS[i] for i in shown):
        side: Literal["left", "right"] = "left" if column in ("trainer", "job", "now") else "right"
        drawn.add_column(column, justify=side, no_wrap=column != "now")
    for row in table:
        drawn.add_row(*(Text(row[i], no_wrap=True, overflow="ellipsis") for i in shown))
    return drawn
