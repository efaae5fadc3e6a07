"""Every open connection of an agent, and whose key it has proved. Pure.

libzmq tells three things at three places: that a connection was accepted, with its descriptor; that
a key asks to be let in, with its host; and with each message both key and descriptor. So a key that
is let in is put down to the oldest connection from its host that may have sent a whole handshake,
and the first message corrects that.
"""

from collections.abc import Callable, Collection

from mdp.transport.admission.pending import Visitor

#: Connections of one key at a time, as far as descriptors suffice.
PER_KEY = 64
#: Descriptors that are kept for keys without any connection.
KEPT_DESCRIPTORS = 32


class Connections:
    """Open connections by descriptor, and their number by key."""

    def __init__(self) -> None:
        #: Oldest first, as are those of each key.
        self._open: dict[int, Visitor] = {}
        self._key_of: dict[int, str] = {}
        self._by_key: dict[str, dict[int, Visitor]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def all(self) -> Collection[Visitor]:
        """Every open connection, oldest first."""
        return self._open.values()

    def count(self, key: str) -> int:
        """How many connections `key` has."""
        return len(self._by_key.get(key, ()))

    def of(self, key: str) -> list[Visitor]:
        """The connections of `key`, oldest first."""
        return list(self._by_key.get(key, {}).values())

    def key_of(self, visitor: Visitor) -> str:
        """The key of a connection; empty as long as it has none."""
        return self._key_of.get(visitor.descriptor, "")

    @property
    def keys(self) -> Collection[str]:
        """Keys with at least one connection."""
        return self._by_key.keys()

    def opened(self, visitor: Visitor) -> None:
        """A connection was accepted."""
        # A descriptor is used again only after its connection has closed.
        self.closed(visitor.descriptor)
        self._open[visitor.descriptor] = visitor

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._open.pop(descriptor, None)
        self._release(descriptor)

    def let_in(self, key: str, host: str, proved: Callable[[Visitor], bool]) -> Visitor | None:
        """Put `key` down to one of the connections from `host`; returns it, None without any.

        `proved` says whether a connection has sent as much as a handshake takes.
        """
        for descriptor, visitor in self._open.items():
            if descriptor not in self._key_of and visitor.host == host and proved(visitor):
                self._assign(descriptor, key)
                return visitor
        return None

    def heard(self, descriptor: int, key: str) -> None:
        """A message with `key` came on this connection: correct what was assumed."""
        assumed = self._key_of.get(descriptor)
        if assumed == key or descriptor not in self._open:
            return
        if assumed is not None:
            # Its true owner gave this key's place to another connection from the same host.
            host = self._open[descriptor].host
            other = next((v.descriptor for v in self.of(key) if v.host == host), None)
            if other is not None:
                self._assign(other, assumed)
        self._assign(descriptor, key)

    def crowd(self) -> Visitor | None:
        """The oldest connection of the key, or of the host without one, that has most."""
        groups: dict[str, list[Visitor]] = {}
        for descriptor, visitor in self._open.items():
            groups.setdefault(self._key_of.get(descriptor, visitor.host), []).append(visitor)
        return max(groups.values(), key=len)[0] if groups else None

    def _assign(self, descriptor: int, key: str) -> None:
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
