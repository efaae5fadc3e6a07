"""`mdp gateway` before callers and strangers who want all of it: the others are answered."""

import http.client
import os
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.web.gateway import Gateway, gateway, self_signed, with_limits

TOKEN = "0123456789abcdef"
MODEL = "/v2/models/colours"
#: No connection ends because nothing is asked on it.
PATIENT = "server.HEADERS_S = server.HANDSHAKE_S = 600"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet whose agents are not there: what is asked here needs none."""
    folder = tmp_path_factory.mktemp("limits")
    write_bundle(folder / "bundle")
    entries = "".join(
        f'[[devices]]\ndevice = "{name}"\naddress = "tcp://127.0.0.1:{k + 1}"\nk = {k}\n'
        for k, name in enumerate(DEVICES)
    )
    (folder / "fleet.toml").write_text(f'bundle = "bundle"\n{entries}')
    return folder / "fleet.toml"


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[Path]:
    """A pipe that somebody has open and never reads."""
    path = tmp_path / "stderr"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(reader)


def has_ended(client: socket.socket) -> bool:
    """Wait until the other side sends or ends; True if it has ended this connection."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def reply(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response on this connection."""
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return response.status, response.read()


def head(served: Gateway, method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", f"Host: {served.host}", *lines, "", ""]
    ).encode()


def test_a_stderr_that_nobody_reads_stops_nothing(fleet: Path, unread: Path) -> None:
    # Each failure's traceback is longer than what a pipe holds.
    program = with_limits("app.infer.metadata = lambda *given: {}[65_536 * 'x']")
    with gateway("--fleet", fleet, program=program, log=unread) as served:
        for _ in range(20):
            assert served.ask(MODEL).status == 500
        form = {"Content-Type": "multipart/form-data; boundary=a"}
        for _ in range(20):
            assert served.ask(f"{MODEL}/classify", b"--a junk" * 999, headers=form).status == 400
        assert served.ask("/v2/health/live").json == {"live": True}
        served.end()


def test_unforeseen_errors_do_not_fill_the_log(fleet: Path, tmp_path: Path) -> None:
    failing = "app.infer.metadata = lambda *given: {}['a reason']"
    program = with_limits(failing, "import mdp.logs", "mdp.logs.ErrorLog.EVERY_S = 1e9")
    log = tmp_path / "log"
    with gateway("--fleet", fleet, program=program, log=log) as served:
        for _ in range(9):
            assert served.ask(MODEL).status == 500
        served.end()
    assert log.read_text().count("Traceback") == 1
    assert "KeyError: 'a reason'" in log.read_text()


def test_a_stranger_takes_no_descriptors_from_callers(fleet: Path, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    options = (
        *("--fleet", fleet, "--tokens", tmp_path / "tokens"),
        *("--certificate", certificate, "--private-key", key),
    )
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))"
    log = tmp_path / "log"
    trusted = ssl.create_default_context(cafile=str(certificate))
    with (
        gateway(*options, program=with_limits(few, PATIENT), log=log) as served,
        ExitStack() as held,
    ):
        known = http.client.HTTPSConnection(served.host, timeout=PATIENCE_S, context=trusted)
        held.callback(known.close)

        def is_answered(connection: http.client.HTTPSConnection) -> bool:
            connection.request("GET", MODEL, headers={"Authorization": f"Bearer {TOKEN}"})
            return connection.getresponse().read().startswith(b'{"name":"colours"')

        assert is_answered(known)
        strangers = []
        for number in range(200):
            strangers.append(held.enter_context(served.connect(f"127.0.0.{2 + number % 4}")))
            if number % 40 == 39:
                new = http.client.HTTPSConnection(served.host, timeout=PATIENCE_S, context=trusted)
                held.callback(new.close)
                assert is_answered(new)
                assert is_answered(known)
        # The oldest had to leave.
        assert has_ended(strangers[0])
        assert served.descriptors < 96
    assert log.read_text() == ""


def test_without_descriptors_one_line_says_so(fleet: Path, tmp_path: Path) -> None:
    # Fewer than connections may take, as if something else had taken them.
    few = (
        "server.resource.getrlimit = lambda kind: (200, 200); "
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    )
    log = tmp_path / "log"
    with (
        gateway("--fleet", fleet, program=with_limits(few, PATIENT), log=log) as served,
        ExitStack() as held,
    ):
        for number in range(100):
            held.enter_context(served.connect(f"127.0.0.{2 + number % 50}"))
        until(lambda: log.read_text() != "", "it says so")
        held.close()
        until(lambda: served.ask("/v2").status == 200, "it answers again")
    assert log.read_text().splitlines()[0] == "connections cannot be accepted: Too many open files"
    assert "Traceback" not in log.read_text()


