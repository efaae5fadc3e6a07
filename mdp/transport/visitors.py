"""Who is at the other end of a connection that libzmq holds: the operating system knows."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mdp.transport.door import Visitor

#: Bytes that a client has sent at least when its handshake is over: the greeting and READY, or the
#: greeting, HELLO and INITIATE.
PLAIN_HANDSHAKE_BYTES = 64 + 2
CURVE_HANDSHAKE_BYTES = 64 + 202 + 259
#: Place of tcpi_bytes_received in struct tcp_info (linux/tcp.h).
_BYTES_RECEIVED = struct.Struct("128xQ")


def visitor_at(number: int) -> Visitor | None:
    """Who is at the other end of descriptor `number`, which libzmq may close at any time."""
    with _duplicate(number) as peer:
        name = _peer_name(peer)
    return Visitor(number, *name) if name else None


@contextmanager
def connection_of(visitor: Visitor) -> Iterator[socket.socket | None]:
    """The visitor's connection, if its descriptor is still that one."""
    with _duplicate(visitor.descriptor) as peer:
        yield peer if _peer_name(peer) == (visitor.host, visitor.port) else None


@contextmanager
def _duplicate(number: int) -> Iterator[socket.socket | None]:
    # A duplicate stays what it is, whatever becomes of the original meanwhile.
    try:
        duplicate = os.dup(number)
    except OSError:
        yield None
        return
    try:
        peer = socket.socket(fileno=duplicate)
    except OSError:
        # Not a socket any more.
        os.close(duplicate)
        yield None
        return
    with peer:
        yield peer


def _peer_name(peer: socket.socket | None) -> tuple[str, int] | None:
    try:
        name: Any = peer.getpeername() if peer is not None else None
    except OSError:
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None


def bytes_received(peer: socket.socket) -> int:
    """Bytes that have come on a TCP connection, read or not."""
    try:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        received: int = _BYTES_RECEIVED.unpack(info)[0]
    except (OSError, struct.error):
        # Where the kernel does not say (before Linux 4.1), nobody is taken for a stranger.
        return CURVE_HANDSHAKE_BYTES
    return received


def hang_up(visitor: Visitor) -> bool:
    """End a visitor's connection; libzmq then finds it closed by its peer."""
    with connection_of(visitor) as peer, contextlib.suppress(OSError):
        if peer is not None:
            peer.shutdown(socket.SHUT_RDWR)
            return True
    return False
