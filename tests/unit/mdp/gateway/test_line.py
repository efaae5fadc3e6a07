"""A line's routes without sockets: triggers in, records out, one by one and as events."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from mdp.gateway import line as routes
from mdp.gateway import readers
from mdp.gateway.access import Tokens
from mdp.gateway.line import ServedLine
from mdp.line.items import Trigger
from mdp.line.triggers import TriggerQueue

RECORD = b'{"item":"17","class":"nut"}'
Reply = tuple[int, bytes]


class Web:
    """Requests to a line that is served."""

    def __init__(self, *, triggered: bool = True, tokens: Tokens | None = None) -> None:
        self.queue = TriggerQueue()
        begin: Callable[[str | None], Trigger] = lambda item: self.queue.add(item, 1.0, "now")  # noqa: E731
        self.served = ServedLine(begin if triggered else None, 0.05)
        self.app = self.served.app(tokens or Tokens([]))

    async def ask(
        self, path: str, body: bytes | None = None, leave: asyncio.Event | None = None, **more: str
    ) -> Reply:
        """Status and body; whoever reads events leaves with the event."""
        path, _, query = path.partition("?")
        headers = {"host": "localhost"} | {k.replace("_", "-"): v for k, v in more.items()}
        scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 40000),
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        waiting, sent = [body or b""], b""
        status = 0

        async def receive() -> dict[str, Any]:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent, status
            status = message.get("status", status)
            sent += message.get("body", b"")

        await self.app(scope, receive, send)
        return status, sent

    async def serve(self) -> None:
        """Hand records out by this loop."""
        self.served._loop = asyncio.get_running_loop()


def test_a_trigger_is_taken_and_its_record_awaited() -> None:
    async def play() -> list[Reply]:
        web = Web()
        await web.serve()
        taken = await web.ask("/trigger", b'{"item": "16"}')
        waiting = asyncio.create_task(web.ask("/trigger?wait=1", b"17"))
        while not (triggers := web.queue.take(0.0)) or triggers[-1].item != "17":
            await asyncio.sleep(0)
        web.served.publish(2, RECORD, triggers[-1].ticket)
        return [taken, await waiting]

    taken, awaited = asyncio.run(play())
    assert (taken[0], json.loads(taken[1])) == (202, {"item": "16", "time": "now"})
    assert awaited == (200, RECORD + b"\n")


def test_what_is_no_trigger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(web: Web, path: str, body: bytes | None) -> Reply:
        return await web.ask(path, body)

    web = Web()
    for path, body, status, text in (
        ("/trigger", b"17", 202, "17"),
        ("/trigger", b"17", 409, "item 17 came twice: it has one record"),
        ("/trigger", b"\xff", 400, "a trigger: expected an id of 1 to 128 printable characters"),
        ("/trigger", b"x" * 5000, 413, "4096"),
        ("/trigger?wait=yes", b"", 400, "wait: expected 0 or 1, got 'yes'"),
        ("/trigger", None, 405, "Method Not Allowed"),
        ("/nowhere", None, 404, "Not Found"),
        ("/v2/health/live", None, 200, "true"),
    ):
        told = asyncio.run(refuse(web, path, body))
        assert (told[0], text in told[1].decode()) == (status, True), told
    told = asyncio.run(refuse(Web(triggered=False), "/trigger", b""))
    assert (told[0], b"--trigger http" in told[1]) == (409, True)
    monkeypatch.setattr(routes, "MOST_AWAITED", 0)
    assert asyncio.run(refuse(web, "/trigger?wait=1", b"18"))[0] == 503
    ending = Web()
    ending.queue.end()
    told = asyncio.run(refuse(ending, "/trigger", b"17"))
    assert (told[0], b"the watcher is ending" in told[1]) == (503, True)
    closed = Web(tokens=Tokens(["a" * 16]))
    for path, body in (("/trigger", b""), ("/items", None)):
        assert asyncio.run(refuse(closed, path, body))[0] == 401


def test_an_item_without_a_record_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web()
    web.served._verdict_s = -1.0
    status, body = asyncio.run(web.ask("/trigger?wait=1", b""))
    assert (status, b"no record in time" in body) == (503, True)
    assert web.served._awaited == {}


def test_a_reader_gets_each_record_once_also_those_it_has_missed() -> None:
    async def play() -> tuple[Reply, Reply, Reply]:
        web = Web()
        await web.serve()
        web.served._run = "now"
        web.served.publish(1, b"{}", 1)
        leave = asyncio.Event()
        first = asyncio.create_task(web.ask("/items", leave=leave))
        again = asyncio.create_task(web.ask("/items", leave=leave, last_event_id="now-0"))
        while len(web.served._unread) < 2:
            await asyncio.sleep(0)
        web.served.publish(2, RECORD, 2)
        for _ in range(10):
            await asyncio.sleep(0)
        leave.set()
        wrong = await web.ask("/items", last_event_id="x")
        return await first, await again, wrong

    first, again, wrong = asyncio.run(play())
    event = b"id: now-2\nevent: item\ndata: " + RECORD + b"\n\n"
    assert first == (200, b":\n\n" + event)
    assert again == (200, b":\n\nid: now-1\nevent: item\ndata: {}\n\n" + event)
    assert (wrong[0], b"Last-Event-ID: expected an event's id, got 'x'" in wrong[1]) == (400, True)


def test_a_reader_that_does_not_read_has_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_UNREAD", 3)
    monkeypatch.setattr(readers, "MAX_WATCHERS", 1)

    async def play() -> tuple[Reply, Reply]:
        web = Web()
        await web.serve()
        leave = asyncio.Event()
        reading = asyncio.create_task(web.ask("/items", leave=leave))
        while not web.served._unread:
            await asyncio.sleep(0)
        refused = await web.ask("/items")
        # All of them before the reader has its turn.
        for number in range(1, 6):
            web.served._hand_out(number, b"{}", number)
        return refused, await reading

    refused, read = asyncio.run(play())
    assert (refused[0], b"at a time, and 1 of all" in refused[1]) == (503, True)
    assert read == (200, b":\n\n")


@pytest.mark.parametrize(("last", "first"), [("earlier-9", 1), ("9", 1), ("now-2", 3)])
def test_a_reader_of_an_earlier_run_has_missed_all_of_this_one(last: str, first: int) -> None:
    async def play() -> bytes:
        web, leave = Web(), asyncio.Event()
        await web.serve()
        web.served._run = "now"
        for number in range(1, 5):
            web.served._hand_out(number, b"{}", number)
        reading = asyncio.create_task(web.ask("/items", leave=leave, last_event_id=last))
        for _ in range(20):
            await asyncio.sleep(0)
        leave.set()
        return (await reading)[1]

    ids = [line for line in asyncio.run(play()).splitlines() if line.startswith(b"id: ")]
    assert ids == [b"id: now-%d" % number for number in range(first, 5)]


def test_runs_have_different_ids() -> None:
    assert Web().served._run != Web().served._run


def test_a_reader_who_has_missed_all_that_is_kept_gets_what_comes_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "MOST_UNREAD", 3)

    async def play() -> bytes:
        web, leave = Web(), asyncio.Event()
        await web.serve()
        for number in range(1, 6):
            web.served._hand_out(number, b"{}", number)
        reading = asyncio.create_task(web.ask("/items", leave=leave, last_event_id="earlier-9"))
        while not web.served._unread:
            await asyncio.sleep(0)
        web.served._hand_out(6, b"{}", 6)
        for _ in range(30):
            await asyncio.sleep(0)
        leave.set()
        return (await reading)[1]

    assert asyncio.run(play()).count(b"event: item") == 6


def test_a_reader_who_leaves_at_once_takes_no_place() -> None:
    async def play() -> list[int]:
        web = Web()
        await web.serve()
        leave = asyncio.Event()
        leave.set()
        # One after another, and then as many together as there are places.
        gone = [(await web.ask("/items", leave=leave))[0] for _ in range(40)]
        together = [web.ask("/items", leave=leave) for _ in range(readers.MAX_WATCHERS_OF_ONE + 1)]
        gone += sorted([reply[0] for reply in await asyncio.gather(*together)])
        assert not web.served._unread
        return gone

    assert asyncio.run(play()) == [200] * (40 + readers.MAX_WATCHERS_OF_ONE) + [503]


def test_a_record_before_or_after_the_server_stops_nobody() -> None:
    web = Web()
    web.served.publish(1, RECORD, 1)
    loop = asyncio.new_event_loop()
    web.served._loop = loop
    loop.close()
    web.served.publish(2, RECORD, 2)
    assert [*web.served._records] == []
