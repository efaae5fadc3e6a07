"""The table of all trainers at the desk."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from partitioner.crew.machine.events import Rank
from partitioner.crew.progress import COLUMNS, State, lines, rows
from partitioner.run.progress import LINE_EVERY_S, Progress

#: Seconds between two looks at what trainers tell.
LOOK_S = 1.0
#: Columns of a terminal that has no room for these of the table.
NARROW, _WIDE = 64, ("pictures/s", "MB sent")


@contextmanager
def board(
    store: TCPStore, names: Sequence[str], living: Callable[[], Collection[Rank]], to: Progress
) -> Iterator[Callable[[str], None]]:
    """Show what the trainers `names` do, until the end of the block; yields how to print a line.

    A table on a terminal, elsewhere a line for each trainer that changed, at most every 10 s.
    `store` is a connection of its own.
    """
    ending = threading.Event()
    live: Live | None = None
    if to.stream.isatty():
        live = Live(console=Console(file=to.stream), auto_refresh=False, transient=True)
    spoken_s, spoken = time.monotonic(), list[str]()

    def look() -> None:
        nonlocal spoken_s, spoken
        table = rows({name: _state(store, name, living()) for name in names})
        if live is not None:
            live.update(_drawn(table, live.console.width), refresh=True)
        elif time.monotonic() - spoken_s >= LINE_EVERY_S:
            found = lines(table)
            for line in found:
                if line not in spoken:
                    to.note(line)
            spoken_s, spoken = time.monotonic(), found

    def serve() -> None:
        with suppress(DistError):  # of a desk that ends
            while not ending.wait(LOOK_S):
                look()

    thread = threading.Thread(target=serve, name="crew-board", daemon=True)

    def note(text: str) -> None:
        if live is None:
            to.note(text)
        else:
            live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    if live is not None:
        live.start()
    thread.start()
    try:
        yield note
    finally:
        ending.set()
        thread.join()
        if live is not None:
            live.stop()


def _state(store: TCPStore, name: str, living: Collection[Rank]) -> State | None:
    """What a trainer told last; None where it is not there."""
    if not store.check([f"rank/{name}"]):
        return None
    rank = int(store.get(f"rank/{name}"))
    key = f"progress/{rank}"
    if rank not in living or not store.check([key]):
        return None
    try:
        return msgspec.json.decode(store.get(key), type=State)
    except msgspec.DecodeError:
        return None


def _drawn(table: Sequence[tuple[str, ...]], width: int) -> Table:
    """A line for each trainer; what it does now is cut off where `width` is too small."""
    shown = [i for i, column in enumerate(COLUMNS) if width >= NARROW or column not in _WIDE]
    drawn = Table(box=None)
    for column in (COLUMNS[i] for i in shown):
        side: Literal["left", "right"] = "left" if column in ("trainer", "job", "now") else "right"
        drawn.add_column(column, justify=side, no_wrap=column != "now")
    for row in table:
        drawn.add_row(*(Text(row[i], no_wrap=True, overflow="ellipsis") for i in shown))
    return drawn
