"""Who stands in an agent's door: connections that cannot have proved yet who they are. No sockets.

A handshake takes a certain number of bytes from the client. A connection that has sent fewer is a
stranger's until it has sent them, and only so many strangers may stand in the door at a time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

#: Strangers' connections at a time; one more, and the oldest of whoever holds most has to go.
MAX_STRANGERS = 128


@dataclass(frozen=True, slots=True)
class Visitor:
    """An open connection: its descriptor, and the peer's address and port."""

    descriptor: int
    host: str
    port: int


class Door:
    """Keeps count of connections whose handshake cannot be over."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        #: By descriptor, oldest first.
        self._strangers: dict[int, Visitor] = {}

    def __len__(self) -> int:
        return len(self._strangers)

    def opened(self, visitor: Visitor, proved: Callable[[Visitor], bool]) -> Visitor | None:
        """Someone has come; returns who has to go, if the door is full of strangers.

        `proved` says whether a visitor may have proved who it is, or has left.
        """
        # A descriptor is used again only after its connection has closed.
        self._strangers.pop(visitor.descriptor, None)
        self._strangers[visitor.descriptor] = visitor
        if len(self._strangers) <= self._limit:
            return None
        self._strangers = {d: v for d, v in self._strangers.items() if not proved(v)}
        if len(self._strangers) <= self._limit:
            return None
        crowd = Counter(stranger.host for stranger in self._strangers.values())
        host, _ = crowd.most_common(1)[0]
        oldest = next(stranger for stranger in self._strangers.values() if stranger.host == host)
        del self._strangers[oldest.descriptor]
        return oldest

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._strangers.pop(descriptor, None)
