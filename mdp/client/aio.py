"""AsyncClient: waits for the answers of sessions in the running event loop."""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack, overload

from mdp import arguments
from mdp.arguments import Errors, Raising, Streaming, Watching
from mdp.client.base import CONNECT_TIMEOUT_S, DEFAULT_DEADLINE_MS, Connection, Link, given
from mdp.client.crops import View, is_quick
from mdp.client.dispatcher import Answer
from mdp.client.status import DeviceStatus
from mdp.errors import InferenceError, PictureError
from mdp.fusion.fuse import Fusion
from mdp.pictures.crop import Picture
from mdp.requests.capture import (
    DEFAULT_EVERY_MS,
    DEFAULT_WITHIN_MS,
    Glance,
    Moment,
    checked_every_ms,
    glance_at,
)
from mdp.requests.deadline import checked_deadline_ms
from mdp.requests.hedging import DEFAULT_SHARE
from mdp.requests.prediction import Prediction
from mdp.transport import this_process

#: How often somebody who waits for devices looks after those that are not there.
_LOOK_S = 0.1


#: Pictures of a stream, in their order.
Pictures = Iterable[Picture] | AsyncIterable[Picture]


class AsyncClient(Connection):
    """The same for asyncio: many calls may be under way at once.

    async with mdp.AsyncClient.connect("fleet.toml") as client:
        prediction = await client.classify("cat.jpg", deadline_ms=80)

    Or `client = await mdp.AsyncClient.connect("fleet.toml")`, and in the end
    `await client.aclose()`.
    """

    @classmethod
    def connect(
        cls,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        hedge_after_ms: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
    ) -> Self:
        """Connect to the agents of fleet.toml, as `Client.connect` does.

        To be awaited, or used in an `async with`. Otherwise the first call waits for the agents.
        """
        return cls(
            fleet,
            fusion=fusion,
            key=key,
            insecure=insecure,
            timeout_s=timeout_s,
            hedge_after_ms=hedge_after_ms,
            hedge_share=hedge_share,
            cascade=cascade,
        )

    def __init__(
        self,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        hedge_after_ms: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
    ) -> None:
        """See `connect`, which does the same."""
        arguments.check_timeout_s(timeout_s)
        super().__init__(
            fleet,
            fusion=fusion,
            key=key,
            insecure=insecure,
            hedge_after_ms=hedge_after_ms,
            hedge_share=hedge_share,
            cascade=cascade,
        )
        self._something_happened = asyncio.Event()
        #: The link for new calls, and those whose calls have not ended.
        self._links: list[Link] = []
        #: How long to wait for agents until the first call; 0 once that is done.
        self._connect_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: set[asyncio.Future[Answer]] = set()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._connected().__await__()

    async def __aenter__(self) -> Self:
        return await self._connected()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _connected(self) -> Self:
        """This client, with the agents connected or waited for once."""
        self._check_usable()
        try:
            await self._first_wait(math.inf)
        except BaseException:  # cancelled, before anybody has the client
            self.close()
            raise
        return self

    async def _first_wait(self, left_s: float) -> None:
        """Wait for the agents, as long as nobody has; for `left_s` at most."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._listen(self._link)
        if self._connect_s:
            await self._wait(min(self._connect_s, left_s), self._link.settled)
            self._connect_s = 0.0

    def close(self) -> None:
        """Close the connections; calls under way and later ones raise InputError."""
        self._closed = True
        if self._process is not this_process():
            return
        for link in list(self._links):
            self._leave(link)
        self._link.transport.close()
        if self._loop is not None and not self._loop.is_closed():
            for answer in self._answers:
                answer.cancel()
            self._something_happened.set()

    async def aclose(self) -> None:
        """Close the connections; see `close`."""
        self.close()

    async def classify(
        self, picture: Picture, *, deadline_ms: float = DEFAULT_DEADLINE_MS
    ) -> Prediction:
        """The fleet's answer; see `Client.classify`. Files are decoded in threads."""
        started_s = self._clock()
        return await self._answered(picture, started_s, checked_deadline_ms(deadline_ms))

    async def look(
        self,
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        at: Moment = "latest",
        within_ms: float = DEFAULT_WITHIN_MS,
    ) -> Prediction:
        """What the devices' own cameras see; see `Client.look`."""
        started_s = self._clock()
        deadline_ms = checked_deadline_ms(deadline_ms)
        glance = glance_at(at, within_ms=within_ms, now_s=started_s)
        return await self._answered(glance, started_s, deadline_ms)

    @overload
    def watch(
        self, *, errors: Raising = ..., **how: Unpack[Watching]
    ) -> AsyncIterator[Prediction]: ...

    @overload
    def watch(
        self, *, errors: Errors, **how: Unpack[Watching]
    ) -> AsyncIterator[Prediction | InferenceError]: ...

    def watch(
        self,
        *,
        every_ms: float = DEFAULT_EVERY_MS,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        within_ms: float = DEFAULT_WITHIN_MS,
        errors: Errors = "raise",
    ) -> AsyncIterator[Any]:
        """One look every `every_ms`; see `Client.watch`."""
        arguments.check_errors(errors)
        deadline_ms, every_ms = checked_deadline_ms(deadline_ms), checked_every_ms(every_ms)
        glance_at("latest", within_ms=within_ms, now_s=self._clock())
        return self._watch(every_ms, deadline_ms, within_ms, errors)

    async def _watch(
        self, every_ms: float, deadline_ms: float, within_ms: float, errors: Errors
    ) -> AsyncIterator[Prediction | InferenceError]:
        while True:
            started_s = self._clock()
            answer: Answer
            try:
                answer = await self.look(deadline_ms=deadline_ms, within_ms=within_ms)
            except InferenceError as error:
                answer = error
            yield answer if errors == "yield" else given(answer)
            await asyncio.sleep(max(0.0, started_s + every_ms / 1e3 - self._clock()))

    async def _answered(
        self, asked: Picture | Glance, started_s: float, deadline_ms: float
    ) -> Prediction:
        self._check_usable()
        if self._connect_s or self._loop is None:
            await self._first_wait(self._left_s(started_s, deadline_ms))
        link = self._link
        link.users += 1
        try:
            return given(await self._answer(link, asked, started_s, deadline_ms))
        finally:
            link.users -= 1
            self._something_happened.set()

    async def _answer(
        self, link: Link, asked: Picture | Glance, started_s: float, deadline_ms: float
    ) -> Answer:
        views = await self._views(link, asked, started_s, deadline_ms)
        self._check_usable()
        loop, exchange = asyncio.get_running_loop(), link.exchange
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        def done(came: Answer) -> None:
            if not answer.done():
                answer.set_result(came)

        self._drain(link)
        exchange.submit(views, started_s=started_s, deadline_ms=deadline_ms, done=done)
        self._drain(link)
        while not answer.done():
            left_s = exchange.next_wake_s() - self._clock()
            if math.isfinite(left_s):
                await asyncio.wait([answer], timeout=max(0.0, left_s))
            # What is in hand counts, also if the loop was too busy to take it in.
            self._drain(link)
            exchange.tick()
        return answer.result()

    async def _views(
        self, link: Link, asked: Picture | Glance, started_s: float, deadline_ms: float
    ) -> Mapping[int, View] | Glance:
        if isinstance(asked, Glance):
            return asked
        if is_quick(asked):
            return link.views(asked)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            # The loop may have been closed since.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        cutter, waiting = link.start_views(asked, done), asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait([waiting], timeout=self._left_s(started_s, deadline_ms))
        finally:
            waiting.cancel()
            why = cutter.abandon() if cutter.is_alive() else ""
        if why:
            raise self._too_late(deadline_ms, why)
        return cutter.result()

    @overload
    def stream(
        self, pictures: Pictures, *, errors: Raising = ..., **how: Unpack[Streaming]
    ) -> AsyncIterator[Prediction]: ...

    @overload
    def stream(
        self, pictures: Pictures, *, errors: Errors, **how: Unpack[Streaming]
    ) -> AsyncIterator[Prediction | InferenceError | PictureError]: ...

    def stream(
        self,
        pictures: Pictures,
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        in_flight: int = 2,
        errors: Errors = "raise",
    ) -> AsyncIterator[Any]:
        """Answers for `pictures` in their order, as `Client.stream` gives them.

        While the next one of an asynchronous iterable is awaited, answers wait too.
        """
        arguments.check_stream(pictures, in_flight, errors)
        deadline_ms = checked_deadline_ms(deadline_ms)
        return self._stream(pictures, deadline_ms, in_flight, errors)

    async def _stream(
        self, pictures: Pictures, deadline_ms: float, in_flight: int, errors: Errors
    ) -> AsyncIterator[Prediction | InferenceError | PictureError]:
        waiting: deque[asyncio.Task[Prediction]] = deque()

        async def first() -> Prediction | InferenceError | PictureError:
            try:
                return await waiting.popleft()
            except (InferenceError, PictureError) as error:
                if errors == "yield":
                    return error
                raise

        try:
            async for picture in _each(pictures):
                waiting.append(asyncio.create_task(self.classify(picture, deadline_ms=deadline_ms)))
                if len(waiting) >= in_flight:
                    yield await first()
            while waiting:
                yield await first()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """How every device of the fleet is, waiting at most `timeout_s` for those that are slow."""
        arguments.check_timeout_s(timeout_s)
        self._check_usable()
        await self._first_wait(timeout_s)
        asked = self._ask_all()
        self._drain(self._link)
        await self._wait(timeout_s, lambda: self._all_told(asked))
        return self._device_statuses(asked)

    async def reload(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Read fleet.toml, its bundle and the key again, as `Client.reload` does.

        Calls that begin meanwhile do not wait. Returns when the last one that had begun before has
        ended.
        """
        arguments.check_timeout_s(timeout_s)
        self._check_usable()
        await self._first_wait(timeout_s)
        link = Link(self._options, self._clock, stacklevel=2)
        self._listen(link)
        try:
            await self._wait(timeout_s, link.settled)
            link = self._adopt(link)
            # Each ends by its deadline.
            await self._wait(math.inf, lambda: not link.users)
        finally:
            # The former one or, if that failed, the new one. Calls that somebody who gave up
            # waiting has left on the former one end with the client.
            if link is not self._link and not link.users:
                self._leave(link)

    def _listen(self, link: Link) -> None:
        self._links.append(link)
        asyncio.get_running_loop().add_reader(link.transport.fileno(), self._drain, link)

    def _leave(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(link.transport.fileno())
            link.transport.close()

    def _drain(self, link: Link) -> None:
        """Take in what is there, of each device as much as for one turn of the loop."""
        if events := link.transport.poll(0):
            link.exchange.handle(events)
            self._something_happened.set()
        if link.transport.unfinished and not link.goes_on:
            link.goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on, link)

    def _go_on(self, link: Link) -> None:
        link.goes_on = False
        if link in self._links:
            self._drain(link)

    async def _wait(self, timeout_s: float, reached: Callable[[], bool]) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            self._something_happened.clear()
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._something_happened.wait()
            except TimeoutError:
                # Those that are not there may have to be dialled again, which no event tells.
                for link in self._links:
                    self._drain(link)
            self._check_usable()


async def _each(pictures: Pictures) -> AsyncIterator[Picture]:
    if isinstance(pictures, AsyncIterable):
        async for picture in pictures:
            yield picture
    else:
        for picture in pictures:
            yield picture
