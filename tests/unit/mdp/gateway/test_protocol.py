"""HTTP as a gateway's connections parse it: bytes in, bytes out, on a real loop, no sockets."""

import asyncio
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from mdp.gateway import server
from mdp.gateway.places import ConnectionPlaces


class Wire:
    """A transport that keeps what is written, and whether reading is paused."""

    def __init__(self) -> None:
        self.written = b""
        self.paused = self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else ("127.0.0.1", 1)

    def setsockopt(self, *given: int) -> None:
        """Nothing."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8080

    getpeername = getsockname

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Application:
    """An application that answers with a request's target, header names and body."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.let.set()
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(scope)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await self.let.wait()
        names = b",".join(name for name, _ in scope["headers"])
        content = scope["raw_path"] + b" " + names + b" " + body
        length = str(len(content)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class Connection:
    """One connection to an `Application`, on the loop that runs."""

    def __init__(self) -> None:
        self.application, self.wire = Application(), Wire()
        of_protocol: dict[str, Any] = {
            "config": uvicorn.Config(self.application, log_config=None, lifespan="off"),
            "server_state": ServerState(),
            "app_state": {},
        }
        self.protocol = server._Protocol(ConnectionPlaces(16), **of_protocol)
        self.protocol.connection_made(self.wire)

    async def send(self, *pieces: bytes) -> None:
        """Hand pieces to the connection, as long as it reads, and let the application run."""
        for piece in pieces:
            while self.wire.paused and not self.wire.closed:
                await asyncio.sleep(0)
            if self.wire.closed:
                break
            self.protocol.data_received(piece)
        await self.rest()

    async def rest(self) -> None:
        """Wait until a while has passed without a further byte of an answer."""
        before, idle = len(self.wire.written), 0
        while idle < 50:
            await asyncio.sleep(0)
            idle = idle + 1 if len(self.wire.written) == before else 0
            before = len(self.wire.written)

    def statuses(self) -> list[int]:
        return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.wire.written)]

    async def leave(self) -> None:
        self.application.let.set()
        await self.rest()
        self.protocol.connection_lost(None)
        await self.rest()


def post(target: str, body: bytes, chunks: Sequence[bytes] = ()) -> bytes:
    """A request with a body, in chunks where there are some."""
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\n"
    if not chunks:
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + coded + b"0\r\n\r\n"


async def answers(*pieces: bytes) -> Connection:
    """The connection after its pieces were sent."""
    connection = Connection()
    await connection.send(*pieces)
    await connection.leave()
    return connection


REQUESTS = (
    post("/a", b"x" * 70_000),
    post("/b", b"", [b"one", b"two" * 9000]),
    b"GET /c HTTP/1.1\r\nHost: localhost\r\n\r\n",
    post("/d", b""),
)


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, sum(map(len, REQUESTS))), max_size=12))
def test_requests_are_answered_in_order_however_they_are_cut(cuts: list[int]) -> None:
    data = b"".join(REQUESTS)
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges) if end > start]
    connection = asyncio.run(answers(*pieces))
    assert connection.wire.written == b"".join(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        for content in (
            b"/a host,content-length " + b"x" * 70_000,
            b"/b host,transfer-encoding onetwo" + b"two" * 8999,
            b"/c host ",
            b"/d host,content-length ",
        )
    )


def test_a_thousand_requests_in_one_piece_are_all_answered() -> None:
    one = b"GET /c HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = asyncio.run(answers(one * 1000))
    assert connection.statuses() == [200] * 1000


def test_what_follows_a_request_waits_unread_for_its_answer() -> None:
    async def follow() -> tuple[list[int], bool, int]:
        connection = Connection()
        connection.application.let.clear()
        second = post("/b", b"y" * 200_000)
        await connection.send(post("/a", b"") + second[:100_000])
        # The application listened for the client's leaving meanwhile, and so for more of it.
        await connection.send(second[100_000:])
        paused = connection.wire.paused
        begun = len(connection.application.requests)
        await connection.leave()
        return connection.statuses(), paused, begun

    assert asyncio.run(follow()) == ([200, 200], True, 1)


def test_a_client_that_sends_on_while_its_answer_is_computed_is_ended() -> None:
    async def follow() -> bool:
        connection = Connection()
        connection.application.let.clear()
        await connection.send(post("/a", b""))
        for _ in range(5):
            # A transport may hand on what it had read before it paused.
            connection.protocol.data_received(bytes(256 * 1024))
        closed = connection.wire.closed
        await connection.leave()
        return closed

    assert asyncio.run(follow())


