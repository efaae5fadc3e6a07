"""Client and AsyncClient: two ways to wait for the same sessions.

`Client` drives its sockets in the calling thread, so that a call costs no hand-over between
threads; `AsyncClient` drives them in the running event loop. Neither starts a thread that stays,
but both decode pictures beside themselves, so that a slow decoder cannot hold up an answer.
"""

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from mdp.bundle import Bundle
from mdp.crop import Picture
from mdp.errors import DeadlineExceeded, InferenceError, InputError
from mdp.exchange import (
    Answer,
    Clock,
    Exchange,
    View,
    checked_deadline_ms,
    cut_views,
    reserve_s,
)
from mdp.fleet import Fleet, read_fleet
from mdp.fusion import Fusion
from mdp.prediction import Prediction
from mdp.session import NO_TIME
from mdp.status import DeviceStatus, device_status
from mdp.transport import Dealers

DEFAULT_DEADLINE_MS = 1000.0
#: How long `connect` waits for devices that do not answer.
CONNECT_TIMEOUT_S = 1.0
#: An array up to this many pixels is cut faster than a thread is started to do it.
QUICK_PIXELS = 1_000_000
#: How often a thread looks whether another one's turn has also brought its own answer.
_LOOK_S = 0.005


class _Connection:
    """What both clients hold: a fleet, its bundle, the sockets, and the calls in flight."""

    def __init__(
        self, fleet: str | os.PathLike[str], *, fusion: Fusion, clock: Clock = time.monotonic
    ) -> None:
        self.fleet: Fleet
        self.bundle: Bundle
        self.fleet, self.bundle = read_fleet(Path(fleet))
        self._clock = clock
        self._transport = Dealers({entry.device: entry.address for entry in self.fleet.devices})
        try:
            self._exchange = Exchange(
                self.fleet, self.bundle, self._transport, clock=clock, fusion=fusion
            )
        except BaseException:
            self._transport.close()
            raise

    @property
    def counters(self) -> dict[str, int]:
        """Replies that were ignored: `late`, `duplicate` and `malformed`."""
        return dict(self._exchange.counters)

    def _views(self, picture: Picture) -> dict[int, View]:
        return cut_views(picture, self._exchange.assignments)

    def _too_late(self, deadline_ms: float, why: str) -> DeadlineExceeded:
        outcomes = {entry.device: NO_TIME for entry in self.fleet.devices}
        return DeadlineExceeded(f"no answer within {deadline_ms:g} ms: {why}", outcomes)

    def _all_connected(self) -> bool:
        return len(self._transport.connected) == len(self.fleet.devices)

    def _left_s(self, started_s: float, deadline_ms: float) -> float:
        decide_s = started_s + deadline_ms / 1e3 - reserve_s(deadline_ms)
        return max(0.0, decide_s - self._clock())

    def _ask_all(self) -> set[str]:
        """Ask every connected device for its status; returns those asked."""
        self._exchange.handle(self._transport.poll(0))
        self._exchange.statuses.clear()
        return {entry.device for entry in self.fleet.devices if self._exchange.ask(entry.device)}

    def _all_told(self, asked: set[str]) -> bool:
        return asked & self._transport.connected <= self._exchange.statuses.keys()

    def _device_statuses(self, asked: set[str]) -> list[DeviceStatus]:
        return [
            device_status(
                entry,
                self._exchange.statuses.get(entry.device),
                self.bundle,
                silent=entry.device in asked & self._transport.connected,
            )
            for entry in self.fleet.devices
        ]


