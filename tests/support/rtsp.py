"""A network camera: RTSP (RFC 2326) over TCP, JPEG pictures in RTP (RFC 2435), with a password."""

import base64
import io
import socket
import struct
import threading
from typing import Self

from PIL import Image

from mdp.closing import Closing
from mdp.pictures.crop import Pixels

USER, PASSWORD = "me", "s3cret"
_JPEG = 26
_PERIOD_S = 0.02
_SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=door\r\nc=IN IP4 0.0.0.0\r\nt=0 0\r\n"
    f"m=video 0 RTP/AVP {_JPEG}\r\na=control:track\r\n"
)


class NetworkCamera(Closing):
    """Shows one picture, again and again, to whoever knows the password; one viewer at a time."""

    def __init__(self, picture: Pixels) -> None:
        self._payload = _payload(picture)
        self._over = threading.Event()
        self._broken = threading.Event()
        #: While this is set, nothing is sent, and the connection stays up.
        self.hangs = threading.Event()
        self.viewers = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        port = self._listener.getsockname()[1]
        self.url = f"rtsp://{USER}:{PASSWORD}@127.0.0.1:{port}/door?token=t0ken"
        self.shown_as = f"rtsp://127.0.0.1:{port}/door"
        self._thread = threading.Thread(target=self._serve)

    def hang_up(self) -> None:
        """End the present viewer's connection."""
        self._broken.set()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                viewer, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._broken.clear()
            with viewer:
                try:
                    self._talk(viewer)
                except OSError:
                    continue

    def _talk(self, viewer: socket.socket) -> None:
        viewer.settimeout(5)
        requests = viewer.makefile("rb")
        while request := _request(requests):
            method, headers = request
            answer, body = {"CSeq": headers["cseq"], "Session": "1"}, ""
            status = "200 OK"
            if method == "OPTIONS":
                answer["Public"] = "OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN"
            elif headers.get("authorization") != _authorization():
                status, answer["WWW-Authenticate"] = "401 Unauthorized", 'Basic realm="door"'
            elif method == "DESCRIBE":
                body, answer["Content-Type"] = _SDP, "application/sdp"
            elif method == "SETUP":
                answer["Transport"] = "RTP/AVP/TCP;unicast;interleaved=0-1"
            answer["Content-Length"] = str(len(body))
            lines = "".join(f"{name}: {value}\r\n" for name, value in answer.items())
            viewer.sendall(f"RTSP/1.0 {status}\r\n{lines}\r\n{body}".encode())
            if method == "PLAY" and status == "200 OK":
                self.viewers += 1
                self._play(viewer)
                return

    def _play(self, viewer: socket.socket) -> None:
        number = 0
        while not (self._over.is_set() or self._broken.wait(_PERIOD_S)):
            if self.hangs.is_set():
                continue
            stamp = int(number * _PERIOD_S * 90_000)
            # The marker says that the picture ends with this packet.
            header = struct.pack("!BBHII", 0x80, 0x80 | _JPEG, number & 0xFFFF, stamp, 1)
            packet = header + self._payload
            viewer.sendall(b"$\0" + struct.pack("!H", len(packet)) + packet)
            number += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()


def _authorization() -> str:
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def _request(lines: io.BufferedIOBase) -> tuple[str, dict[str, str]] | None:
    """Method and headers of the next request; None at the end."""
    method = lines.readline().decode().split(" ")[0]
    headers = {}
    while line := lines.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return (method, headers) if method else None


def _payload(picture: Pixels) -> bytes:
    """A whole picture, sides of which are multiples of 16, as the payload of one RTP packet."""
    stream = io.BytesIO()
    # 4:2:0 and the usual Huffman tables, as the format wants them.
    Image.fromarray(picture).save(stream, "JPEG", quality=75, subsampling=2, optimize=False)
    data, tables, place = stream.getvalue(), b"", 2
    while True:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        segment = data[place + 4 : place + 2 + length]
        place += 2 + length
        if marker == 0xDB:
            tables += b"".join(segment[i + 1 : i + 65] for i in range(0, len(segment), 65))
        if marker == 0xDA:
            break
    height, width = picture.shape[:2]
    head = struct.pack("!I4B", 0, 1, 255, width // 8, height // 8)
    return head + struct.pack("!BBH", 0, 0, len(tables)) + tables + data[place:-2]
