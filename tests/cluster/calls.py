"""Callers of a gateway over HTTPS, each call over a connection of its own."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Plenty, as the whole cluster shares this machine's cores.
DEADLINE_MS = 20_000
_SILENCE_S = 60.0


class _At(http.client.HTTPSConnection):
    """A connection to an address, of a server that has to have a certificate of `name`."""

    def __init__(self, address: str, name: str, trusted: ssl.SSLContext) -> None:
        super().__init__(name, 443, timeout=_SILENCE_S, context=trusted)
        self._address, self._trusted = address, trusted

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        try:
            self.sock = self._trusted.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


@dataclass(frozen=True, slots=True)
class Call:
    """A call's outcome; `status` is 0 where there was no HTTP response, and why is in `body`."""

    status: int
    body: dict[str, Any]
    begun_s: float
    took_s: float

    @property
    def used(self) -> set[str]:
        """Devices that the answer is of."""
        return set(self.body.get("used", ()))

    @property
    def missing(self) -> dict[str, str]:
        """Reasons of devices that it is not of."""
        found: dict[str, str] = self.body.get("missing", {})
        return found


@dataclass(frozen=True, slots=True)
class Caller:
    """A program outside of the cluster that knows its gateway's address, name and certificate."""

    address: str
    name: str
    certificate: Path
    token: str
    model: str
    picture: bytes

    def ask(self, *, token: str | None = None) -> Call:
        """The gateway's answer about the picture."""
        path = f"/v2/models/{self.model}/classify?deadline_ms={DEADLINE_MS}"
        begun_s = time.monotonic()
        try:
            status, body = self.request("POST", path, self.picture, token)
        except (OSError, http.client.HTTPException) as error:
            status, body = 0, {"error": f"{type(error).__name__}: {error}"}
        return Call(status, body, begun_s, time.monotonic() - begun_s)

    def request(
        self, method: str, path: str, body: bytes | None = None, token: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and content of a response; raises OSError, HTTPException."""
        connection = _At(
            self.address, self.name, ssl.create_default_context(cafile=self.certificate)
        )
        try:
            headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read() or b"{}")
        finally:
            connection.close()


@contextmanager
def calling(caller: Caller, threads: int) -> Iterator[list[Call]]:
    """Calls without a pause until the end of the block; the list has all when it has ended."""
    calls, over = list[Call](), threading.Event()

    def call() -> None:
        while not over.is_set():
            calls.append(caller.ask())

    workers = [threading.Thread(target=call) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield calls
    finally:
        over.set()
        for worker in workers:
            worker.join()
