"""Triggers as they come from outside: an id or none, from any thread, an item once."""

import itertools
import math
import threading
from collections import deque

import msgspec

from mdp.errors import InputError
from mdp.line.items import REMEMBERED, RecentIds, Trigger

#: Characters of an id, bytes of a message that has one.
MAX_ITEM = 128
MAX_PAYLOAD_BYTES = 4096
_EXPECTED = f"a trigger: expected an id of 1 to {MAX_ITEM} printable characters, as text or as "
_EXPECTED += '{"item": "17"}, or nothing for a counted one'


class DuplicateItemError(InputError):
    """An item's id came twice: it is the same item, which has its one record."""


def item_of(payload: bytes) -> str | None:
    """The id in a trigger's message; None where it has none, so that it is counted.

    Text is the id itself; a JSON object has it under `item`, as a text or a whole number. Raises
    InputError.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InputError(f"{_EXPECTED}, got {len(payload):,} bytes")
    try:
        text = payload.decode().strip()
        told = msgspec.json.decode(text).get("item") if text.startswith("{") else text
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON
        raise InputError(f"{_EXPECTED}, got {_printable(payload)}") from error
    if told is None or told == "":
        return None
    if isinstance(told, int) and not isinstance(told, bool):
        told = str(told)
    if not isinstance(told, str) or len(told) > MAX_ITEM or not told.isprintable():
        raise InputError(f"{_EXPECTED}, got {_printable(payload)}")
    return told


def _printable(payload: bytes) -> str:
    text = payload[:40].decode(errors="replace")
    return "".join(one if one.isprintable() else "?" for one in text)


class LineEndedError(InputError):
    """A trigger came after the watcher was told to end."""


class TriggerQueue:
    """Triggers until they are taken; any thread adds them."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._lock = threading.Condition()
        self._waiting: deque[Trigger] = deque()
        self._ids = RecentIds(remembered)
        self._tickets = itertools.count(1)
        self._ended = False
        #: Moments of the latest triggers.
        self._moments: deque[float] = deque(maxlen=remembered)

    def add(
        self, item: str | None, moment_s: float, time: str, heard_s: float = -math.inf
    ) -> Trigger:
        """Add a trigger.

        Raises DuplicateItemError for the id of one of the latest items, and LineEndedError after
        `end`.
        """
        with self._lock:
            if self._ended:
                raise LineEndedError("the watcher is ending: it takes no items any more")
            if item is not None and not self._ids.add(item):
                raise DuplicateItemError(f"item {item} came twice: it has one record")
            number = next(self._tickets)
            trigger = Trigger(
                moment_s=moment_s, time=time, item=item, heard_s=heard_s, ticket=number
            )
            self._waiting.append(trigger)
            self._moments.append(moment_s)
            self._lock.notify()
        return trigger

    def next_after(self, moment_s: float) -> float:
        """The moment of the first trigger after `moment_s`; infinite while there is none."""
        with self._lock:
            return min((one for one in self._moments if one > moment_s), default=math.inf)

    def take(self, timeout_s: float) -> list[Trigger]:
        """Return what has come, waiting for the first one for `timeout_s` at most."""
        with self._lock:
            if not self._waiting and timeout_s > 0:
                self._lock.wait(timeout_s)
            found = [*self._waiting]
            self._waiting.clear()
            return found

    def end(self) -> None:
        """Refuse further triggers; those that wait can still be taken."""
        with self._lock:
            self._ended = True
