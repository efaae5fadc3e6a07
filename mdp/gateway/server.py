"""Listens for HTTP, with limits on slow clients, until it is told to end."""

import asyncio
import logging
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mdp.errors import ConfigError, InputError
from mdp.formats.keys import host_and_port
from mdp.gateway.access import Stamp, Tokens, address_of, stamp_of
from mdp.gateway.app import Gateway
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.line import ServedLine
from mdp.gateway.places import Claim, ConnectionPlaces
from mdp.gateway.workers import Workers
from mdp.logs import errors_written
from mdp.teach.teacher import FleetTeacher

#: Seconds for a request's headers, from the connection or the request before.
HEADERS_S = 10
#: Seconds for a TLS handshake.
HANDSHAKE_S = 5
#: Seconds within which a client has to read what waits to be sent.
UNREAD_S = 30
#: Connections at a time, as far as half of the process's file descriptors suffice.
MAX_CONNECTIONS = 256
#: Connections that wait in the kernel, and how many are accepted before any is read: fewer than
#: have a place before their first request, so that none has to leave before it was read.
WAITING, AT_ONCE = 128, 8
#: Seconds for what is under way once the server is told to end.
ENDING_S = 5
#: Bytes of a request's line and headers, and of a chunked body between two pieces of data.
MAX_HEAD_BYTES = 64 * 1024
#: Bytes that the parser gets at a time: it makes a request of some twenty of them.
_PIECE = 16 * 1024
#: Bytes of further requests that wait while one is answered; asyncio reads 256 KiB at a time.
_MAX_HELD = 2**20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """Address that a gateway listens on, and what it asks of clients."""

    bind: str
    tokens: Tokens
    #: PEM files of the certificate with its chain, and of its key; both or neither.
    certificate: Path | None = None
    private_key: Path | None = None
    #: Who may teach.
    teachers: Tokens = field(default_factory=lambda: Tokens([]))


