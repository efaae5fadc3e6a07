"""A log and mailboxes of bytes over torch's TCPStore, which the desk holds.

Each is a queue of the store: a message arrives whole or not at all, in one order, whoever is killed
meanwhile. The store speaks plain TCP.
"""

import time

# Public names that torch's own types do not list.
from torch.distributed import PrefixStore, QueueEmptyError, TCPStore  # type: ignore[attr-defined]

from partitioner.crew.exchange.store import reaching

#: Seconds between two looks at a queue; the store's own waiting ends in a warning at each timeout.
_LOOK_S = 0.01


class _End:
    """One connection, and the queues of the store that belong to `log`."""

    def __init__(self, store: TCPStore, log: str) -> None:
        self._tcp, self._queues = store, PrefixStore(log, store)

    def _pop(self, queue: str, timeout_s: float) -> bytes | None:
        until_s = time.monotonic() + timeout_s
        with reaching(self._tcp):
            while True:
                try:
                    message: bytes = self._queues.queue_pop(queue, False)
                    return message
                except QueueEmptyError:
                    if time.monotonic() >= until_s:
                        return None
                time.sleep(_LOOK_S)

    def _push(self, queue: str, message: bytes) -> None:
        with reaching(self._tcp):
            self._queues.queue_push(queue, message)


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
        self._push(f"closed/{work}", b"")


class StoreTrainer(_End):
    """A trainer's end: appends to the log, reads its mailbox in order."""

    def __init__(self, store: TCPStore, log: str, rank: int) -> None:
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
        """Whether this pass is over."""
        with reaching(self._tcp):
            return self._queues.queue_len(f"closed/{work}") > 0
