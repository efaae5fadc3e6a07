"""Who connected, was refused or lost its key: one JSON object a line, bounded in rate.

{"time": "2027-01-31T12:00:00.000Z", "event": "refuse", "client": "", "key": "3f...",
 "address": "10.0.0.9", "reason": "unknown key"}
"""

import datetime
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from mdp.errors import InputError
from mdp.formats.keys import fingerprint

#: Lines a second in the long run, and at once after a quiet time; the next line says how many were
#: left out.
PER_S, AT_ONCE = 10.0, 200
#: How long lines that are still to be written are waited for at the end.
LEAVE_S = 1.0


class Rate:
    """Lets so many through, at once and in the long run. Pure."""

    def __init__(self, per_s: float = PER_S, at_once: int = AT_ONCE) -> None:
        self._every_s, self._burst_s = 1 / per_s, (at_once - 1) / per_s
        self._paid_s = float("-inf")
        self.left_out = 0

    def lets(self, now_s: float) -> bool:
        """Whether one more is let through now; counts those that are not."""
        paid_s = max(self._paid_s, now_s)
        if paid_s > now_s + self._burst_s:
            self.left_out += 1
            return False
        self._paid_s = paid_s + self._every_s
        return True


class AuditLog:
    """Appends to a file in a thread of its own, so that a slow disk stops nobody."""

    def __init__(self, path: Path, name_of: Callable[[str], str]) -> None:
        """`name_of` says what a key's file is called. Raises InputError if nothing can be written.

        The file is opened for each line, so that it may be moved away at any time.
        """
        self._path = path
        self._name_of = name_of
        self._rate = Rate()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            self._append(b"")
        except OSError as error:
            raise InputError(f"--audit {path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    def tell(self, event: str, key: str, address: str, reason: str) -> None:
        """Write one line soon. One thread at a time; never waits."""
        if self._lines.qsize() > AT_ONCE:
            self._rate.left_out += 1
            return
        if not self._rate.lets(time.monotonic()):
            return
        now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, str | int] = {
            "time": now.replace("+00:00", "Z"),
            "event": event,
            "client": self._name_of(key),
            "key": fingerprint(key) if key else "",
            "address": address,
            "reason": reason,
        }
        if self._rate.left_out:
            line["left_out"] = self._rate.left_out
            self._rate.left_out = 0
        self._lines.put(msgspec.json.encode(line) + b"\n")

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
            except OSError:
                # A full disk costs lines, never the agent.
                continue

    def _append(self, line: bytes) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if line:
                os.write(handle, line)
        finally:
            os.close(handle)

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
