"""A client of the soak, in a process of its own, that calls at a given rate.

    python -m benchmarks.soak.client --fleet FILE --gateway HOST:PORT --truth FILE --style STYLE ...

STYLE is `sync` (threads of one client), `stream` (several pictures a call), `async`, or over HTTP
`classify` (a picture as a file) or `infer` (some as a tensor). The truth is a JSON object, a
bundle's digest -> what its labels begin with. With --follow, the client reads a changed fleet file
or bundle again.

Reads a load a line, {"seconds", "rate" (pictures a second; null: as many as can be), "at_once"
(calls, for those), "goes_on" (whether it counts on)}, and writes its result as a line. Memory does
not grow with the number of calls.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.options import arguments
from benchmarks.soak.over_http import Callers
from benchmarks.soak.pictures import LEVELS, draw, picture_of
from benchmarks.soak.tally import Answer, CallFailed, Outcome, Tally
from mdp import AsyncClient, Client
from mdp.client.following import FollowedFiles
from mdp.errors import InferenceError
from mdp.files import read_json
from mdp.pictures.crop import Pixels
from mdp.requests.prediction import Prediction

CONNECT_S = 60.0
#: Pictures of a call, in turns, and how many of a stream are under way.
STREAM_OF, IN_FLIGHT = (12,), 6
TENSORS_OF = (1, 3)
#: Calls under way at most, in seconds of the rate: a machine that is slower than when its capacity
#: was measured does not fall ever further behind.
HELD_S = 0.75
#: Between two checks whether fleet file or bundle have changed.
FOLLOW_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """A way of asking for pictures."""

    #: What came of pictures of these numbers, in their order.
    ask: Callable[[Sequence[int]], Awaitable[list[Outcome]]]
    #: Threads that ask; 0: any number of calls may be under way.
    threads: int = 0
    #: How many pictures one call has, in turns.
    sizes: tuple[int, ...] = (1,)
    counters: Callable[[], object] = dict


def outcome(answer: Prediction | InferenceError | Exception) -> Answer | CallFailed:
    """A client's answer, or the name of the error in its place."""
    if isinstance(answer, Prediction):
        return Answer.of(answer)
    return CallFailed(type(answer).__name__)


async def play(load: dict[str, Any], tally: Tally, asker: Asker, numbers: Iterator[int]) -> None:
    """Begin the calls of a load, and wait for their ends; no burst makes up for late ones."""
    rate, under_way = load["rate"], set[asyncio.Task[None]]()
    waits = bool(asker.threads) or rate is None
    most = asker.threads or (load["at_once"] if rate is None else max(8, HELD_S * rate))

    async def call(asked: Sequence[int]) -> None:
        tickets = [tally.begin(number) for number in asked]
        for ticket, (answer, took_s) in zip(tickets, await asker.ask(asked), strict=True):
            tally.end(ticket, answer, took_s)

    due_s = now_s = time.monotonic()
    until_s = due_s + load["seconds"]
    for size in itertools.cycle(asker.sizes):
        if max(due_s, now_s := time.monotonic()) >= until_s:
            break
        await asyncio.sleep(max(0.0, due_s - now_s))
        if rate is not None:
            due_s = max(due_s + size / rate, time.monotonic() - 0.1)
        if len(under_way) >= most:
            tally.counts["held back"] += size
            continue
        under_way.add(task := asyncio.create_task(call([next(numbers) for _ in range(size)])))
        task.add_done_callback(under_way.discard)
        while waits and len(under_way) >= most:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    if under_way:
        # A call that never ends is left open in the tally; one that fails ends the client.
        done, _ = await asyncio.wait(under_way, timeout=CONNECT_S)
        for task in done:
            task.result()


def numbers_of(seed: int) -> Iterator[int]:
    """Numbers of colours, none twice in a row."""
    chance, number = random.Random(seed), 0
    while True:
        number = draw(chance, number)
        yield number