class Client(_Connection):
    """Classifies pictures with a fleet; calls from several threads take turns.

    with mdp.Client.connect("fleet.toml") as client:
        prediction = client.classify("cat.jpg", deadline_ms=80)
    """

    def __init__(self, fleet: str | os.PathLike[str], *, fusion: Fusion = "stacked") -> None:
        super().__init__(fleet, fusion=fusion)
        self._turn = threading.Lock()

    @classmethod
    def connect(
        cls,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Self:
        """Connect to the agents of fleet.toml; those not there after `timeout_s` may come later.

        Raises ConfigError if the fleet or its bundle is wrong.
        """
        client = cls(fleet, fusion=fusion)
        client._wait(timeout_s, client._all_connected)
        return client

    def classify(self, picture: Picture, *, deadline_ms: float = DEFAULT_DEADLINE_MS) -> Prediction:
        """The fleet's answer for a path, a Pillow image or a uint8 array `[H, W, 3]`.

        The deadline counts from this call, decoding and cropping included. Raises InputError,
        PictureError, or InferenceError if no device contributes in time.
        """
        started_s = self._clock()
        deadline_ms = checked_deadline_ms(deadline_ms)
        answers: list[Answer] = []
        views = self._views_in_time(picture, started_s, deadline_ms)
        with self._in_turn(started_s, deadline_ms):
            self._submit(views, started_s, deadline_ms, answers)
            while not answers:
                self._step()
        return _given(answers[0])

    def stream(
        self,
        pictures: Iterable[Picture],
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        in_flight: int = 2,
        errors: Literal["raise", "yield"] = "raise",
    ) -> Iterator[Prediction | InferenceError]:
        """Answers for `pictures` in their order, with up to `in_flight` of them under way.

        Each deadline counts from when its picture was taken from `pictures`. With
        `errors="yield"` an InferenceError takes the place of its picture's answer.
        """
        deadline_ms = checked_deadline_ms(deadline_ms)
        if in_flight < 1:
            raise InputError(f"in_flight: expected at least 1, got {in_flight}")
        return self._stream(iter(pictures), deadline_ms, in_flight, errors)

    def _stream(
        self,
        pictures: Iterator[Picture],
        deadline_ms: float,
        in_flight: int,
        errors: Literal["raise", "yield"],
    ) -> Iterator[Prediction | InferenceError]:
        waiting: deque[list[Answer]] = deque()
        exhausted = False
        while waiting or not exhausted:
            while not exhausted and len(waiting) < in_flight:
                try:
                    picture = next(pictures)
                except StopIteration:
                    exhausted = True
                    break
                started_s = self._clock()
                waiting.append([])
                try:
                    views = self._views_in_time(picture, started_s, deadline_ms)
                    with self._in_turn(started_s, deadline_ms):
                        self._submit(views, started_s, deadline_ms, waiting[-1])
                except InferenceError as error:
                    waiting[-1].append(error)
            if not waiting:
                break
            answer = self._awaited(waiting.popleft())
            yield answer if errors == "yield" else _given(answer)

    def _awaited(self, answers: list[Answer]) -> Answer:
        """The answer of a call under way, which another thread's turn may bring as well."""
        while not answers:
            if self._turn.acquire(timeout=_LOOK_S):
                try:
                    while not answers:
                        self._step()
                finally:
                    self._turn.release()
        return answers[0]

    def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """How every device of the fleet is, waiting at most `timeout_s` for those that are slow."""
        with self._turn:
            asked = self._ask_all()
            self._wait(timeout_s, lambda: self._all_told(asked))
            return self._device_statuses(asked)

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _in_turn(self, started_s: float, deadline_ms: float) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._left_s(started_s, deadline_ms)):
            raise self._too_late(deadline_ms, "another thread's call is under way")
        try:
            yield
        finally:
            self._turn.release()

    def _views_in_time(
        self, picture: Picture, started_s: float, deadline_ms: float
    ) -> dict[int, View]:
        """Every member's view; a decoder that is not done in time is left to itself."""
        if isinstance(picture, np.ndarray) and picture.size <= 3 * QUICK_PIXELS:
            return self._views(picture)
        done: list[dict[int, View] | BaseException] = []

        def cut() -> None:
            try:
                done.append(self._views(picture))
            except BaseException as error:  # raised again in the caller's thread
                done.append(error)

        cutter = threading.Thread(target=cut, name="cut", daemon=True)
        cutter.start()
        cutter.join(self._left_s(started_s, deadline_ms))
        if not done:
            raise self._too_late(deadline_ms, "the picture was not decoded by then")
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0]

    def _submit(
        self,
        views: dict[int, View],
        started_s: float,
        deadline_ms: float,
        answers: list[Answer],
    ) -> None:
        # Connections that went or came since the last call are settled before anyone is asked.
        self._exchange.handle(self._transport.poll(0))
        self._exchange.submit(
            views, started_s=started_s, deadline_ms=deadline_ms, done=answers.append
        )

    def _step(self) -> None:
        """Wait for the next event or the next moment to decide, and take it in."""
        left_s = self._exchange.next_wake_s() - self._clock()
        self._exchange.handle(self._transport.poll(max(0.0, left_s)))
        self._exchange.tick()

    def _wait(self, timeout_s: float, reached: Callable[[], bool]) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            wake_s = self._exchange.next_wake_s() - self._clock()
            self._exchange.handle(self._transport.poll(max(0.0, min(left_s, wake_s))))
            self._exchange.tick()


