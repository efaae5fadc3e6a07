"""AsyncClient: waits for the answers of sessions in the running event loop."""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack, overload

from mdp.arguments import Errors, Raising, Streaming, Watching, check_pictures, check_timeout_s
from mdp.client import base
from mdp.client.crops import PictureOrScene, is_quick
from mdp.client.dispatcher import Call
from mdp.client.questions import PictureQuestion, Question
from mdp.client.status import DeviceStatus
from mdp.errors import InferenceError, InputError, PictureError
from mdp.requests.capture import DEFAULT_WITHIN_MS, Moment
from mdp.requests.deadline import Deadline
from mdp.requests.prediction import Prediction
from mdp.transport import CLOSED, this_process

#: How often a wait for devices polls those that are not there.
_POLL_S = 0.1


#: Pictures of a stream, in their order.
Pictures = Iterable[PictureOrScene] | AsyncIterable[PictureOrScene]


class AsyncClient(base.BaseClient):
    """The same for asyncio: many calls may be under way at once.

    async with mdp.AsyncClient.connect("fleet.toml") as client:
        prediction = await client.classify("cat.jpg", deadline_ms=80)

    Or `client = await mdp.AsyncClient.connect("fleet.toml")`, and in the end
    `await client.aclose()`. One that is neither awaited nor entered waits for the agents in its
    first call.
    """

    def __init__(self, fleet: str | os.PathLike[str], **options: Unpack[base.Connecting]) -> None:
        """See `connect`, which does the same."""
        super().__init__(fleet, **options)
        self._something_happened = asyncio.Event()
        #: The connection for new calls, and those whose calls have not ended.
        self._connections: list[base.FleetConnection] = []
        #: How long to wait for agents until the first call; 0 once that is done.
        self._connect_s = self._options.timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: set[asyncio.Future[None]] = set()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._connect_agents().__await__()

    async def __aenter__(self) -> Self:
        return await self._connect_agents()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _connect_agents(self) -> Self:
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
            self._listen(self._connection)
        if self._connect_s:
            await self._wait(min(self._connect_s, left_s), self._connection.is_settled)
            self._connect_s = 0.0

    def close(self) -> None:
        """Close the connections; calls under way and later ones raise InputError."""
        self._closed = True
        if self._process is not this_process():
            return
        for connection in list(self._connections):
            self._leave(connection)
        self._connection.transport.close()
        if self._loop is not None and not self._loop.is_closed():
            for pending in list(self._pending):
                if not pending.done():
                    pending.set_exception(InputError(CLOSED))
            self._something_happened.set()

    async def aclose(self) -> None:
        """Close the connections; see `close`."""
        self.close()

    async def classify(
        self, picture: PictureOrScene, *, deadline_ms: float = base.DEFAULT_DEADLINE_MS
    ) -> Prediction:
        """The fleet's answer; see `Client.classify`. Files are decoded in threads.

        Late replies to a cancelled call are ignored.
        """
        deadline = self._deadline(deadline_ms)
        async with self._connection_for(deadline) as connection:
            question = await self._cut(connection, picture, deadline)
            return await self._ask(connection, question, deadline)

    async def look(
        self,
        *,
        deadline_ms: float = base.DEFAULT_DEADLINE_MS,
        at: Moment = "latest",
        within_ms: float = DEFAULT_WITHIN_MS,
        maps: bool = False,
    ) -> Prediction:
        """Classify what the devices' own cameras see; see `Client.look`."""
        deadline = self._deadline(deadline_ms)
        question = self._camera_question(at, within_ms, maps=maps)
        async with self._connection_for(deadline) as connection:
            return await self._ask(connection, question, deadline)

    @overload
    def watch(
        self, *, errors: Raising = ..., **how: Unpack[Watching]
    ) -> AsyncIterator[Prediction]: ...

    @overload
    def watch(
        self, *, errors: Errors, **how: Unpack[Watching]
    ) -> AsyncIterator[Prediction | InferenceError]: ...

    def watch(self, *, errors: Errors = "raise", **how: Unpack[Watching]) -> AsyncIterator[Any]:
        """One look every `every_ms`; see `Client.watch`."""
        return self._watch(base.WatchOptions(errors=errors, **how))

    async def _watch(self, how: base.WatchOptions) -> AsyncIterator[Prediction | InferenceError]:
        while True:
            started_s = self._clock()
            answer: Prediction | InferenceError
            try:
                answer = await self.look(deadline_ms=how.deadline_ms, within_ms=how.within_ms)
            except InferenceError as error:
                if how.errors == "raise":
                    raise
                answer = error
            yield answer
            answered = isinstance(answer, Prediction)
            await asyncio.sleep(how.pause_s(self._clock() - started_s, answered=answered))

    @asynccontextmanager
    async def _connection_for(self, deadline: Deadline) -> AsyncIterator[base.FleetConnection]:
        """The connection of a new call until that ends; the first one waits for the agents."""
        self._check_usable()
        if self._connect_s or self._loop is None:
            # One device that is away takes no more of it.
            await self._first_wait(base.CONNECT_SHARE * deadline.remaining_s(self._clock()))
        user = object()
        connection = self._connection_of_call(user)
        try:
            yield connection
        finally:
            connection.users.discard(user)
            self._something_happened.set()

    async def _ask(
        self, connection: base.FleetConnection, question: Question, deadline: Deadline
    ) -> Prediction:
        self._check_usable()
        answered = asyncio.get_running_loop().create_future()
        self._pending.add(answered)
        answered.add_done_callback(self._pending.discard)

        def done(call: Call) -> None:
            if not answered.done():
                answered.set_result(None)

        self._drain(connection)
        call = connection.dispatcher.submit(question, deadline, done)
        self._drain(connection)
        self._set_alarm(connection)
        try:
            # Raises where closing the client has ended it.
            await answered
        except asyncio.CancelledError:
            connection.dispatcher.abandon(call)
            raise
        return call.result()

    def _set_alarm(self, connection: base.FleetConnection) -> None:
        """Have the loop ring when the next call of `connection` has to be told the time."""
        wake_s = connection.dispatcher.next_wake_s()
        # One that rings too soon is set again then.
        if connection.alarm_s <= wake_s < math.inf:
            return
        if connection.alarm is not None:
            connection.alarm.cancel()
        connection.alarm, connection.alarm_s = None, wake_s
        if wake_s < math.inf:
            left_s = max(0.0, wake_s - self._clock())
            loop = asyncio.get_running_loop()
            connection.alarm = loop.call_later(left_s, self._ring, connection)

    def _ring(self, connection: base.FleetConnection) -> None:
        connection.alarm, connection.alarm_s = None, math.inf
        if connection in self._connections:
            # What is in hand counts, also if the loop was too busy to take it in.
            self._drain(connection)
            connection.dispatcher.tick()
            self._set_alarm(connection)

    async def _cut(
        self, connection: base.FleetConnection, picture: PictureOrScene, deadline: Deadline
    ) -> PictureQuestion:
        if is_quick(picture):
            return connection.cut(picture)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def done() -> None:
            # The loop may have been closed since.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        cutter = connection.start_cut(picture, done)
        try:
            await asyncio.wait([ended], timeout=deadline.remaining_s(self._clock()))
        finally:
            ended.cancel()
            why = cutter.abandon() if cutter.is_alive() else ""
        if why:
            raise self._too_late(deadline, why)
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
        self, pictures: Pictures, *, errors: Errors = "raise", **how: Unpack[Streaming]
    ) -> AsyncIterator[Any]:
        """Answers for `pictures` in their order, as `Client.stream` gives them.

        While the next one of an asynchronous iterable is awaited, answers wait too.
        """
        check_pictures(pictures)
        return self._stream(pictures, base.StreamOptions(errors=errors, **how))

    @overload
    async def classify_many(
        self, pictures: Pictures, *, errors: Raising = ..., **how: Unpack[Streaming]
    ) -> list[Prediction]: ...

    @overload
    async def classify_many(
        self, pictures: Pictures, *, errors: Errors, **how: Unpack[Streaming]
    ) -> list[Prediction | InferenceError | PictureError]: ...

    async def classify_many(
        self, pictures: Pictures, *, errors: Errors = "raise", **how: Unpack[Streaming]
    ) -> list[Any]:
        """All answers of `stream`, which takes the same arguments, in a list."""
        return [answer async for answer in self.stream(pictures, errors=errors, **how)]

    async def _stream(
        self, pictures: Pictures, how: base.StreamOptions
    ) -> AsyncIterator[Prediction | InferenceError | PictureError]:
        waiting: deque[asyncio.Task[Prediction]] = deque()

        async def first() -> Prediction | InferenceError | PictureError:
            try:
                return await waiting.popleft()
            except (InferenceError, PictureError) as error:
                if how.errors == "raise":
                    raise
                return error

        try:
            async for picture in _each(pictures):
                call = self.classify(picture, deadline_ms=how.deadline_ms)
                waiting.append(asyncio.create_task(call))
                if len(waiting) >= how.in_flight:
                    yield await first()
            while waiting:
                yield await first()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def status(self, *, timeout_s: float = base.CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """The status of every device of the fleet, waiting at most `timeout_s` for slow ones."""
        check_timeout_s(timeout_s)
        self._check_usable()
        await self._first_wait(timeout_s)
        asked = self._ask_all()
        self._drain(self._connection)
        await self._wait(timeout_s, lambda: self._all_told(asked))
        return self._device_statuses(asked)

    async def reload(self, *, timeout_s: float = base.CONNECT_TIMEOUT_S) -> None:
        """Read fleet.toml, its bundle and the key again, as `Client.reload` does.

        Calls that begin meanwhile do not wait. Returns when the last one that had begun before has
        ended.
        """
        check_timeout_s(timeout_s)
        self._check_usable()
        await self._first_wait(timeout_s)
        connection = base.FleetConnection(self._options, self._clock, stacklevel=2)
        self._listen(connection)
        try:
            await self._wait(timeout_s, connection.is_settled)
            connection = self._adopt(connection)
            # Each ends by its deadline.
            await self._wait(math.inf, lambda: not connection.users)
        finally:
            # The former one or, if that failed, the new one. Calls that somebody who gave up
            # waiting has left on the former one end with the client.
            if connection is not self._connection and not connection.users:
                self._leave(connection)

    def _listen(self, connection: base.FleetConnection) -> None:
        self._connections.append(connection)
        asyncio.get_running_loop().add_reader(
            connection.transport.fileno(), self._drain, connection
        )

    def _leave(self, connection: base.FleetConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(connection.transport.fileno())
            if connection.alarm is not None:
                connection.alarm.cancel()
                connection.alarm, connection.alarm_s = None, math.inf
            connection.transport.close()

    def _drain(self, connection: base.FleetConnection) -> None:
        """Take in what is there, of each device as much as for one turn of the loop."""
        if events := connection.transport.poll(0):
            connection.dispatcher.handle(events)
            self._something_happened.set()
            self._set_alarm(connection)
        if connection.transport.may_have_more and not connection.goes_on:
            connection.goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on, connection)

    def _go_on(self, connection: base.FleetConnection) -> None:
        connection.goes_on = False
        if connection in self._connections:
            self._drain(connection)

    async def _wait(self, timeout_s: float, reached: Callable[[], bool]) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            self._something_happened.clear()
            try:
                async with asyncio.timeout(min(left_s, _POLL_S)):
                    await self._something_happened.wait()
            except TimeoutError:
                # Those that are not there may have to be dialled again, which no event tells.
                for connection in self._connections:
                    self._drain(connection)
            self._check_usable()


async def _each(pictures: Pictures) -> AsyncIterator[PictureOrScene]:
    if isinstance(pictures, AsyncIterable):
        async for picture in pictures:
            yield picture
    else:
        for picture in pictures:
            yield picture
