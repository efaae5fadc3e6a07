"""An agent's state for whoever asks on its own machine: `mdp-agent health`.

The agent listens on an abstract UNIX socket named for its port, which needs no file, key or right,
and exists as long as the agent does; containers have their own, as they have their own ports. Who
connects reads one line, `STATE DEVICE`. Nothing is read of them.

This module imports little, and no package beside the standard library: a manager asks every few
seconds, also on a slow board.
"""

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Self

#: The port of the default `--bind`.
PORT = 7500
#: Seconds until the one who asks gives up, and without a sign of life until an agent hangs: its
#: loop gives one each second.
PATIENCE_S, SILENT_S = 2.0, 10.0
HANGS = "HANGS"
#: No state has so many letters, no device so long a name.
_MOST_BYTES = 200
#: Exit code of an agent that does not answer requests.
NOT_READY = 3


class LifeSigns:
    """The last sign of life of an agent's loop, and what it says of the agent. Any thread."""

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._seen_s = clock()

    def give(self) -> None:
        """The agent is alive now."""
        self._seen_s = self._clock()

    def line(self, state: str) -> str:
        """The line about an agent in `state`."""
        hangs = self._clock() - self._seen_s > SILENT_S
        return f"{HANGS if hangs else state} {self._device}"


class HealthSocket:
    """Says a line to each that connects, in a thread of its own, until `close`."""

    def __init__(self, port: int, tell: Callable[[], str]) -> None:
        """Raises OSError where another process has the name of `port`."""
        self._tell = tell
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_name(port))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the name is free again."""
        # Ends `accept`, which closing alone does not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if _is_over(error):
                    return
                # No descriptor is free, or the other side has left.
                time.sleep(0.1)
                continue
            with connection, suppress(OSError):
                connection.setblocking(False)
                connection.send(f"{self._tell()}\n".encode())


def serve_health(
    address: str, tell: Callable[[], str], report: Callable[[str], None], stack: ExitStack
) -> None:
    """Say `tell()` to who asks for the agent at `address`, until `stack` is closed.

    An agent whose name another process has taken serves all the same, and reports it.
    """
    try:
        stack.enter_context(HealthSocket(int(address.rpartition(":")[2]), tell))
    except OSError as error:
        report(f"`mdp-agent health` is not answered: {error.strerror}")


def ask(port: int, patience_s: float = PATIENCE_S) -> str:
    """The answer of the agent at `port` of this machine; raises OSError, also TimeoutError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(patience_s)
        asker.connect(_name(port))
        with asker.makefile("rb") as said:
            return said.readline(_MOST_BYTES).decode("ascii", "replace").strip()


def verdict(said: str, *, live: bool) -> bool:
    """Tell whether an agent that `said` so is READY, or, with `live`, in any state but hanging."""
    state = said.partition(" ")[0]
    return bool(state) and (state != HANGS if live else state == "READY")


def plain_words(words: Sequence[str]) -> tuple[int, bool] | None:
    """Port and `--live` of the command's words; None for those that its parser has to judge."""
    port, live, rest = PORT, False, list(words)
    while rest:
        word = rest.pop(0)
        if word == "--live":
            live = True
        elif word == "--port" and rest and rest[0].isascii() and rest[0].isdigit():
            port = int(rest.pop(0)[:6])
        else:
            return None
    return (port, live) if 0 < port < 2**16 else None


def report_health(port: int, *, live: bool) -> int:
    """Print how the agent at `port` is; its exit code."""
    try:
        said = ask(port)
    except (TimeoutError, BlockingIOError):
        # So many ask in vain that no more are queued.
        said = f"an agent is on port {port}, and says nothing within {PATIENCE_S:g} s"
    except ConnectionResetError:
        said = f"an agent was on port {port}, and has ended"
    except ConnectionRefusedError:
        said = f"no agent is on port {port} of this machine"
    except OSError as error:
        said = f"port {port}: {error.strerror}"
    else:
        if verdict(said, live=live):
            print(said)
            return 0
        said = said or f"an agent is on port {port}, and ends"
    print(f"mdp-agent: {said}", file=sys.stderr)
    return NOT_READY


def _name(port: int) -> str:
    return f"\0mdp-agent:{port}"


def _is_over(error: OSError) -> bool:
    """Tell whether the listening socket was shut down or closed."""
    return error.errno in (errno.EINVAL, errno.EBADF)
