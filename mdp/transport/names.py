"""Addresses of host names, looked up in threads.

libzmq looks names up in its only I/O thread, which a name server without an answer blocks for ten
seconds each time. So it gets addresses only.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Concurrent lookups. One without an answer cannot be cancelled.
MOST_LOOKUPS = 8
#: Seconds from the end of a lookup until the next one of the same name.
AGAIN_S = 1.0

Lookup = Callable[[str], str]


@dataclass(slots=True)
class _Name:
    #: The last address that was found.
    address: str | None = None
    #: The result of the running lookup: empty before it ends, then an address, or None without one.
    found: list[str | None] = field(default_factory=list)
    looking: bool = False
    next_s: float = 0.0


def address_of(host: str) -> str:
    """The address of `host`, IPv4 where it has one; raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


class Names:
    """The last known address of each name; for one thread."""

    def __init__(
        self, lookup: Lookup = address_of, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lookup, self._clock = lookup, clock
        self._names: dict[str, _Name] = {}

    def resolve(self, endpoint: str) -> str | None:
        """`endpoint`, as `tcp://HOST:PORT`, with an address for its host's name; never waits.

        Starts a lookup if one is due. None before an address is known; a failed lookup keeps the
        last one.
        """
        if has_address(endpoint):
            return endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        name = self._names.setdefault(host, _Name())
        if name.looking and name.found:
            name.address = name.found.pop() or name.address
            name.looking, name.next_s = False, self._clock() + AGAIN_S
        if not name.looking and self._clock() >= name.next_s:
            self._begin(host, name)
        if name.address is None:
            return None
        address = f"[{name.address}]" if ":" in name.address else name.address
        return f"tcp://{address}:{port}"

    def _begin(self, host: str, name: _Name) -> None:
        if sum(other.looking for other in self._names.values()) >= MOST_LOOKUPS:
            return
        name.looking, found, lookup = True, name.found, self._lookup

        def look_up() -> None:
            try:
                found.append(lookup(host))
            except (OSError, UnicodeError):  # UnicodeError: a label of more than 63 characters
                found.append(None)

        threading.Thread(target=look_up, name="name", daemon=True).start()


def has_address(endpoint: str) -> bool:
    """Tell whether `endpoint`, as `tcp://HOST:PORT`, has an address and not a name."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if host.startswith("["):
        return True
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
