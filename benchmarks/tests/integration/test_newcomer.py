"""Bytes that come through the counting proxy, and a page that ends a way."""

import http.server
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.newcomer.__main__ import environment, follow
from benchmarks.newcomer.fetched import FetchedBytes
from benchmarks.newcomer.ways import INSTALLED, SHOWN, Way

CONTENT = b"x" * 300_000


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a server with one large page."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found.server_address[1]
        found.shutdown()
        thread.join()


def exchange(proxy: FetchedBytes, request: bytes) -> bytes:
    """All that the proxy answers."""
    with closing(
        socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    ) as here:
        here.sendall(request)
        return b"".join(iter(lambda: here.recv(1 << 16), b""))


def test_what_comes_through_is_counted(server: int) -> None:
    with FetchedBytes() as proxy:
        asked = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        head = f"CONNECT 127.0.0.1:{server} HTTP/1.1\r\nHost: here\r\n\r\n".encode()
        answered = exchange(proxy, head + asked)
        assert answered.endswith(CONTENT)
        assert len(CONTENT) < proxy.count < len(answered)
        assert exchange(proxy, b"GET http://here/ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")


def test_a_way_ends_once_its_page_answers(server: int, tmp_path: Path) -> None:
    said = f"http://127.0.0.1:{server}/ shows them; {SHOWN}"
    wait = f"{sys.executable} -c 'import time; time.sleep(600)'"
    way = Way("an example", f"echo {INSTALLED}\necho '{said}'\n{wait}", page=True)
    found = follow(way, tmp_path, environment(tmp_path))
    assert found["installed_s"] <= found["end_s"]
