"""Length-prefixed frames over plain TCP: the least that a careful user of sockets would write."""

import socket
import struct
import time

_LENGTH = struct.Struct(">I")
_TRY_S, _PAUSE_S = 20.0, 0.05

#: First byte of a request: how its content is encoded. Second byte: what follows between stages.
RAW, JPEG, FP32, FP16 = b"r", b"j", b"f", b"h"


def send(to: socket.socket, *parts: bytes | memoryview) -> None:
    data = b"".join(parts)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive(source: socket.socket) -> bytes:
    """One frame; raises ConnectionError where the other side has closed."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return bytes(_exactly(source, length))


def _exactly(source: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = source.recv_into(view[at:])
        if not got:
            raise ConnectionError("the other side has closed")
        at += got
    return data


def connect(address: str, port: int) -> socket.socket:
    """A connection without delays; a listener that is not there yet is waited for."""
    until_s = time.monotonic() + _TRY_S
    while True:
        try:
            return tuned(socket.create_connection((address, port), timeout=_TRY_S))
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_PAUSE_S)


def tuned(connection: socket.socket) -> socket.socket:
    """`connection`, sending small frames at once and waiting as long as it takes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    return connection


def listen(address: str, port: int) -> socket.socket:
    listener = socket.create_server((address, port))
    listener.settimeout(None)
    return listener
