"""A proxy for HTTPS on this machine that counts what comes through it."""

import select
import socket
import socketserver
import threading
from contextlib import suppress

from mdp.closing import Closing

_PIECE_BYTES = 1 << 16


class FetchedBytes(Closing):
    """Bytes that programs fetch which take `url` for the proxy of https addresses."""

    def __init__(self) -> None:
        self._server = _Server(("127.0.0.1", 0), _Tunnel)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The value of `https_proxy`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def count(self) -> int:
        """Bytes that came so far, those of TLS and of indexes among them."""
        return self._server.count

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self.count = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes of one tunnel."""
        with self._lock:
            self.count += count


class _Tunnel(socketserver.StreamRequestHandler):
    """One `CONNECT host:port`, and what goes both ways after it."""

    server: _Server
    # What a client sends after its head belongs to the tunnel.
    rbufsize = 0

    def handle(self) -> None:
        asked = self.rfile.readline(_PIECE_BYTES).split()
        while self.rfile.readline(_PIECE_BYTES).strip():
            pass
        if len(asked) < 2 or asked[0] != b"CONNECT":
            self.wfile.write(b"HTTP/1.1 405 only CONNECT\r\n\r\n")
            return
        host, _, port = asked[1].decode().rpartition(":")
        # Whoever hangs up first ends it.
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port))) as far:
            self.wfile.write(b"HTTP/1.1 200 connected\r\n\r\n")
            self._pass_on(far)

    def _pass_on(self, far: socket.socket) -> None:
        other = {far: self.connection, self.connection: far}
        while True:
            for end in select.select(list(other), [], [])[0]:
                piece = end.recv(_PIECE_BYTES)
                if not piece:
                    return
                if end is far:
                    self.server.add(len(piece))
                other[end].sendall(piece)
