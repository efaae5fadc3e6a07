"""A phone as an agent's camera: over real TLS, from a script and from a real browser."""

import datetime
import io
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPSConnection
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from devices.camera.certificate import phone_files
from devices.camera.phone import (
    LEFT_S,
    MAX_PICTURE_BYTES,
    PhoneCamera,
    PhoneDoor,
    SentPictures,
    door_of,
)
from mdp.cameras import NoPictureYet, SourceError, parse_source
from mdp.errors import InputError
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import until
from tests.support.clock import Clock
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.web.browser import browser, why_no_browser

pytest.importorskip("cryptography")
pytestmark = pytest.mark.usefixtures("no_leaks")

HERE = "127.0.0.1"
SPACE = "\ue00d"
NOW = datetime.datetime.now(datetime.UTC)
#: As a person who has accepted the certificate.
ACCEPTING = ssl._create_unverified_context()


def free_port() -> int:
    with closing(socket.create_server((HERE, 0))) as taken:
        return int(taken.getsockname()[1])


def jpeg(colour: tuple[int, int, int], side: int = 64) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(content, "JPEG")
    return content.getvalue()


@pytest.fixture
def door(tmp_path: Path) -> PhoneDoor:
    return door_of(parse_source(f"phone:{free_port()}"), HERE, phone_files(HERE, NOW, tmp_path))


@contextmanager
def opened(door: PhoneDoor) -> Iterator[PhoneCamera]:
    with closing(PhoneCamera(parse_source(f"phone:{door.port}"), door)) as camera:
        yield camera


def send(door: PhoneDoor, content: bytes, phone: str = "a", token: str | None = None) -> int:
    """The status of a picture that is sent."""
    known = door.files.token if token is None else token
    headers = {"Authorization": f"Bearer {known}", "X-Phone": phone}
    request = Request(f"https://{HERE}:{door.port}/picture", content, headers)
    try:
        with urlopen(request, timeout=20, context=ACCEPTING) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def test_pictures_that_are_sent_are_the_camera_s(door: PhoneDoor) -> None:
    with opened(door) as camera:
        with pytest.raises(
            NoPictureYet, match=rf"^no phone sends pictures to https://{HERE}:"
        ) as no:
            camera.grab()
        assert door.files.token not in str(no.value)
        for colour in ((200, 0, 0), (0, 0, 200)):
            assert send(door, jpeg(colour)) == 204
            camera.grab()
            seen = np.asarray(camera.picture(smallest_side=32)).mean(axis=(0, 1))
            assert np.abs(seen - colour).max() < 8
            assert camera.age_s >= 0


def test_what_is_refused_is_no_picture(door: PhoneDoor) -> None:
    with opened(door) as camera:
        assert send(door, jpeg((0, 0, 0)), token="wrong") == 403
        assert send(door, b"no picture") == 415
        assert announce_too_much(door) == 413
        with pytest.raises(NoPictureYet):
            camera.grab()
        for path, status in (("/", 200), ("/phone.js", 200), ("/../phone.py", 404)):
            assert got(door, path) == status


def announce_too_much(door: PhoneDoor) -> int:
    """The status of a picture of which only the length was sent."""
    with closing(HTTPSConnection(HERE, door.port, timeout=20, context=ACCEPTING)) as connection:
        connection.putrequest("POST", "/picture")
        connection.putheader("Authorization", f"Bearer {door.files.token}")
        connection.putheader("Content-Length", str(MAX_PICTURE_BYTES + 1))
        connection.endheaders()
        return connection.getresponse().status


def got(door: PhoneDoor, path: str) -> int:
    try:
        url = f"https://{HERE}:{door.port}{path}"
        with urlopen(url, timeout=20, context=ACCEPTING) as answer:
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def test_a_second_phone_and_another_place_are_refused(door: PhoneDoor) -> None:
    with opened(door):
        assert send(door, jpeg((0, 0, 0)), phone="a") == 204
        assert send(door, jpeg((0, 0, 0)), phone="b") == 409
        with closing(HTTPSConnection(HERE, door.port, timeout=20, context=ACCEPTING)) as other:
            assert post(door, other, path="/elsewhere") == 404


def post(door: PhoneDoor, connection: HTTPSConnection, path: str = "/picture") -> int:
    """The status of a picture that is sent on a connection, which stays open."""
    headers = {"Authorization": f"Bearer {door.files.token}", "X-Phone": "a"}
    connection.request("POST", path, jpeg((0, 0, 0)), headers)
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


@contextmanager
def secured(door: PhoneDoor) -> Iterator[ssl.SSLSocket]:
    """A connection of TLS, on which nothing was sent."""
    with (
        socket.create_connection((HERE, door.port), timeout=20) as plain,
        ACCEPTING.wrap_socket(plain) as connection,
    ):
        yield connection


def test_a_phone_leaves_with_the_camera_and_finds_the_next_one(door: PhoneDoor) -> None:
    with closing(HTTPSConnection(HERE, door.port, timeout=20, context=ACCEPTING)) as phone:
        with opened(door):
            assert [post(door, phone), post(door, phone)] == [204, 204]
            kept = phone.sock
            assert kept is not None
        # As after a picture that its mask does not fit, after which the source is reopened.
        with opened(door) as camera:
            with pytest.raises((ConnectionError, ssl.SSLError)):
                post(door, phone)
            phone.close()
            assert post(door, phone) == 204
            camera.grab()


