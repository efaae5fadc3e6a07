"""A log and mailboxes of bytes over torch's TCPStore, which the desk holds.

Each is a queue of the store: a message arrives whole or not at all, in one order, whoever is killed
meanwhile. The store speaks plain TCP, and signs.
"""

import time

from partitioner.crew.exchange.store import SignedStore, reaching

#: Seconds between two looks at a queue; the store's own waiting ends in a warning at each timeout.
_LOOK_S = 0.01


class _End:
    """One connection, and the queues of the store that belong to `log`."""

    def __init__(self, store: SignedStore, log: str) -> None:
        self._store, self._log = store, log

    def _pop(self, queue: str, timeout_s: float) -> bytes | None:
        until_s = time.monotonic() + timeout_s
        with reaching(self._store):
            while True:
                message = self._store.pop(f"{self._log}/{queue}")
                if message is not None or time.monotonic() >= until_s:
                    return message
                time.sleep(_LOOK_S)

    def _push(self, queue: str, message: bytes) -> None:
        with reaching(self._store):
            self._store.push(f"{self._log}/{queue}", message)

    def _closed(self, work: str) -> str:
        return f"{self._log}/closed/{work}"


class StoreDesk(_End):
    """The desk's end: reads the log in order, posts to mailboxes."""

    def read(self, timeout_s: float) -> bytes | None:
        """The log's next message, None when there is none within `timeout_s`."""
        return self._pop("log", timeout_s)

    def post(self, rank: int, message: bytes) -> None:
        """Put a message into a trainer's mailbox."""
        self._push(f"mailbox/{rank}", message)

    def close(self, work: str) -> None:
        """Let every trainer, also one that comes later, know that this pass is over."""
        with reaching(self._store):
            self._store.set(self._closed(work), b"")


class StoreTrainer(_End):
    """A trainer's end: appends to the log, reads its mailbox in order."""

    def __init__(self, store: SignedStore, log: str, rank: int) -> None:
        super().__init__(store, log)
        self.rank = rank
        self.sent_bytes = 0

    def append(self, message: bytes) -> None:
        """Append to the log."""
        self._push("log", message)
        self.sent_bytes += len(message)

    def next(self, timeout_s: float) -> bytes | None:
        """The mailbox's next message, None when there is none within `timeout_s`."""
        return self._pop(f"mailbox/{self.rank}", timeout_s)

    def closed(self, work: str) -> bool:
        """Tell whether this pass is over."""
        with reaching(self._store):
            closed = self._closed(work)
            return self._store.check([closed]) and self._store.get(closed) == b""
