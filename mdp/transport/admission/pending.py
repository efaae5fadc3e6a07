"""Who stands in an agent's door: connections that cannot have proved yet who they are. No sockets.

A handshake takes a certain number of bytes from the client. A connection that has sent fewer is a
stranger's until it has sent them, and only so many strangers may stand in the door at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

#: Strangers' connections at a time; one more, and the oldest of whoever holds most has to go. Well
#: above what comes in good faith, as whoever is sent away can come again at once.
MAX_STRANGERS = 1024


@dataclass(frozen=True, slots=True)
class Visitor:
    """An open connection: its descriptor, and the peer's address and port."""

    descriptor: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port, for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Door:
    """Keeps count of connections whose handshake cannot be over."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._hosts: dict[int, str] = {}
        #: By host, then by descriptor, oldest first.
        self._strangers: dict[str, dict[int, Visitor]] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def opened(self, visitor: Visitor, proved: Callable[[Visitor], bool]) -> Visitor | None:
        """Someone has come; returns who has to go, if the door is full of strangers.

        `proved` says whether a visitor may have proved who it is, or has left.
        """
        # A descriptor is used again only after its connection has closed.
        self.closed(visitor.descriptor)
        self._hosts[visitor.descriptor] = visitor.host
        self._strangers.setdefault(visitor.host, {})[visitor.descriptor] = visitor
        while len(self._hosts) > self._limit:
            crowd = max(self._strangers.values(), key=len)
            oldest = next(iter(crowd.values()))
            self.closed(oldest.descriptor)
            if not proved(oldest):
                return oldest
        return None

    def closed(self, descriptor: int) -> None:
        """A connection has ended, or is no stranger's any more."""
        host = self._hosts.pop(descriptor, None)
        if host is not None:
            crowd = self._strangers[host]
            del crowd[descriptor]
            if not crowd:
                del self._strangers[host]
