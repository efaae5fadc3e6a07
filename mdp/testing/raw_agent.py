"""A peer that speaks as much of ZeroMQ's protocol as a connection needs, and then misbehaves."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def raw_agent(after: Callable[[socket.socket], None], port: int = 0) -> Iterator[str]:
    """A peer that makes ZMTP's handshake in plain text on `port` or any, and then does `after`.

    One connection at a time, which is closed in the end; yields the address.
    """
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.02)

    def serve() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            with peer, contextlib.suppress(OSError):
                peer.settimeout(30.0)
                peer.sendall(_GREETING + _READY)
                _hear(peer, len(_GREETING))
                _hear(peer, _hear(peer, 2)[1])
                after(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join()
        listener.close()


#: ZMTP 3.0 (rfc.zeromq.org/spec/23): the greeting with the mechanism NULL, and the command READY.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_METADATA = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER"
_READY = b"\x04" + bytes([6 + len(_METADATA)]) + b"\x05READY" + _METADATA


def _hear(peer: socket.socket, count: int) -> bytes:
    """The next `count` bytes; raises ConnectionError where there are no more."""
    heard = b""
    while len(heard) < count:
        data = peer.recv(count - len(heard))
        if not data:
            raise ConnectionError("no more")
        heard += data
    return heard
