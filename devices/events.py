"""Tells people, or a program, what an agent does; whoever listens cannot hold it up."""

import logging
import os
import queue
import select
import stat
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

import msgspec

#: Where an agent in another program reports; `mdp-agent` prints what it reports.
LOG = logging.getLogger("mdp.agent")
#: A pipe that can be written takes as much at once (POSIX's least PIPE_BUF is 512).
_AT_ONCE_BYTES = select.PIPE_BUF
#: Lines that may wait to be written, and how long those are waited for at the end.
MOST_WAITING, LEAVE_S = 1000, 1.0


def quiet_libraries(stderr: int = 2) -> None:
    """Have no warning or log line of a library block its thread, however little stderr is read.

    Python's warnings, which a picture can cause by the hundred, are not shown. What native code
    writes to a pipe or terminal without room is lost: it is opened anew for that, as its other
    users may rely on writes that wait.
    """
    warnings.simplefilter("ignore")
    logging.lastResort = logging.NullHandler()
    try:
        mode = os.fstat(stderr).st_mode
        if stat.S_ISSOCK(mode):
            os.set_blocking(stderr, False)
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            anew = os.open(f"/proc/self/fd/{stderr}", flags)
            os.dup2(anew, stderr)
            os.close(anew)
    except OSError:
        # Closed, without a reader, or not to be opened: it stays as it is.
        return


def for_events_alone(stream: IO[str] | None, stderr: int = 2) -> IO[str] | None:
    """A stream to where `stream` leads; the latter then leads to standard error.

    Drivers of accelerators print to standard output, between the events.
    """
    if stream is None:
        return None
    try:
        own = stream.fileno()
        os.fstat(stderr)
    except OSError:
        # No file, or no standard error, whose number a copy of `stream` would take.
        return stream
    taken = os.dup(own)
    os.dup2(stderr, own)
    return os.fdopen(taken, "w")


class Events:
    """Lines on a stream, past its buffer: what cannot be written at once is left out.

    A reader that has gone, one that does not read, or a full disk costs lines, never the agent.
    """

    def __init__(self, stream: IO[str] | None, device: str, address: str, *, json: bool) -> None:
        """None for a stream that was closed before this process began."""
        self._descriptor = None if stream is None else stream.fileno()
        self._device = device
        self._address = address
        self._json = json

    def tell(self, event: str) -> None:
        """Write one event."""
        self._write(self._line(event))

    def _line(self, event: str) -> bytes:
        if not self._json:
            return f"mdp-agent {self._device}: {event}\n".encode()
        content = {"event": event, "device": self._device, "address": self._address}
        return msgspec.json.encode(content) + b"\n"

    def _write(self, line: bytes) -> None:
        if self._descriptor is None or len(line) > _AT_ONCE_BYTES:
            return
        try:
            _, writable, _ = select.select([], [self._descriptor], [], 0)
            if writable:
                os.write(self._descriptor, line)
        except (OSError, ValueError):
            # Nobody there, no room, or a descriptor beyond what `select` takes.
            return


class Reporter:
    """Passes lines on in a thread of its own: a regular file on a network that hangs can always be
    written, says `select`, and then holds up whoever writes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="reporter", daemon=True)
        self._thread.start()

    def tell(self, line: str) -> None:
        """Say `line` soon; never waits. Any thread."""
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put(line)

    def _pass_on(self) -> None:
        while (line := self._lines.get()) is not None:
            self._say(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lines.put(None)
        self._thread.join(LEAVE_S)
