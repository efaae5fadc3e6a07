"""Lines on standard error that nobody may read: they never hold up the thread that causes them."""

import io
import logging
import os
import queue
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from mdp.closing import Closing

#: How many items may wait to be written, and how long `BackgroundWriter` waits for them at the end.
MOST_WAITING, LEAVE_S = 1000, 1.0

T = TypeVar("T")


def quiet_libraries(stderr: int = 2) -> None:
    """Keep warnings and log lines from blocking their thread on a full stderr.

    For commands that run until they are stopped. Python's warnings, which a picture can cause by
    the hundred, are not shown. Lines of native code and of `print` are lost while a pipe or
    terminal is full: it is reopened without blocking, as its other users may rely on blocking
    writes.
    """
    warnings.simplefilter("ignore")
    logging.lastResort = logging.NullHandler()
    try:
        mode = os.fstat(stderr).st_mode
        if stat.S_ISSOCK(mode):
            os.set_blocking(stderr, False)
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            reopened = os.open(f"/proc/self/fd/{stderr}", flags)
            os.dup2(reopened, stderr)
            os.close(reopened)
        else:
            return
    except OSError:
        # Closed, without a reader, or not to be opened: it stays as it is.
        return
    # None where it was closed, without a descriptor where another program has replaced it.
    with suppress(AttributeError, OSError):
        if sys.stderr.fileno() == stderr:
            sys.stderr = io.TextIOWrapper(
                io.BufferedWriter(_Lossy(stderr, "w", closefd=False)),
                encoding=sys.stderr.encoding,
                errors="backslashreplace",
                line_buffering=True,
            )


class _Lossy(io.FileIO):
    """A file without blocking that drops what it cannot write at once, instead of failing."""

    def write(self, content: Any) -> int:
        """Write as much as there is room for; returns the length of all of it."""
        with suppress(OSError):
            super().write(content)
        return memoryview(content).nbytes


class BackgroundWriter(Generic[T], Closing):
    """Calls `write` in a thread: `select` reports a file on a hanging network as writable."""

    def __init__(
        self, write: Callable[[T], None], name: str, most_waiting: int = MOST_WAITING
    ) -> None:
        self._write = write
        self._most_waiting = most_waiting
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of items that wait."""
        return self._items.qsize()

    @property
    def is_full(self) -> bool:
        """Tell whether `put` drops what it is given."""
        return self.waiting >= self._most_waiting

    def put(self, item: T) -> None:
        """Write `item` soon, or drop it; never waits. Any thread."""
        if not self.is_full:
            self._items.put(item)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._write(item)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._items.put(None)
        self._thread.join(LEAVE_S)


class ErrorLog(logging.Handler):
    """A program's unforeseen errors, from the log of its libraries: at most one in `EVERY_S`.

    A stranger may be able to cause any number of them.
    """

    #: Seconds from one error to the next that is written with its traceback.
    EVERY_S = 10.0

    def __init__(self, put: Callable[[str], None], clock: Callable[[], float]) -> None:
        """Hand each text to `put`, which must not wait; `clock` gives seconds."""
        super().__init__(logging.ERROR)
        self._put, self._clock = put, clock
        #: By kind: the time from which the next is written, and how many were left out since.
        self._next_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`, or count it."""
        # asyncio tells of each connection that it cannot accept, with its traceback.
        kind = "connection" if "socket.accept()" in str(record.msg) else "error"
        now_s = self._clock()
        if now_s < self._next_s.get(kind, now_s):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + self.EVERY_S
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more since the last one)" if left_out else ""
        if kind == "connection":
            error = record.exc_info[1] if record.exc_info else None
            self._put(f"connections cannot be accepted: {getattr(error, 'strerror', error)}{more}")
        else:
            self._put(self.format(record) + more)


@contextmanager
def errors_written() -> Iterator[None]:
    """Write unforeseen errors to stderr, by a thread of its own, as long as the block lasts."""

    def write(text: str) -> None:
        # On a full disk it is lost.
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    with BackgroundWriter(write, "errors") as writer:
        log = ErrorLog(writer.put, time.monotonic)
        logging.getLogger().addHandler(log)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(log)