class _ClosedWhenRead:
    """A connection that ends after an answer only once the request's body has come as well.

    One that is closed with bytes unread is reset, and a client that still sends its body then gets
    an error in the place of the answer (RFC 9112, section 9.6).
    """

    def __init__(self, protocol: "_Protocol", cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        """Close it now, or with the body's end."""
        if self._cycle.response_complete and self._cycle.more_body:
            self._protocol.close_after_body()
        else:
            self._protocol.transport.close()


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 that bounds what a connection may send, and ends those whose next request stays out.

    uvicorn's limit of time ends with the first byte, and begins after the first request; of bytes
    in a head it has none, nor of requests that wait for the answer to one before.
    """

    def __init__(
        self, places: ConnectionPlaces, claim: Claim | None = None, **of_protocol: Any
    ) -> None:
        """Without a `claim`, a connection that has none of `places` yet."""
        super().__init__(**of_protocol)
        self._places, self._claim = places, claim
        self._unread: asyncio.TimerHandle | None = None
        #: What came while an answer was under way, and is parsed after it.
        self._held = bytearray()
        #: Bytes of a head or between two pieces of a body that the parser has seen.
        self._between = 0
        self._in_head = True
        #: Whether a request has begun after another, or a refused one's body has ended.
        self._anew = False
        #: Whether the connection ends with the body that is coming.
        self._closes = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does so for sockets that were made with a protocol's number, which accepted ones
        # of a listening one are not: head and body of an answer came 40 ms apart.
        place = transport.get_extra_info("socket")
        place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()
        if self._claim is None:
            self._claim = _claim_place(self._places, transport, self.loop.time())
        self._claim.leave = transport.abort
        # Every request gets a copy.
        self.app_state = self.app_state | {"admit": partial(self._places.admit, self._claim)}

    def connection_lost(self, exc: Exception | None) -> None:
        if self._claim is not None:
            self._places.leave(self._claim)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._parse_held()
        if len(self._held) > _MAX_HELD:
            # Reading is paused, and whoever waits for the client's leaving reads on.
            self.transport.abort()
        if self._claim is not None:
            self._claim.moved_s = self.loop.time()
        self._note_busy()

    def _parse_held(self) -> None:
        """Parse what came, piece by piece, up to a request that has to be answered first."""
        while self._held and not self._answering() and not self.transport.is_closing():
            piece = bytes(self._held[:_PIECE])
            del self._held[:_PIECE]
            self._read(piece)
        if self.transport.is_closing():
            self._held.clear()
        elif self._held:
            self.flow.pause_reading()

    def _answering(self) -> bool:
        """True while a request that has come whole is not answered yet."""
        cycle = self.cycle
        return bool(self.pipeline) or not (
            cycle is None or cycle.more_body or cycle.response_complete
        )

    def _note_busy(self) -> None:
        if self._claim is not None:
            self._claim.busy = self._unread is None and self._answering()

    def _read(self, piece: bytes) -> None:
        # Bytes of an unfinished request do not prolong its time.
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        self._anew = False
        self._between += len(piece)
        super().data_received(piece)
        if self._between > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Expected at most 64 KiB of line and headers.")
        if timer is None:
            return
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting or self.timeout_keep_alive_task is not None:
            timer.cancel()
        elif self._anew and not self._closes:
            # The silence before it is none of its time.
            timer.cancel()
            self._watch()
        elif not timer.cancelled():
            self.timeout_keep_alive_task = timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._anew = self.cycle is not None

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are none of the headers that a request was admitted by.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._between = False, 0
        hosts = sum(name == b"host" for name, _ in self.headers)
        # RFC 9112, section 3.2. An error of a callback ends the connection with status 400.
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError(f"expected one Host, got {hosts}")
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _ClosedWhenRead(self, self.cycle))

    def on_body(self, body: bytes) -> None:
        self._between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between = 0
        super().on_message_complete()
        self._anew = True
        if self._closes:
            self.transport.close()

    def close_after_body(self) -> None:
        """Close the connection once the body has ended that is coming, or its time has."""
        self._closes = True

    def on_response_complete(self) -> None:
        # The next request may be there already.
        super().on_response_complete()
        self._parse_held()
        self._note_busy()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would wait until all of it is read.
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)
        self._note_busy()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._note_busy()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if self._closes:
            # It has its answer.
            self.transport.close()
            return
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


def _claim_place(places: ConnectionPlaces, transport: Any, now_s: float) -> Claim:
    """The claim of a connection that was accepted."""
    # None where it has ended already.
    peer = transport.get_extra_info("peername")
    claim = Claim(address_of(peer[0]) if peer else "", now_s, leave=transport.abort)
    places.arrive(claim)
    return claim


class _Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is done; asyncio's own servers allow any number."""

    def __init__(
        self, certificate: "ServedCertificate", places: ConnectionPlaces, **of_protocol: Any
    ) -> None:
        self._certificate, self._places, self._of_protocol = certificate, places, of_protocol
        #: What comes with the handshake's end, before HTTP is there to read it.
        self._early = b""
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        # What comes before the handshake has begun would be lost.
        transport.pause_reading()
        self._claim = _claim_place(self._places, transport, asyncio.get_running_loop().time())
        self._task = asyncio.create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        encrypted = None
        # What fails or takes too long is closed.
        with suppress(OSError):
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._certificate.context(),
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        # None where the connection has ended meanwhile.
        if encrypted is None or self._ended or encrypted.is_closing():
            self._places.leave(self._claim)
            transport.abort()
            return
        protocol = _Protocol(self._places, self._claim, **self._of_protocol)
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._early:
            protocol.data_received(self._early)


class _Server(uvicorn.Server):
    """uvicorn's server, with a longer queue of connections than it accepts at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; asyncio takes one number for both."""
        await super().startup(sockets)
        for place in sockets or ():
            place.listen(WAITING)


def listen_on(bind: str, option: str = "--bind") -> socket.socket:
    """A socket that listens on `HOST:PORT`; raises InputError, which names `option`."""
    host, port = host_and_port(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING)
    except OSError as error:
        # Its own text repeats the address.
        raise InputError(
            f"{option} {bind}: {(error.strerror or str(error)).partition(' (')[0]}"
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


class ServedCertificate:
    """TLS by two PEM files, which may be renewed while connections are accepted."""

    def __init__(self, certificate: Path, private_key: Path) -> None:
        """Raises ConfigError unless they belong together."""
        self._files = certificate, private_key
        self._seen = self._look()
        self._context = tls_context(certificate, private_key)

    def context(self) -> ssl.SSLContext:
        """The TLS of a connection that begins now, by the newest pair of files that fit."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = tls_context(*self._files)
            except ConfigError as error:
                # One of the two may be written a moment after the other.
                _LOG.error("%s; the one before is served on", error)
        return self._context

    def _look(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self._files]


def most_connections() -> int:
    """The most connections at a time: fewer where descriptors are few."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def serve(
    fleets: Mapping[str, ServedFleet],
    listening: Listening,
    *,
    deadline_ms: float,
    started: Callable[[str], None],
    teacher: FleetTeacher | None = None,
    first: Callable[[], ServedFleet] | None = None,
    workers: Workers | None = None,
) -> None:
    """Serve `fleets` until SIGINT or SIGTERM; `started` is told the URL once it listens.

    With a `teacher`, the page teaches; `first` and `workers` are as of `Gateway`. Raises MDPError
    where these do not start.
    """
    gateway = Gateway(fleets, deadline_ms, teacher, first, workers)
    server = _server_of(gateway.app(listening.tokens, listening.teachers), listening)
    place = listen_on(listening.bind)
    gateway.ending = lambda: server.should_exit

    def end() -> None:
        server.should_exit = True

    gateway.end = end
    # uvicorn ends in order, and then has the signal do what it did before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with place, errors_written():
        started(_url_of(place, listening))
        server.run(sockets=[place])
    if gateway.failure is not None:
        raise gateway.failure


def _server_of(app: Any, listening: Listening) -> _Server:
    """A server of an ASGI application, with limits on slow clients; raises ConfigError."""
    certificate, private_key = listening.certificate, listening.private_key
    places = ConnectionPlaces(most_connections())
    protocol: Any = partial(_Protocol, places)
    if certificate is not None and private_key is not None:
        protocol = partial(_Handshake, ServedCertificate(certificate, private_key), places)
    config = uvicorn.Config(
        app,
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
        backlog=AT_ONCE,
    )
    return _Server(config)


def _url_of(place: socket.socket, listening: Listening) -> str:
    host, port = place.getsockname()[:2]
    scheme = "http" if listening.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def serving_line(served: ServedLine, listening: Listening) -> Iterator[str]:
    """Serve a line in a thread of its own until the block ends; yields the URL.

    Raises InputError where the address is taken, ConfigError for a wrong certificate.
    """
    server = _server_of(served.app(listening.tokens), listening)
    served.ending = lambda: server.should_exit
    with listen_on(listening.bind) as place, errors_written():
        # Outside the main thread uvicorn leaves signals alone.
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [place]}, name="http", daemon=True
        )
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield _url_of(place, listening)
        finally:
            server.should_exit = True
            thread.join(ENDING_S + 1)
