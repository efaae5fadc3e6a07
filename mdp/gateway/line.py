"""A line over HTTP: triggers in, records of its items out, one by one or as events."""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mdp.errors import MDPError
from mdp.gateway.access import Tokens
from mdp.gateway.app import Guard, error_response
from mdp.gateway.bodies import Bodies
from mdp.gateway.readers import QUIET_S, Readers
from mdp.gateway.refusals import Refusal, busy, refusal_of
from mdp.gateway.replies import json_response
from mdp.line.items import Trigger
from mdp.line.triggers import MAX_PAYLOAD_BYTES, DuplicateItemError, LineEndedError, item_of

#: Records that a reader who comes back can still get, by `Last-Event-ID`.
KEPT_RECORDS = 1000
#: Records that wait for a reader who does not read; then its stream ends, and it can come back.
MOST_UNREAD = 1000
#: Triggers whose callers wait for the record.
MOST_AWAITED = 100


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return error_response(Refusal(error.status_code, error.detail, error.headers or {}))
    if isinstance(error, MDPError):
        return error_response(refusal_of(error))
    # What it was goes to the log.
    return error_response(Refusal(500, "unforeseen error: the log says more"))


class _Unread:
    """Records that wait for one reader."""

    def __init__(self) -> None:
        #: Records of before it came. They do not count as unread: there are as many as are kept.
        self.missed: list[tuple[int, bytes]] = []
        #: Those since; None: too many.
        self.new: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()

    def add(self, number: int, record: bytes) -> None:
        """Add a record, or end the stream of a reader who does not read."""
        if self.new.qsize() >= MOST_UNREAD:
            while not self.new.empty():
                self.new.get_nowait()
            self.new.put_nowait(None)
        else:
            self.new.put_nowait((number, record))


class ServedLine:
    """Routes of a line, and what they share; records come from another thread."""

    def __init__(self, trigger: Callable[[str | None], Trigger] | None, verdict_s: float) -> None:
        """`trigger` begins an item; None where triggers come from elsewhere.

        A caller that waits for its item's record waits for `verdict_s` and a little.
        """
        self._trigger, self._verdict_s = trigger, verdict_s
        #: Of this run of the watcher, in its events' ids: numbers of records begin anew in each.
        self._run = secrets.token_hex(4)
        self._bodies = Bodies()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Numbers and records of the latest items.
        self._records: deque[tuple[int, bytes]] = deque(maxlen=KEPT_RECORDS)
        self._readers = Readers()
        #: What waits for each of them.
        self._unread: set[_Unread] = set()
        #: By the trigger's ticket.
        self._awaited: dict[int, asyncio.Future[bytes]] = {}
        #: Whether the server is ending, which streams of events would hold up.
        self.ending: Callable[[], bool] = lambda: False

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        yield
        self._loop = None

    def app(self, tokens: Tokens) -> Guard:
        """The ASGI application."""
        routes = [
            Route("/trigger", self.trigger, methods=["POST"]),
            Route("/items", self.items),
            Route("/v2/health/live", self.live),
        ]
        handlers: Any = {MDPError: _refuse, HTTPException: _refuse, Exception: _refuse}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        return Guard(app, tokens)

    def publish(self, number: int, record: bytes, ticket: int) -> None:
        """Hand out a record, JSON in one line; any thread, never waits."""
        if (loop := self._loop) is not None:
            # The loop may have been closed since.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._hand_out, number, record, ticket)

    def _hand_out(self, number: int, record: bytes, ticket: int) -> None:
        self._records.append((number, record))
        awaited = self._awaited.pop(ticket, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(record)
        for unread in self._unread:
            unread.add(number, record)

    async def live(self, request: Request) -> Response:
        """Tell that the line is watched."""
        return json_response({"live": True})

    async def trigger(self, request: Request) -> Response:
        """Begin an item, its id in the body or none; with `?wait=1` its record is the answer."""
        if self._trigger is None:
            raise Refusal(409, "this line is triggered otherwise: expected --trigger http")
        async with self._bodies.hold(request, MAX_PAYLOAD_BYTES) as body:
            item = item_of(bytes(body))
        wait = request.query_params.get("wait", "0")
        if wait not in ("0", "1"):
            raise Refusal(400, f"wait: expected 0 or 1, got {wait[:20]!r}")
        if wait == "1" and len(self._awaited) >= MOST_AWAITED:
            raise busy(f"expected at most {MOST_AWAITED} callers that wait")
        try:
            trigger = self._trigger(item)
        except DuplicateItemError as error:
            raise Refusal(409, str(error)) from error
        except LineEndedError as error:
            raise busy(str(error)) from error
        if wait == "0":
            return json_response({"item": item, "time": trigger.time}, 202)
        # The record comes by this loop, and so not before this is in place.
        future = asyncio.get_running_loop().create_future()
        self._awaited[trigger.ticket] = future
        try:
            async with asyncio.timeout(self._verdict_s + 1.0):
                record = await future
        except TimeoutError as error:
            raise busy("no record in time: expected fewer triggers") from error
        finally:
            self._awaited.pop(trigger.ticket, None)
        return Response(record + b"\n", media_type="application/json")

    async def items(self, request: Request) -> Response:
        """Server-sent events: each item's record, from now on or behind `Last-Event-ID`."""
        unread, behind = _Unread(), self._behind(request.headers.get("last-event-id", ""))
        return self._readers.stream(request, self._events(unread), self._reading(unread, behind))

    def _behind(self, last: str) -> float:
        """The number behind which a reader wants records, from its `Last-Event-ID`.

        Infinity: those from now on. One of another run has missed all of this one. Raises Refusal.
        """
        if not last:
            return math.inf
        run, _, number = last.rpartition("-")
        if not (number.isascii() and number.isdecimal() and len(number) < 19):
            raise Refusal(400, f"Last-Event-ID: expected an event's id, got {last[:20]!r}")
        return int(number) if run == self._run else -math.inf

    @contextmanager
    def _reading(self, unread: _Unread, behind: float) -> Iterator[None]:
        """In this block `unread` gets each record; it has the latest ones `behind` a number."""
        unread.missed = [one for one in self._records if one[0] > behind]
        self._unread.add(unread)
        try:
            yield
        finally:
            self._unread.discard(unread)

    async def _events(self, unread: _Unread) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        # Proxies and clients see that the stream has begun.
        yield b":\n\n"
        for number, record in unread.missed:
            if self.ending():
                return
            yield self._event(number, record)
        unread.missed.clear()
        sent_s = loop.time()
        while not self.ending():
            # Looks around now and then whether the server is ending.
            try:
                async with asyncio.timeout(1.0):
                    newest = await unread.new.get()
            except TimeoutError:
                if loop.time() - sent_s > QUIET_S:
                    yield b":\n\n"
                    sent_s = loop.time()
                continue
            if newest is None:
                return
            yield self._event(*newest)
            sent_s = loop.time()

    def _event(self, number: int, record: bytes) -> bytes:
        return b"id: %s-%d\nevent: item\ndata: %s\n\n" % (self._run.encode(), number, record)
