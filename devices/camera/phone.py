"""A phone's camera: a page that the agent serves to it over TLS, and the pictures that it sends.

The phone sends to this agent and nowhere else. Who has no token gets the page, and may not send.
"""

import http.server
import io
import secrets
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from PIL import Image

from devices.camera.certificate import PhoneFiles
from devices.camera.qr import qr_code, to_text
from mdp.cameras import NoPictureYet, Source, SourceError
from mdp.pictures.crop import Pixels, load_picture

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/phone.js": ("phone.js", "text/javascript; charset=utf-8"),
    "/phone.css": ("phone.css", "text/css; charset=utf-8"),
}
#: Bytes of one picture, at most.
MAX_PICTURE_BYTES = 4_000_000
#: A phone that sends nothing for so long gives way to another one.
LEFT_S = 3.0
#: Connections at a time, and how long one may take for the handshake, and for a whole request.
_CONNECTIONS, _TIMEOUT_S = 8, 10.0
#: How long `grab` waits for a picture: `close` waits for it.
_WAIT_S = 0.4
_JPEG = b"\xff\xd8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PhoneDoor:
    """Port, address and files of the page that a phone opens."""

    port: int
    #: With the token behind `#`, which browsers send to nobody.
    url: str
    files: PhoneFiles

    def invitation(self, *, terminal: bool) -> str:
        """Text for who holds the phone; on a terminal with a QR code."""
        code = f"\n{to_text(qr_code(self.url))}" if terminal else ""
        return (
            f"{code}Open this on the phone: {self.url}\n"
            "Its browser warns, as nobody vouches for this machine's certificate: accept it. "
            "Pictures go to this agent and nowhere else.\n"
        )


def door_of(source: Source, address: str, found: PhoneFiles) -> PhoneDoor:
    """The door of `phone:PORT`."""
    port = int(source.place)
    return PhoneDoor(port, f"https://{address}:{port}/#{found.token}", found)


class SentPictures:
    """The newest picture that a phone has sent. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._changed = clock, threading.Condition()
        self._content, self._sent_s = b"", float("-inf")
        self._phone = ""
        self._number = 0

    def put(self, content: bytes, phone: str) -> bool:
        """Keep a picture of `phone`; False while another one sends."""
        with self._changed:
            now_s = self._clock()
            if phone != self._phone and now_s - self._sent_s < LEFT_S:
                return False
            self._content, self._sent_s, self._phone = content, now_s, phone
            self._number += 1
            self._changed.notify_all()
        return True

    def after(self, number: int, wait_s: float) -> tuple[int, bytes, float] | None:
        """Number, content and age in seconds of a picture later than `number`; None without."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number > number, wait_s):
                return None
            return self._number, self._content, self._clock() - self._sent_s


class PhoneCamera:
    """The camera of the phone that sends; serves the page until it is closed."""

    def __init__(self, source: Source, door: PhoneDoor) -> None:
        """Raises SourceError where the port is taken, or the certificate unusable."""
        #: Of the last picture as it was asked for.
        self.age_s = 0.0
        self._url, self._content, self._number = door.url, b"", 0
        self._sent = SentPictures()
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(door.files.certificate)
            self._server = _PhoneServer(door.port, context, door.files.token, self._sent)
        except OSError as error:
            raise SourceError(f"{source}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="phone")
        self._thread.start()

    def grab(self) -> None:
        """Wait a moment for the next picture; raises NoPictureYet."""
        found = self._sent.after(self._number, _WAIT_S)
        if found is None:
            refused = " (one did not accept the certificate)" if self._server.refused else ""
            # Not the token: statuses are read by others.
            raise NoPictureYet(f"no phone sends pictures to {self._url.partition('#')[0]}{refused}")
        self._number, self._content, self.age_s = found

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        """The picture that `grab` found; raises PictureError."""
        return load_picture(self._content, smallest_side=smallest_side)

    def close(self) -> None:
        """Close the page and all connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _PhoneServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One thread for each connection, a few at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, context: ssl.SSLContext, token: str, sent: SentPictures) -> None:
        self.context, self.token, self.sent = context, token, sent
        #: Whether the last handshake failed, as where a certificate is not accepted.
        self.refused = False
        self._places = threading.Semaphore(_CONNECTIONS)
        #: Guards the connections that are open, and whether there may be more.
        self._lock = threading.Lock()
        self._open, self._closed = set[ssl.SSLSocket](), False
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        # Without a look-up of this machine's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the connection's own thread: a handshake that hangs delays nobody.
        request.settimeout(_TIMEOUT_S)
        try:
            secured = self.context.wrap_socket(request, server_side=True)
        except OSError as error:
            self.refused = self.refused or isinstance(error, ssl.SSLError)
            return
        self.refused = False
        with secured:
            with self._lock:
                if self._closed:
                    return
                self._open.add(secured)
            try:
                super().finish_request(secured, client_address)
            finally:
                with self._lock:
                    self._open.discard(secured)

    def server_close(self) -> None:
        """Close the port and all connections: a phone that went on here would be seen by nobody."""
        super().server_close()
        with self._lock:
            self._closed = True
            for connection in self._open:
                # TLS itself stays with the connection's own thread, which reads the end.
                with suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a phone that goes away is no error of the agent's."""


class _TimedReads(io.RawIOBase):
    """Bytes of a connection, of one request at a time: those that come prolong nothing."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection, self._until_s = connection, 0.0

    def begin(self) -> None:
        """Let the next request come."""
        self._until_s = time.monotonic() + _TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Requests of one connection; only who has the token may make a second one."""

    protocol_version = "HTTP/1.1"
    server: _PhoneServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reads = _TimedReads(self.connection)
        self.rfile = io.BufferedReader(self._reads)

    def handle_one_request(self) -> None:
        self._reads.begin()
        super().handle_one_request()

    def do_GET(self) -> None:
        self.close_connection = True
        path = self.path.partition("?")[0]
        if path not in PAGE:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        name, kind = PAGE[path]
        content = files("devices.camera").joinpath("phone_page", name).read_bytes()
        self._answer(HTTPStatus.OK, content, kind)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        told = self.headers.get("Authorization", "").encode()
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_PICTURE_BYTES:
            # What follows on this connection could not be told from the body.
            self.close_connection = True
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        # Read in any case: who is cut off while sending hears no answer.
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            # It has gone, and what came is no picture.
            self.close_connection = True
        elif not secrets.compare_digest(told, f"Bearer {self.server.token}".encode()):
            self.close_connection = True
            self._answer(HTTPStatus.FORBIDDEN)
        elif self.path != "/picture":
            self._answer(HTTPStatus.NOT_FOUND)
        elif not content.startswith(_JPEG):
            self._answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        elif not self.server.sent.put(content, self.headers.get("X-Phone", "")):
            self._answer(HTTPStatus.CONFLICT)
        else:
            self._answer(HTTPStatus.NO_CONTENT)

    def _answer(self, status: HTTPStatus, content: bytes = b"", kind: str = "text/plain") -> None:
        self.connection.settimeout(_TIMEOUT_S)
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the agent reports what its camera does."""

    def version_string(self) -> str:
        return "mdp-agent"