class Asking:
    """The styles of asking, over one client or over HTTP."""

    def __init__(self, options: Any, stack: AsyncExitStack) -> None:
        self._options, self._stack = options, stack
        self._known = [picture_of(number) for number in range(LEVELS**3)]

    async def asker(self) -> Asker:
        """That of the style asked for, connected."""
        options, style = self._options, self._options.style
        if style in ("classify", "infer"):
            callers = Callers(options.gateway, options.deadline_ms)
            sizes = TENSORS_OF if style == "infer" else (1,)
            asks = callers.infer if style == "infer" else callers.classify
            return self._in_threads(asks, sizes=sizes)
        if style == "async":
            waiting = AsyncClient.connect(options.fleet, timeout_s=CONNECT_S)
            client = await self._stack.enter_async_context(waiting)
            await self._follow(client, client.reload)
            return Asker(ask=partial(self._await_answers, client), counters=lambda: client.counters)
        connected = self._stack.enter_context(Client.connect(options.fleet, timeout_s=CONNECT_S))
        await self._follow(connected, partial(asyncio.to_thread, connected.reload))
        if style == "stream":
            asks, sizes = partial(self._stream, connected), STREAM_OF
        else:
            asks, sizes = partial(self._classify, connected), (1,)
        return self._in_threads(asks, sizes=sizes, counters=lambda: connected.counters)

    def _in_threads(self, asks: Callable[[Sequence[int]], list[Outcome]], **more: Any) -> Asker:
        threads = self._stack.enter_context(ThreadPoolExecutor(self._options.threads))

        async def ask(numbers: Sequence[int]) -> list[Outcome]:
            return await asyncio.get_running_loop().run_in_executor(threads, asks, numbers)

        return Asker(ask=ask, threads=self._options.threads, **more)

    def _classify(self, client: Client, numbers: Sequence[int]) -> list[Outcome]:
        (number,), began_s = numbers, time.monotonic()
        answer: Prediction | InferenceError
        try:
            answer = client.classify(self._known[number], deadline_ms=self._options.deadline_ms)
        except InferenceError as error:
            answer = error
        return [(outcome(answer), time.monotonic() - began_s)]

    def _stream(self, client: Client, numbers: Sequence[int]) -> list[Outcome]:
        began_s = deque[float]()

        def pictures() -> Iterator[Pixels]:
            for number in numbers:
                began_s.append(time.monotonic())
                yield self._known[number]

        answers = client.stream(
            pictures(), deadline_ms=self._options.deadline_ms, in_flight=IN_FLIGHT, errors="yield"
        )
        # In the order of the pictures, of which each has its own beginning.
        return [(outcome(each), time.monotonic() - began_s.popleft()) for each in answers]

    async def _await_answers(self, client: AsyncClient, numbers: Sequence[int]) -> list[Outcome]:
        (number,), began_s = numbers, time.monotonic()
        answer: Prediction | InferenceError
        try:
            answer = await client.classify(
                self._known[number], deadline_ms=self._options.deadline_ms
            )
        except InferenceError as error:
            answer = error
        return [(outcome(answer), time.monotonic() - began_s)]

    async def _follow(
        self, client: Client | AsyncClient, reload: Callable[[], Awaitable[None]]
    ) -> None:
        if self._options.follow:
            following = follow(Path(self._options.fleet), client, reload)
            await self._stack.enter_async_context(following)


@asynccontextmanager
async def follow(
    path: Path, client: Client | AsyncClient, reload: Callable[[], Awaitable[None]]
) -> Any:
    """In this block, have the client read a changed fleet file or bundle again."""

    async def watch() -> None:
        files = FollowedFiles(path, client, lambda text: print(text, file=sys.stderr, flush=True))
        while True:
            await asyncio.sleep(FOLLOW_S)
            with files.following() as changed:
                if changed:
                    await reload()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def main() -> None:
    """Play every load that stdin names."""
    asked = arguments(
        __doc__, "follow", fleet=str, gateway=str, truth=Path, style=str, seed=int,
        deadline_ms=float, threads=1,
    )  # fmt: skip
    numbers, truth = numbers_of(asked.seed), read_json(asked.truth, dict[str, str])
    tally = Tally(asked.deadline_ms, truth)
    async with AsyncExitStack() as stack:
        asker = await Asking(asked, stack).asker()
        print("connected", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            load = json.loads(line)
            if not load.get("goes_on"):
                tally = Tally(asked.deadline_ms, truth)
            await play(load, tally, asker, numbers)
            print(json.dumps(tally.result(asker.counters())), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
