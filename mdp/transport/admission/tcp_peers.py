"""Who is at the other end of a connection that libzmq holds: the operating system knows."""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mdp.transport.admission.pending import Visitor

#: Bytes that a client has sent at least when its handshake is over: the greeting and READY, or the
#: greeting, HELLO and INITIATE.
PLAIN_HANDSHAKE_BYTES = 64 + 2
CURVE_HANDSHAKE_BYTES = 64 + 202 + 259
#: How often connections that end are looked at.
LINGER_LOOK_S = 0.005
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
    # A duplicate stays what it is, whatever becomes of the original meanwhile. With no descriptor
    # left, the original has to do: connections have to be told apart then as well.
    borrowed = False
    try:
        duplicate = os.dup(number)
    except OSError as error:
        borrowed, duplicate = error.errno == errno.EMFILE, number
        if not borrowed:
            yield None
            return
    try:
        peer = socket.socket(fileno=duplicate)
    except OSError:
        # Not a socket any more.
        if not borrowed:
            os.close(duplicate)
        yield None
        return
    try:
        yield peer
    finally:
        if borrowed:
            peer.detach()
        else:
            peer.close()


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


def unacknowledged_bytes(peer: socket.socket) -> int:
    """Bytes that were written to a TCP connection and that its other end's kernel lacks."""
    count = bytearray(4)
    try:
        fcntl.ioctl(peer, termios.TIOCOUTQ, count)
    except OSError:
        # The connection has ended: nothing more can arrive.
        return 0
    return int.from_bytes(count, sys.byteorder)


def is_delivered(visitor: Visitor) -> bool:
    """Whether all that was written to a connection has reached the other end's kernel."""
    with connection_of(visitor) as peer:
        return peer is None or unacknowledged_bytes(peer) == 0


def duplicate_of(visitor: Visitor) -> socket.socket | None:
    """The visitor's connection as a socket of its own, which keeps it open; None if it ended."""
    with connection_of(visitor) as peer, contextlib.suppress(OSError):
        return None if peer is None else peer.dup()
    return None


def linger(peers: Sequence[socket.socket], until_s: float) -> None:
    """Close duplicates of connections once all that was written to them has arrived.

    Unread bytes would make the kernel reset the connection and drop what it still has to send.
    """
    left = list(peers)
    while left:
        unfinished = []
        for peer in left:
            with contextlib.suppress(OSError):
                while peer.recv(65536, socket.MSG_DONTWAIT):
                    pass
            if unacknowledged_bytes(peer) and time.monotonic() < until_s:
                unfinished.append(peer)
            else:
                peer.close()
        left = unfinished
        if left:
            time.sleep(LINGER_LOOK_S)
