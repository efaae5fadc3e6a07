"""Listens for HTTP, with limits on slow clients, until it is told to end."""

import asyncio
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mdp.errors import ConfigError, InputError
from mdp.formats.keys import host_and_port
from mdp.gateway.access import Tokens
from mdp.gateway.app import Gateway, refused
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.refusals import Refusal, busy

#: Seconds for a request's headers, from the connection or the request before.
HEADERS_S = 10
#: Seconds for a TLS handshake, and how many may be under way: the oldest beyond is ended.
HANDSHAKE_S, MAX_HANDSHAKES = 5, 64
#: Connections at a time; those beyond are told to come again.
MAX_CONNECTIONS = 256
#: Seconds for what is under way once the server is told to end.
ENDING_S = 5


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a gateway listens, and what it asks of clients."""

    bind: str
    tokens: Tokens
    #: PEM files of the certificate with its chain, and of its key; both or neither.
    certificate: Path | None = None
    private_key: Path | None = None


class _Protocol(H11Protocol):
    """HTTP/1.1 that ends connections whose next request does not come.

    uvicorn's own limit ends with the first byte, and begins after the first request.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does so for sockets that were made with a protocol's number, which accepted ones
        # of a listening one are not: head and body of an answer came 40 ms apart.
        place = transport.get_extra_info("socket")
        place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > MAX_CONNECTIONS:
            # uvicorn's own limit answers neither in JSON nor with a time.
            self.app = refused(
                Refusal(503, "too many connections", busy("").headers | {"connection": "close"})
            )
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is None:
            super().data_received(data)
            return
        # Bytes of an unfinished request do not prolong its time.
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self.timeout_keep_alive_task is None and not timer.cancelled():
            self.timeout_keep_alive_task = timer
        else:
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
            return
        # Where a body breaks off, whoever reads it would answer a second time.
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.transport.close()

    def _watch(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


class _Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is done; asyncio's own servers allow any number."""

    def __init__(
        self,
        context: ssl.SSLContext,
        pending: dict["_Handshake", asyncio.Transport],
        **of_protocol: Any,
    ) -> None:
        self._context, self._pending, self._of_protocol = context, pending, of_protocol
        #: What comes with the handshake's end, before HTTP is there to read it.
        self._early = b""
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        # What comes before the handshake has begun would be lost.
        transport.pause_reading()
        self._pending[self] = transport
        if len(self._pending) > MAX_HANDSHAKES:
            self._pending.pop(next(iter(self._pending))).abort()
        self._task = asyncio.create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        encrypted = None
        try:
            # What fails or takes too long is closed.
            with suppress(OSError):
                encrypted = await asyncio.get_running_loop().start_tls(
                    transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
        finally:
            self._pending.pop(self, None)
        # None where the connection has ended meanwhile.
        if encrypted is None or self._ended or encrypted.is_closing():
            transport.abort()
            return
        protocol = _Protocol(**self._of_protocol)
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._early:
            protocol.data_received(self._early)


def bound(bind: str) -> socket.socket:
    """A socket that listens on `HOST:PORT`; raises InputError where it cannot."""
    host, port = host_and_port(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        # Its own text repeats the address.
        raise InputError(
            f"--bind {bind}: {(error.strerror or str(error)).partition(' (')[0]}"
        ) from error


def tls_context(certificate: Path, private_key: Path) -> ssl.SSLContext:
    """TLS by two PEM files; raises ConfigError unless they belong together."""
    for path in (certificate, private_key):
        if not path.is_file():
            raise ConfigError(f"{path}: expected a PEM file, found none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{certificate} and {private_key}: expected a certificate and its key without a "
            f"passphrase, both PEM: {reason}"
        ) from error
    return context


def serve(
    fleets: Mapping[str, ServedFleet],
    listening: Listening,
    *,
    deadline_ms: float,
    started: Callable[[str], None],
) -> None:
    """Serve `fleets` until SIGINT or SIGTERM; `started` is told the URL once it listens."""
    gateway = Gateway(fleets, deadline_ms)
    certificate, private_key = listening.certificate, listening.private_key
    protocol: Any = _Protocol
    if certificate is not None and private_key is not None:
        protocol = partial(_Handshake, tls_context(certificate, private_key), {})
    place = bound(listening.bind)
    log = logging.getLogger("uvicorn.error")
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.setLevel(logging.ERROR)
    config = uvicorn.Config(
        gateway.app(listening.tokens),
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=HEADERS_S,
        timeout_graceful_shutdown=ENDING_S,
    )
    server = uvicorn.Server(config)
    gateway.ending = lambda: server.should_exit
    host, port = place.getsockname()[:2]
    scheme = "http" if certificate is None else "https"
    # uvicorn ends in order, and then has the signal do what it did before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with place:
        started(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        server.run(sockets=[place])
