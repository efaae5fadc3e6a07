"""TCP peers of the connections that libzmq holds, as the operating system reports them."""

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

from mdp.transport.admission.pending import TcpPeer

#: Bytes that a client has sent at least when its handshake is over: the greeting and READY, or the
#: greeting, HELLO and INITIATE.
PLAIN_HANDSHAKE_BYTES = 64 + 2
CURVE_HANDSHAKE_BYTES = 64 + 202 + 259
#: How often ending connections are checked.
LINGER_CHECK_S = 0.005
#: Place of tcpi_bytes_received in struct tcp_info (linux/tcp.h).
_BYTES_RECEIVED = struct.Struct("128xQ")


def peer_of(number: int) -> TcpPeer | None:
    """The peer of descriptor `number`, which libzmq may close at any time."""
    with _duplicate(number) as peer:
        name = _peer_name(peer)
    return TcpPeer(number, *name) if name else None


@contextmanager
def socket_of(peer: TcpPeer) -> Iterator[socket.socket | None]:
    """The peer's connection, if its descriptor still belongs to it."""
    with _duplicate(peer.descriptor) as duplicate:
        yield duplicate if _peer_name(duplicate) == (peer.host, peer.port) else None


@contextmanager
def _duplicate(number: int) -> Iterator[socket.socket | None]:
    # A duplicate stays valid when the original is closed. With no descriptor left, the original is
    # used.
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
        # Unknown before Linux 4.1: no connection counts as pending.
        return CURVE_HANDSHAKE_BYTES
    return received


def hang_up(peer: TcpPeer) -> bool:
    """End a peer's connection; libzmq then finds it closed by the peer."""
    with socket_of(peer) as connection, contextlib.suppress(OSError):
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def unacknowledged_bytes(peer: socket.socket) -> int:
    """Bytes written to a TCP connection that the other end's kernel has not acknowledged."""
    count = bytearray(4)
    try:
        fcntl.ioctl(peer, termios.TIOCOUTQ, count)
    except OSError:
        # The connection has ended: nothing more can arrive.
        return 0
    return int.from_bytes(count, sys.byteorder)


def is_delivered(peer: TcpPeer) -> bool:
    """Tell whether all that was written to a connection has reached the other end's kernel."""
    with socket_of(peer) as connection:
        return connection is None or unacknowledged_bytes(connection) == 0


def duplicate_socket(peer: TcpPeer) -> socket.socket | None:
    """A duplicate of the peer's connection, which keeps it open; None if it has ended."""
    with socket_of(peer) as connection, contextlib.suppress(OSError):
        return None if connection is None else connection.dup()
    return None


def linger(peers: Sequence[socket.socket], until_s: float) -> None:
    """Close duplicates of connections once all that was written to them has arrived.

    Unread bytes are read first: with them the kernel resets a closed connection and drops replies.
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
            time.sleep(LINGER_CHECK_S)
