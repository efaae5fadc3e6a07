"""Events of an agent as lines for people or JSON for programs; a slow reader never delays it."""

import logging
import os
import select
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


class Events:
    """Writes lines to a stream, unbuffered: a line that cannot be written at once is lost.

    A reader that has gone, one that does not read, or a full disk costs lines, never the agent.
    """

    def __init__(
        self, stream: IO[str] | None, device: str, address: str = "", *, json: bool = False
    ) -> None:
        """None for a stream that was closed before this process began."""
        #: The agent's, once it listens.
        self.address = address
        self._stream = stream
        self._device = device
        self._json = json

    def emit(self, event: str) -> None:
        """Write one event."""
        line = f"mdp-agent {self._device}: {event}\n".encode()
        if self._json:
            content = {"event": event, "device": self._device, "address": self.address}
            line = msgspec.json.encode(content) + b"\n"
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