def test_a_picture_that_breaks_off_is_none(door: PhoneDoor) -> None:
    with opened(door) as camera, secured(door) as phone:
        picture = jpeg((0, 0, 0))
        head = (
            "POST /picture HTTP/1.1\r\nX-Phone: a\r\n"
            f"Authorization: Bearer {door.files.token}\r\nContent-Length: {len(picture)}\r\n\r\n"
        )
        phone.sendall(head.encode() + picture[:-100])
        socket.socket.shutdown(phone, socket.SHUT_WR)
        # TLS complains that it was not told of the end.
        with suppress(ssl.SSLError):
            assert phone.recv(100) == b""
        with pytest.raises(NoPictureYet):
            camera.grab()


def test_who_has_no_token_is_heard_once(door: PhoneDoor) -> None:
    with opened(door):
        for request in ("GET / HTTP/1.1\r\n\r\n", "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"):
            with secured(door) as stranger:
                stranger.sendall(request.encode())
                said = b"".join(iter(lambda: stranger.recv(4096), b""))
                assert said.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 403 "))
                assert b"\r\nConnection: close\r\n" in said


@pytest.mark.parametrize("head", ["", "POST /picture HTTP/1.1\r\nContent-Length: 4000000\r\n\r\n"])
def test_bytes_now_and_then_keep_no_place(
    head: str, door: PhoneDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.camera.phone._TIMEOUT_S", 0.5)
    with opened(door), secured(door) as stranger:
        stranger.sendall(head.encode())
        stranger.settimeout(0.05)

        def ended() -> bool:
            try:
                stranger.sendall(b"x")
                return stranger.recv(100) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(ended, "the end of the connection")


def test_a_phone_that_does_not_accept_the_certificate_disturbs_nobody(door: PhoneDoor) -> None:
    with opened(door) as camera:
        with pytest.raises(URLError, match="certificate verify failed"):
            urlopen(f"https://{HERE}:{door.port}/", timeout=20)
        # Nor one that speaks no TLS, or says nothing.
        with socket.create_connection((HERE, door.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                plain.recv(100)
        with socket.create_connection((HERE, door.port)):
            until(lambda: camera._server.refused, "the refusal")
            with pytest.raises(NoPictureYet, match="one did not accept the certificate"):
                camera.grab()
            assert send(door, jpeg((0, 99, 0))) == 204
            camera.grab()


def test_a_second_phone_waits_until_the_first_has_left() -> None:
    clock = Clock()
    sent = SentPictures(clock)
    assert sent.put(b"1", "a")
    assert not sent.put(b"2", "b")
    assert sent.after(0, 0.0) == (1, b"1", 0.0)
    clock.now_s += LEFT_S + 0.1
    assert sent.put(b"3", "b")
    assert not sent.put(b"4", "a")
    found = sent.after(1, 0.0)
    assert found is not None
    assert found[:2] == (2, b"3")
    assert sent.after(2, 0.0) is None


def test_a_port_that_is_taken(door: PhoneDoor) -> None:
    with (
        socket.create_server((HERE, door.port)),
        pytest.raises(SourceError, match="Address already in use"),
    ):
        PhoneCamera(parse_source(f"phone:{door.port}"), door)


@pytest.mark.parametrize("text", ["phone:", "phone:0", "phone:70000", "phone:x"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"phone:PORT"):
        parse_source(text)


@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is one")
def test_a_browser_s_camera_is_an_agent_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chromium's made-up camera, whose certificate warning is accepted, at an agent of a bundle."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port = free_port()
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        fleet.start("alpha", "--source", f"phone:{port}")
        fleet.write()
        said = (tmp_path / "alpha.log").read_text()
        found = re.search(r"Open this on the phone: https://[0-9.]+:(\d+)/#(\S+)", said)
        assert found is not None, said
        assert int(found[1]) == port
        flags = ("--use-fake-device-for-media-stream", "--ignore-certificate-errors")
        with fleet.client() as client, browser(tmp_path / "chromium", *flags) as page:
            no_phone = "no phone sends pictures to https://"
            until(lambda: no_phone in client.status()[0].source, "a camera without a phone")
            assert found[2] not in client.status()[0].source
            page.open(f"https://{HERE}:{port}/#{found[2]}")
            assert page.text("#where") == f"{HERE}:{port}"
            page.press("#start", SPACE)
            page.wait_for("#told", r"^([3-9]|\d\d+) pictures sent")
            until(lambda: ": frame " in client.status()[0].source, "a frame of the phone")
            assert client.look(deadline_ms=PLENTY_MS).used == ("alpha",)
            page.open(f"https://{HERE}:{port}/?again#wrong")
            page.press("#start", SPACE)
            page.wait_for("#told", "lacks the right token")
            # Nothing is filmed that nobody may have.
            seen = "document.querySelector('#seen')"
            assert page.run(f"return [{seen}.hidden, {seen}.srcObject.active]") == [True, False]
            page.open(f"https://{HERE}:{port}/?none")
            page.wait_for("#told", "has no token")
            assert page.run("return document.querySelector('#start').disabled") is True
