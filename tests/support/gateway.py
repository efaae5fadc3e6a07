"""A gateway process, and what a test asks it over HTTP."""

import http.client
import json
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mdp.testing.processes import PATIENCE_S, LineProcess

#: `mdp`, with the limits on slow clients of a moment, and few connections.
_LIMITS = (
    "import mdp.gateway.server as server, mdp.gateway.bodies as bodies, mdp.cli.main as cli;"
    "server.HEADERS_S, bodies.BODY_S, server.MAX_CONNECTIONS = 1, 0.5, 3;"
    "server.HANDSHAKE_S, server.MAX_HANDSHAKES = 1, 2; cli.main()"
)
IMPATIENT = (sys.executable, "-c", _LIMITS)


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def told(self) -> Any:
        """The body's JSON."""
        return json.loads(self.body)


class Gateway:
    """Where a gateway listens."""

    def __init__(self, url: str, process: LineProcess) -> None:
        self.url = url
        self._process = process
        self.host = urlsplit(url).netloc

    def end(self) -> None:
        """SIGTERM, and its end in order."""
        assert self._process.terminate() in (0, -signal.SIGTERM)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Its process stands still in this block, with its connections as they are."""
        self._process.stop()
        try:
            yield
        finally:
            self._process.signal(signal.SIGCONT)

    def connect(self) -> socket.socket:
        """A connection on which nothing was sent yet."""
        host, _, port = self.host.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE_S)

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Reply:
        """GET, or POST with a body."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE_S)
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), path, body, dict(headers)
            )
            response = connection.getresponse()
            known = {key.lower(): value for key, value in response.getheaders()}
            return Reply(response.status, known, response.read())
        finally:
            connection.close()


@contextmanager
def gateway(*options: object, program: Sequence[object] = ()) -> Iterator[Gateway]:
    """`mdp gateway` with these options, on a port that is free, until the block ends.

    `program` is another one in the place of `mdp`.
    """
    command = [
        *(program or [Path(sys.executable).parent / "mdp"]),
        "gateway",
        "--bind",
        "127.0.0.1:0",
        "--json",
        *options,
    ]
    with LineProcess("gateway", command) as process:
        yield Gateway(json.loads(process.line("an event"))["url"], process)
