"""The audit log: who connects, is refused, revoked, pushes, records; JSON lines, limited in rate.

{"time": "2027-01-31T12:00:00.000Z", "event": "refuse", "client": "", "key": "3f...",
 "address": "10.0.0.9", "reason": "unknown key"}
"""

import datetime
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.formats.keys import fingerprint
from mdp.logs import BackgroundWriter

#: Lines a second in the long run, and in a burst; the next line has the number of those left out.
PER_S, AT_ONCE = 10.0, 200


class Rate:
    """A token bucket. Pure."""

    def __init__(self, per_s: float = PER_S, at_once: int = AT_ONCE) -> None:
        self._every_s, self._burst_s = 1 / per_s, (at_once - 1) / per_s
        self._paid_s = float("-inf")
        self.left_out = 0

    def allows(self, now_s: float) -> bool:
        """Take a token; False, counted in `left_out`, without one."""
        paid_s = max(self._paid_s, now_s)
        if paid_s > now_s + self._burst_s:
            self.left_out += 1
            return False
        self._paid_s = paid_s + self._every_s
        return True


class AuditLog(BackgroundWriter[bytes]):
    """Appends to a file in a thread, so that a slow disk delays nothing."""

    def __init__(self, path: Path, name_of: Callable[[str], str]) -> None:
        """`name_of` gives the name of a key's file. Raises InputError if nothing can be written.

        The file is opened for each line, so that it may be moved away at any time.
        """
        self._path = path
        self._name_of = name_of
        self._rate = Rate()
        self._lock = threading.Lock()
        try:
            self._append(b"")
        except OSError as error:
            raise InputError(f"--audit {path}: {error.strerror or error}") from error
        super().__init__(self._append_if_possible, "audit", AT_ONCE)

    def record(self, event: str, key: str, address: str, reason: str) -> None:
        """Write one line soon; never waits. Any thread."""
        with self._lock:
            if self.is_full:
                self._rate.left_out += 1
                return
            if not self._rate.allows(time.monotonic()):
                return
            left_out, self._rate.left_out = self._rate.left_out, 0
        now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, str | int] = {
            "time": now.replace("+00:00", "Z"),
            "event": event,
            "client": self._name_of(key),
            "key": fingerprint(key) if key else "",
            "address": address,
            "reason": reason,
        }
        if left_out:
            line["left_out"] = left_out
        self.put(msgspec.json.encode(line) + b"\n")

    def _append_if_possible(self, line: bytes) -> None:
        try:
            self._append(line)
        except OSError:
            # A full disk costs lines, never the agent.
            return

    def _append(self, line: bytes) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if line:
                os.write(handle, line)
        finally:
            os.close(handle)
