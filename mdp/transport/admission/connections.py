"""The open connections of an agent, and their keys. Pure.

libzmq reports an accepted connection with its descriptor, a ZAP request with key and host, and each
message with key and descriptor. So an allowed key is assigned to the oldest connection from its
host that may have sent a whole handshake, and the first message corrects the assignment.
"""

from collections.abc import Callable, Collection

from mdp.transport.admission.pending import TcpPeer

#: Connections of one key at a time, as far as descriptors suffice.
PER_KEY = 64
#: Descriptors that are reserved for keys without any connection.
KEPT_DESCRIPTORS = 32


class Connections:
    """Open connections by descriptor, and their number by key."""

    def __init__(self) -> None:
        #: Oldest first, as are those of each key.
        self._open: dict[int, TcpPeer] = {}
        self._key_of: dict[int, str] = {}
        self._by_key: dict[str, dict[int, TcpPeer]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def all(self) -> Collection[TcpPeer]:
        """Every open connection, oldest first."""
        return self._open.values()

    def count(self, key: str) -> int:
        """The number of connections that `key` has."""
        return len(self._by_key.get(key, ()))

    def of(self, key: str) -> list[TcpPeer]:
        """The connections of `key`, oldest first."""
        return list(self._by_key.get(key, {}).values())

    def key_of(self, peer: TcpPeer) -> str:
        """The key of a connection; empty before it has one."""
        return self._key_of.get(peer.descriptor, "")

    def address_of(self, descriptor: int) -> str:
        """Address and port of a connection; empty if it has ended."""
        peer = self._open.get(descriptor)
        return "" if peer is None else peer.address

    @property
    def keys(self) -> Collection[str]:
        """Keys with at least one connection."""
        return self._by_key.keys()

    def on_open(self, peer: TcpPeer) -> None:
        """A connection was accepted."""
        # A descriptor is used again only after its connection has closed.
        self.on_close(peer.descriptor)
        self._open[peer.descriptor] = peer

    def on_close(self, descriptor: int) -> None:
        """A connection has ended."""
        self._open.pop(descriptor, None)
        self._release(descriptor)

    def assign(self, key: str, host: str, proved: Callable[[TcpPeer], bool]) -> TcpPeer | None:
        """Assign `key` to one of the connections from `host`; returns it, None without any.

        `proved` is whether a connection has sent enough for a handshake.
        """
        for descriptor, peer in self._open.items():
            if descriptor not in self._key_of and peer.host == host and proved(peer):
                self._put(descriptor, key)
                return peer
        return None

    def correct(self, descriptor: int, key: str) -> None:
        """Correct the assignment: a message with `key` came on this connection."""
        assumed = self._key_of.get(descriptor)
        if assumed == key or descriptor not in self._open:
            return
        if assumed is not None:
            # The assumed key is that of another connection from the same host.
            host = self._open[descriptor].host
            other = next((v.descriptor for v in self.of(key) if v.host == host), None)
            if other is not None:
                self._put(other, assumed)
        self._put(descriptor, key)

    def oldest_of_most(self) -> TcpPeer | None:
        """The oldest connection of the key, or of the host without one, that has most."""
        groups: dict[str, list[TcpPeer]] = {}
        for descriptor, peer in self._open.items():
            groups.setdefault(self._key_of.get(descriptor, peer.host), []).append(peer)
        return max(groups.values(), key=len)[0] if groups else None

    def _put(self, descriptor: int, key: str) -> None:
        self._release(descriptor)
        self._key_of[descriptor] = key
        self._by_key.setdefault(key, {})[descriptor] = self._open[descriptor]

    def _release(self, descriptor: int) -> None:
        key = self._key_of.pop(descriptor, None)
        if key is not None:
            group = self._by_key[key]
            del group[descriptor]
            if not group:
                del self._by_key[key]