def test_nonsense_after_a_request_costs_not_its_answer() -> None:
    connection = asyncio.run(answers(post("/a", b""), b"\x00nonsense\r\n\r\n"))
    assert connection.statuses() == [200, 400]
    assert connection.wire.closed


@pytest.mark.parametrize("line", [b"GET /", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: "])
def test_a_head_without_end_is_refused(line: bytes) -> None:
    connection = asyncio.run(answers(line, *[b"x" * 1000] * 100))
    assert connection.statuses() == [400]
    assert connection.wire.closed


@pytest.mark.parametrize("end", [b"0\r\nX-Long: ", b"0\r\n", b"1;"])
def test_a_body_that_goes_on_without_data_is_ended(end: bytes) -> None:
    """Trailers and extensions of chunks; the request is under way, so there is no answer."""
    begin = post("/a", b"", [b"one"]).removesuffix(b"0\r\n\r\n") + end
    filler = b"A: b\r\n" * 200 if end == b"0\r\n" else b"x" * 1200
    connection = asyncio.run(answers(begin, *[filler] * 100))
    assert connection.wire.closed
    assert connection.statuses() == []


class Refusing(Application):
    """An application that answers before it has read a body, and then ends the connection."""

    closes = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"3")] + [(b"connection", b"close")] * self.closes
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"no\n"})


def refusing(*, closes: bool) -> Connection:
    """A connection whose requests are refused unread."""
    connection, application = Connection(), Refusing()
    application.closes = closes
    connection.protocol.app = application
    return connection


@pytest.mark.parametrize("chunks", [(), (b"0" * 40_000, b"1" * 60_000)])
def test_who_still_sends_a_refused_body_gets_the_answer(chunks: Sequence[bytes]) -> None:
    async def run() -> None:
        whole = post("/", b"0" * 100_000, chunks)
        connection = refusing(closes=True)
        await connection.send(whole[:30_000])
        assert connection.statuses() == [413]
        # A connection with unread bytes is reset, and who sends gets no answer.
        assert not connection.wire.closed
        await connection.send(whole[30_000:])
        assert connection.wire.closed
        assert connection.statuses() == [413]
        await connection.leave()

    asyncio.run(run())


def test_a_refused_body_that_has_come_ends_the_connection_at_once() -> None:
    async def run() -> None:
        connection = refusing(closes=True)
        await connection.send(post("/", b"0"), post("/", b"0"))
        assert connection.wire.closed
        assert connection.statuses() == [413]
        await connection.leave()

    asyncio.run(run())


def test_after_a_refused_body_the_next_request_has_its_whole_time() -> None:
    async def run() -> None:
        connection = refusing(closes=False)
        protocol, whole = connection.protocol, post("/", b"0" * 50_000)
        await connection.send(whole[:1000])
        timer = protocol.timeout_keep_alive_task
        assert timer is not None
        await connection.send(whole[1000:2000])
        # The body of a refused request does not prolong its time.
        assert protocol.timeout_keep_alive_task is timer
        await connection.send(whole[2000:])
        assert timer.cancelled()
        between = protocol.timeout_keep_alive_task
        assert between is not None
        await connection.send(whole[:10])
        # Nor does silence shorten that of the head that follows.
        assert between.cancelled()
        head = protocol.timeout_keep_alive_task
        assert head is not None
        await connection.send(whole[10:20])
        assert protocol.timeout_keep_alive_task is head
        await connection.send(whole[20:])
        assert head.cancelled()
        assert connection.statuses() == [413, 413]
        await connection.leave()

    asyncio.run(run())


def test_trailers_are_no_headers() -> None:
    request = post("/a", b"", [b"one"]).removesuffix(b"\r\n") + b"Authorization: Bearer x\r\n\r\n"
    connection = asyncio.run(answers(request, post("/b", b"")))
    assert connection.statuses() == [200, 200]
    assert b"authorization" not in connection.wire.written
    assert all(len(scope["headers"]) == 2 for scope in connection.application.requests)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: a.example\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_heads_that_are_refused(head: bytes) -> None:
    connection = asyncio.run(answers(head))
    assert connection.statuses() == [400]
    assert connection.wire.closed
    assert not connection.application.requests
