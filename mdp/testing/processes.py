"""Processes that are read and written line by line; every wait for one of them is bounded."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mdp.closing import Closing

#: Seconds, long enough for a busy machine; nothing waits so long unless it fails.
PATIENCE_S = 60.0
_LAST_LINES = 3
#: Characters of a log that are read.
MOST_OF_LOG = 2**20


def until(reached: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `reached()`; raises AssertionError naming `what` after `patience_s` seconds."""
    until_s = time.monotonic() + patience_s
    while not reached():
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.005)


class Lines:
    """Lines that arrive at a file descriptor, such as the reading end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[str] = deque()
        self._unread = b""

    def next(self, timeout_s: float | None) -> str | None:
        """The next line without its end; None where there are no more.

        None as a timeout waits without an end. Raises TimeoutError.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        readable = select.poll()
        readable.register(self._descriptor, select.POLLIN)
        while not self._waiting:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not readable.poll(None if left_s is None else left_s * 1e3):
                raise TimeoutError
            data = os.read(self._descriptor, 65536)
            if not data:
                return None
            *lines, self._unread = (self._unread + data).split(b"\n")
            self._waiting += [line.decode() for line in lines]
        return self._waiting.popleft()


class LineProcess(Closing):
    """A process whose standard output is read, and whose standard input is written, line by line.

    Every wait ends after `patience_s` seconds with an AssertionError that quotes the process's log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        log: Path | None = None,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
        own_session: bool = False,
    ) -> None:
        """Start `command`, called `name` in messages.

        `log` takes its standard error, which is this process's own without it; `environment` is
        added to this process's. With `own_session`, Ctrl-C does not reach it, and `close` ends its
        children too.
        """
        self.name = name
        self.patience_s = patience_s
        self._log = log
        self._own_session = own_session
        # Unbuffered output hides what buffering does when the reader goes away.
        known = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        errors = None if log is None else log.open("ab")
        try:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=known | dict(environment),
                start_new_session=own_session,
            )
        finally:
            if errors is not None:
                errors.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._lines = Lines(self._stdout.fileno())

    @property
    def stderr(self) -> str:
        """The text that it has written to `log`, at most `MOST_OF_LOG`; empty without one."""
        if self._log is None:
            return ""
        # A device as a log, /dev/full say, has no end.
        with self._log.open(errors="replace") as log:
            return log.read(MOST_OF_LOG)

    def line(self, expected: str = "a line", timeout_s: float | None = None) -> str:
        """Its next line without the line's end; `expected` says in messages what it should be."""
        timeout_s = self.patience_s if timeout_s is None else timeout_s
        try:
            line = self._lines.next(timeout_s)
        except TimeoutError:
            raise AssertionError(
                f"{self.name}: expected {expected} within {timeout_s:.3g} s: {self._quote()}"
            ) from None
        if line is None:
            code = self.process.wait(self.patience_s)
            raise AssertionError(
                f"{self.name}: expected {expected}, ended with {code}: {self._quote()}"
            )
        return line

    def line_with(self, part: str) -> str:
        """Its next line that has `part` in it; those before it are dropped."""
        while part not in (line := self.line(part)):
            pass
        return line

    def rest(self) -> Iterator[str]:
        """Its lines until it ends, however long that takes."""
        while (line := self._lines.next(None)) is not None:
            yield line

    def _quote(self) -> str:
        """The part of this process's output that a message quotes."""
        return " / ".join(self.stderr.splitlines()[-_LAST_LINES:])

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        # That it has ended is found, with its exit code, where its next line is read.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        """Write a line to its standard input, and return the next that it writes."""
        self.say(line)
        return self.line(f"an answer to {line!r}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and proof that the process is dead."""
        self.signal(signal.SIGKILL)
        if self.process.wait(self.patience_s) != -signal.SIGKILL:
            raise AssertionError(f"{self.name} had ended before with {self.process.returncode}")
        self.close()

    def stop(self) -> None:
        """SIGSTOP, and proof that the process stands still; SIGCONT lets it go on."""
        self.signal(signal.SIGSTOP)
        until(lambda: self.kernel_state() == "T", f"{self.name} stands still", self.patience_s)

    def kernel_state(self) -> str:
        """The letter that the kernel shows: R runs, S sleeps, T stopped, Z ended."""
        content = Path(f"/proc/{self.process.pid}/stat").read_text()
        return content.rpartition(")")[2].split()[0]

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(self.patience_s)

    def finish(self) -> int:
        """Close its standard input and wait for its end; returns the exit code."""
        self._stdin.close()
        code = self.process.wait(self.patience_s)
        self.close()
        return code

    def close(self) -> None:
        """End the process, if it has not ended, and let go of its pipes."""
        if self._own_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.poll() is None:
            self.process.kill()
        self.process.wait(self.patience_s)
        self._stdin.close()
        self._stdout.close()
