"""Connections whose handshake has not finished, at most so many at a time. No sockets.

A handshake takes a certain number of bytes from the client; a connection that has sent fewer is
pending.
"""

from collections.abc import Callable
from dataclasses import dataclass

#: Pending connections at a time; beyond, the oldest of the host with most is closed. Well above
#: what honest clients need, and a client that is closed reconnects at once.
MAX_PENDING = 1024


@dataclass(frozen=True, slots=True)
class TcpPeer:
    """An open connection: its descriptor, and the peer's address and port."""

    descriptor: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port, for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PendingConnections:
    """Counts pending connections by host."""

    def __init__(self, limit: int = MAX_PENDING) -> None:
        self._limit = limit
        self._hosts: dict[int, str] = {}
        #: By host, then by descriptor, oldest first.
        self._pending: dict[str, dict[int, TcpPeer]] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def on_open(self, peer: TcpPeer, proved: Callable[[TcpPeer], bool]) -> TcpPeer | None:
        """Add a connection; returns the one to close, if there are too many.

        `proved` is whether a connection may have finished its handshake, or is closed.
        """
        # A descriptor is used again only after its connection has closed.
        self.on_close(peer.descriptor)
        self._hosts[peer.descriptor] = peer.host
        self._pending.setdefault(peer.host, {})[peer.descriptor] = peer
        while len(self._hosts) > self._limit:
            crowd = max(self._pending.values(), key=len)
            oldest = next(iter(crowd.values()))
            self.on_close(oldest.descriptor)
            if not proved(oldest):
                return oldest
        return None

    def on_close(self, descriptor: int) -> None:
        """A connection has ended, or is no longer pending."""
        host = self._hosts.pop(descriptor, None)
        if host is not None:
            crowd = self._pending[host]
            del crowd[descriptor]
            if not crowd:
                del self._pending[host]