def test_connections_without_a_request_take_no_place_of_callers(fleet: Path) -> None:
    # Of 16, 4 have asked nothing, 12 were let in; one may have half of each.
    program = with_limits(PATIENT, "server.MAX_CONNECTIONS = 16")
    with gateway("--fleet", fleet, program=program) as served, ExitStack() as held:
        kept = held.enter_context(served.connect())
        kept.sendall(head(served, "GET", "/v2"))
        assert reply(kept)[0] == 200
        first, second, third = (held.enter_context(served.connect("127.0.0.2")) for _ in range(3))
        assert has_ended(first)
        for number in range(3, 40):
            held.enter_context(served.connect(f"127.0.0.{number}"))
            if number % 10 == 0:
                assert served.ask("/v2").status == 200
        assert has_ended(second)
        assert has_ended(third)
        kept.sendall(head(served, "GET", "/v2"))
        assert reply(kept)[0] == 200


def test_a_caller_whose_places_are_all_being_answered_is_told_to_wait(fleet: Path) -> None:
    program = with_limits(PATIENT, "server.MAX_CONNECTIONS = 8")
    with gateway("--fleet", fleet, program=program) as served, ExitStack() as held:
        idle = held.enter_context(served.connect())
        idle.sendall(head(served, "GET", "/v2"))
        assert reply(idle)[0] == 200
        for _ in range(3):
            stream = held.enter_context(served.connect())
            stream.sendall(head(served, "GET", "/events"))
            assert stream.recv(64).startswith(b"HTTP/1.1 200 ")
        # Half of six are one caller's: its idle one made room, its streams do not.
        assert has_ended(idle)
        fourth = held.enter_context(served.connect())
        fourth.sendall(head(served, "GET", "/v2"))
        full = fourth.makefile("rb").read()
        assert full.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in full
        assert full.rstrip().endswith(b'{"error":"too many connections"}')
        other = held.enter_context(served.connect("127.0.0.2"))
        other.sendall(head(served, "GET", "/v2"))
        assert reply(other)[0] == 200


def test_who_reads_no_answer_loses_the_connection(fleet: Path) -> None:
    with (
        gateway("--fleet", fleet, program=with_limits("server.UNREAD_S = 0.5")) as served,
        socket.socket() as client,
    ):
        # The kernel keeps no more than a few MB of the answers, which are 20 kB each.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(served.address)
        client.sendall(head(served, "GET", "/page.js") * 500)
        assert client.recv(64).startswith(b"HTTP/1.1 200 ")
        mine = client.getsockname()
        until(lambda: mine not in served.peers(), "its connection is ended")
        assert served.ask("/v2").status == 200


def test_strangers_who_read_no_answer_keep_no_place(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    # Of 16, 4 are for those that were not let in.
    program = with_limits(PATIENT, "server.UNREAD_S = 600", "server.MAX_CONNECTIONS = 16")
    options = ("--fleet", fleet, "--tokens", tmp_path / "tokens")
    with gateway(*options, program=program) as served, ExitStack() as held:
        for number in range(4):
            stranger = held.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stranger.bind((f"127.0.0.{2 + number % 2}", 0))
            stranger.connect(served.address)
            # What anybody gets.
            stranger.sendall(head(served, "GET", "/page.js") * 500)
            assert stranger.recv(64).startswith(b"HTTP/1.1 200 ")

        def is_let_in() -> bool:
            with served.connect() as caller:
                # It may have been ended already.
                with suppress(ConnectionError):
                    caller.sendall(head(served, "GET", MODEL, f"Authorization: Bearer {TOKEN}"))
                return not has_ended(caller)

        until(is_let_in, "there is room for a caller")


def test_uploads_that_stop_make_room_for_others(fleet: Path) -> None:
    size = 2**16
    program = with_limits("bodies.BODY_S = 600", f"bodies.MAX_HELD_BYTES = {8 * size}")
    with gateway("--fleet", fleet, program=program) as served, ExitStack() as held:
        stuck = []
        for number in range(8):
            client = held.enter_context(served.connect(f"127.0.0.{2 + number % 2}"))
            client.sendall(head(served, "POST", f"{MODEL}/infer", f"Content-Length: {size}"))
            client.sendall(b"0" * (size - 10))
            stuck.append(client)
        for _ in range(3):
            # A request that is read as a whole, and then is none.
            assert served.ask(f"{MODEL}/infer", b"[" * 3000).status == 400
        # Eighty bytes were left, so one of these had to leave, and no other.
        (left,), _, _ = select.select(stuck, [], [], PATIENCE_S)
        status, body = reply(left)
        assert status == 408
        assert b"does not stop while others wait" in body
        stuck.remove(left)
        for client in stuck:
            client.sendall(b"0" * 10)
            assert reply(client)[0] == 400


def test_a_large_form_of_boundaries_is_refused(fleet: Path) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=a"}
    with gateway("--fleet", fleet) as served:
        for unit in (b"\r\n--a-X", b"\r\n--a\r\n\r\n", b" "):
            body = b"--a\r\n" + unit * (8 * 2**20 // len(unit))
            assert served.ask(f"{MODEL}/classify", body, headers=form).status == 400
