"""Events of an agent as lines for people or JSON for programs; a slow reader never delays it."""

import datetime
import logging
import os
import select
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

#: Where an agent in another program reports; `mdp-agent` prints what it reports.
LOG = logging.getLogger("mdp.agent")
#: A writable pipe takes as much at once (POSIX's least PIPE_BUF is 512).
_AT_ONCE_BYTES = select.PIPE_BUF


def for_events_alone(stream: IO[str] | None, stderr: int = 2) -> IO[str] | None:
    """A copy of `stream`, which itself then leads to standard error.

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
    copy = os.dup(own)
    os.dup2(stderr, own)
    return os.fdopen(copy, "w")


def time_of_day() -> str:
    """The time in UTC, as `2027-01-31T12:00:00.000Z`."""
    now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="milliseconds")
    return now.replace("+00:00", "Z")


def leads_to_journal(stream: IO[str] | None) -> bool:
    """Tell whether `stream` is what systemd connected to its journal (`JOURNAL_STREAM`)."""
    try:
        status = os.fstat(-1 if stream is None else stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class Events:
    """Writes lines to a stream, unbuffered: a line that cannot be written at once is lost.

    A reader that has gone, one that does not read, or a full disk costs lines, never the agent.
    """

    def __init__(
        self,
        stream: IO[str] | None,
        device: str,
        address: str = "",
        *,
        json: bool = False,
        now: Callable[[], str] = time_of_day,
    ) -> None:
        """None for a stream that was closed before this process began.

        `now` gives the time that lines begin with, unless they go to systemd's journal, which has
        its own.
        """
        #: The agent's, once it listens.
        self.address = address
        #: Further fields of READY.
        self.ready: Callable[[], Mapping[str, str | int]] = dict
        self._stream = stream
        self._device = device
        self._json = json
        self._now = now
        self._is_journal = leads_to_journal(stream)

    def listen(self, address: str) -> None:
        """Write that the agent listens on `address`."""
        self.address = address
        self.emit("LISTENING" if self._json else f"listening on {address}")

    def emit(self, event: str) -> None:
        """Write one event."""
        fields = self.ready() if event == "READY" else {}
        if self._json:
            content = {"time": self._now(), "event": event, "device": self._device}
            line = msgspec.json.encode({**content, "address": self.address, **fields}) + b"\n"
        else:
            told = ", ".join(f"{name} {value}" for name, value in fields.items())
            text = f"mdp-agent {self._device}: {event}{': ' if told else ''}{told}\n"
            line = (text if self._is_journal else f"{self._now()} {text}").encode()
        if self._stream is None or len(line) > _AT_ONCE_BYTES:
            return
        try:
            descriptor = self._stream.fileno()
            _, writable, _ = select.select([], [descriptor], [], 0)
            if writable:
                os.write(descriptor, line)
        except (OSError, ValueError):
            # No reader, no room, no file, or a descriptor beyond what `select` takes.
            return
