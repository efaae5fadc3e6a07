"""The audit log: who connects, is refused, revoked, pushes, records; JSON lines, limited in rate.

{"time": "2027-01-31T12:00:00.000Z", "event": "refuse", "client": "", "key": "3f...",
 "address": "10.0.0.9", "reason": "unknown key"}
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from devices.events import time_of_day
from mdp.errors import InputError
from mdp.formats.keys import fingerprint
from mdp.logs import BackgroundWriter

#: Lines of one kind a second in the long run, and in a burst; the next one has the number of those
#: left out.
PER_S, AT_ONCE = 10.0, 200
#: Of refusals of one key, or of one address without a key, for one reason: the first is written at
#: once, the others of so many seconds are counted in one more line.
COUNTED_S = 60.0
#: Refusals that are counted at a time; more end the oldest count early.
MOST_COUNTED = 256
#: Lines that may wait for the disk, and how many of them may be of what strangers and other clients
#: can cause at will.
MOST_WAITING, MOST_NOISE = 1000, 500
_NOISE = ("connect", "refuse")

#: The fields of a line but its time.
Line = dict[str, str | int]


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


@dataclass(slots=True)
class _Refusals:
    """Refusals of one key or address for one reason."""

    line: Line
    since_s: float
    #: Further ones.
    count: int = 0


class AuditLines:
    """Decides which lines are written. Pure.

    No event hides another: each kind has a token bucket of its own, once for clients whose key has
    a name, and once for all others.
    """

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[str, bool], Rate] = defaultdict(Rate)
        #: The oldest first.
        self._refusals: dict[tuple[str, str], _Refusals] = {}

    def take_in(self, line: Line, now_s: float, *, crowded: bool = False) -> list[Line]:
        """The lines to write when `line` happens; while it is `crowded`, only rare ones."""
        lines = self.end_due(now_s, crowded=crowded)
        if line["event"] == "refuse":
            who = str(line["key"]) or host_of(str(line["address"])), str(line["reason"])
            if who in self._refusals:
                self._refusals[who].count += 1
                return lines
            if len(self._refusals) >= MOST_COUNTED:
                lines += self._end(next(iter(self._refusals)), now_s, crowded)
            self._refusals[who] = _Refusals(line, now_s)
        return lines + self._limit(line, now_s, crowded)

    def end_due(self, now_s: float, *, crowded: bool = False) -> list[Line]:
        """The counts of refusals that began `COUNTED_S` ago."""
        lines: list[Line] = []
        for who, refusals in list(self._refusals.items()):
            if now_s < refusals.since_s + COUNTED_S:
                break
            lines += self._end(who, now_s, crowded)
        return lines

    def _end(self, who: tuple[str, str], now_s: float, crowded: bool) -> list[Line]:
        refusals = self._refusals.pop(who)
        if not refusals.count:
            return []
        return self._limit(refusals.line | {"count": refusals.count}, now_s, crowded)

    def _limit(self, line: Line, now_s: float, crowded: bool) -> list[Line]:
        """`line` with the number of those left out before it; none where it is left out too."""
        rate = self._rates[str(line["event"]), bool(line["client"])]
        if crowded and line["event"] in _NOISE:
            rate.left_out += 1
            return []
        if not rate.allows(now_s):
            return []
        left_out, rate.left_out = rate.left_out, 0
        return [line | {"left_out": left_out} if left_out else line]


class AuditLog(BackgroundWriter[bytes]):
    """Appends to a file in a thread, so that a slow disk delays nothing."""

    def __init__(
        self, path: Path, name_of: Callable[[str], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name_of` gives the name of a key's file. Raises InputError if nothing can be written.

        The file is opened for each line, so that it may be moved away at any time.
        """
        self._path = path
        self._name_of = name_of
        self._clock = clock
        self._lines = AuditLines()
        self._lock = threading.Lock()
        try:
            self._append(b"")
        except OSError as error:
            raise InputError(f"--audit {path}: {error.strerror or error}") from error
        super().__init__(self._append_if_possible, "audit", MOST_WAITING)

    def record(self, event: str, key: str, address: str, reason: str) -> None:
        """Write one line soon; never waits. Any thread."""
        line: Line = {
            "event": event,
            "client": self._name_of(key),
            "key": fingerprint(key) if key else "",
            "address": address,
            "reason": reason,
        }
        with self._lock:
            crowded = self.waiting >= MOST_NOISE
            lines = self._lines.take_in(line, self._clock(), crowded=crowded)
        self._put_all(lines)

    def tend(self, *, over: bool = False) -> None:
        """Write the counts that are due, all if `over`; to be called every second or so."""
        with self._lock:
            lines = self._lines.end_due(float("inf") if over else self._clock())
        self._put_all(lines)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self.tend(over=True)
        super().close()

    def _put_all(self, lines: list[Line]) -> None:
        now = time_of_day()
        for line in lines:
            self.put(msgspec.json.encode({"time": now} | line) + b"\n")

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


def host_of(address: str) -> str:
    """`address` without its port: `10.0.0.9:7500` and `[::1]:7500` have one, `::1` has none."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