class AsyncClient(_Connection):
    """The same for asyncio: many calls may be under way at once.

    async with mdp.AsyncClient.connect("fleet.toml") as client:
        prediction = await client.classify("cat.jpg", deadline_ms=80)
    """

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> AsyncIterator[Self]:
        """Connect to the agents of fleet.toml, as `Client.connect` does, for an `async with`."""
        client = cls(fleet, fusion=fusion)
        loop, descriptor = asyncio.get_running_loop(), client._transport.fileno()
        loop.add_reader(descriptor, client._drain)
        try:
            await client._wait(timeout_s, client._all_connected)
            yield client
        finally:
            loop.remove_reader(descriptor)
            client._transport.close()

    def __init__(self, fleet: str | os.PathLike[str], *, fusion: Fusion = "stacked") -> None:
        super().__init__(fleet, fusion=fusion)
        self._something_happened = asyncio.Event()

    async def classify(
        self, picture: Picture, *, deadline_ms: float = DEFAULT_DEADLINE_MS
    ) -> Prediction:
        """The fleet's answer; see `Client.classify`. Decoding happens in a thread."""
        started_s = self._clock()
        deadline_ms = checked_deadline_ms(deadline_ms)
        cutting = asyncio.to_thread(self._views, picture)
        try:
            views = await asyncio.wait_for(cutting, self._left_s(started_s, deadline_ms))
        except TimeoutError:
            raise self._too_late(deadline_ms, "the picture was not decoded by then") from None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        def done(given: Answer) -> None:
            if not answer.done():
                answer.set_result(given)

        self._drain()
        self._exchange.submit(views, started_s=started_s, deadline_ms=deadline_ms, done=done)
        self._drain()
        while not answer.done():
            left_s = self._exchange.next_wake_s() - self._clock()
            if math.isfinite(left_s):
                await asyncio.wait([answer], timeout=max(0.0, left_s))
            # What is in hand counts, also if the loop was too busy to take it in.
            self._drain()
            self._exchange.tick()
        return _given(answer.result())

    async def stream(
        self,
        pictures: Iterable[Picture],
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        in_flight: int = 2,
    ) -> AsyncIterator[Prediction]:
        """Answers for `pictures` in their order, with up to `in_flight` of them under way."""
        if in_flight < 1:
            raise InputError(f"in_flight: expected at least 1, got {in_flight}")
        waiting: deque[asyncio.Task[Prediction]] = deque()
        try:
            for picture in pictures:
                waiting.append(asyncio.create_task(self.classify(picture, deadline_ms=deadline_ms)))
                if len(waiting) >= in_flight:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """How every device of the fleet is, waiting at most `timeout_s` for those that are slow."""
        asked = self._ask_all()
        self._drain()
        await self._wait(timeout_s, lambda: self._all_told(asked))
        return self._device_statuses(asked)

    def _drain(self) -> None:
        """Take in everything that is there; also what a send has taken off the descriptor."""
        while events := self._transport.poll(0):
            self._exchange.handle(events)
            self._something_happened.set()

    async def _wait(self, timeout_s: float, reached: Callable[[], bool]) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            self._something_happened.clear()
            try:
                await asyncio.wait_for(self._something_happened.wait(), left_s)
            except TimeoutError:
                return


def _given(answer: Answer) -> Prediction:
    if isinstance(answer, InferenceError):
        raise answer
    return answer
