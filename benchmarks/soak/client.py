"""A client of the soak, in a process of its own, that calls at a given rate.

    python -m benchmarks.soak.client --fleet FILE --style sync|async --seed N --deadline-ms MS

Reads a load a line, {"seconds", "rate" (calls a second; null: as many as can be), "at_once" (for
those)}, and writes its result as a line. Memory does not grow with the number of calls.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.options import arguments
from benchmarks.soak.pictures import CERTAIN, LEVELS, draw, label_of, picture_of
from mdp import AsyncClient, Client
from mdp.errors import InferenceError
from mdp.pictures.crop import Pixels
from mdp.requests.prediction import Prediction

Classify = Callable[[Pixels], Awaitable[Prediction]]
CONNECT_S = 60.0
#: Calls under way at most, in seconds of the rate: a machine that is slower than when its capacity
#: was measured does not fall ever further behind.
HELD_S = 0.75
#: Upper ends of the latency counts' bins, in ms.
BINS_MS = np.geomspace(0.1, 100_000.0, 241)


class Tally:
    """Every call of one load: begun, ended, and with which outcome."""

    def __init__(self, deadline_ms: float) -> None:
        self._deadline_ms = deadline_ms
        #: Ticket -> number of the picture.
        self.open: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._latencies = np.zeros(len(BINS_MS) + 1, dtype=np.int64)
        self._overshoot_ms = 0.0

    def begin(self, number: int) -> int:
        """Count a call with picture `number`; returns its ticket."""
        self.counts["begun"] += 1
        self.open[self.counts["begun"]] = number
        return self.counts["begun"]

    def end(self, ticket: int, answer: Prediction | InferenceError, took_s: float) -> None:
        """Count a call's end; a second end, or another picture's answer, is wrong."""
        number = self.open.pop(ticket, None)
        if number is None:
            self._wrong(f"call {ticket} ended twice")
            return
        self.counts["ended"] += 1
        took_ms = took_s * 1e3
        self._overshoot_ms = max(self._overshoot_ms, took_ms - self._deadline_ms)
        self._latencies[int(np.searchsorted(BINS_MS, took_ms))] += 1
        if isinstance(answer, InferenceError):
            self.counts["error"] += 1
            self.reasons[type(answer).__name__] += 1
            return
        self.counts["partial" if answer.partial else "complete"] += 1
        if answer.label != label_of(number) or answer.probability < CERTAIN:
            self._wrong(
                f"call {ticket}: sent {label_of(number)}, got {answer.label} with "
                f"{answer.probability:g} from {', '.join(answer.used)}"
            )

    def _wrong(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(text)

    def result(self, counters: object) -> dict[str, Any]:
        """All of it for a result file, with the client's own counters."""
        return {
            "counts": dict(self.counts), "open": len(self.open), "wrong": self.wrong,
            "reasons": dict(self.reasons), "overshoot_ms": self._overshoot_ms,
            "p50_ms": self._percentile(50), "p99_ms": self._percentile(99),
            "p999_ms": self._percentile(99.9), "counters": counters,
        }  # fmt: skip

    def _percentile(self, percent: float) -> float:
        """The upper end of the bin that holds this percentile, in ms."""
        up_to = np.cumsum(self._latencies) / max(1, self._latencies.sum())
        place = int(np.searchsorted(up_to, percent / 100))
        return float(BINS_MS[min(place, len(BINS_MS) - 1)])


async def play(
    load: dict[str, Any],
    tally: Tally,
    classify: Classify,
    pictures: Iterator[tuple[int, Pixels]],
    *,
    one_by_one: bool,
) -> None:
    """Begin the calls of a load, and wait for their ends."""
    rate, under_way = load["rate"], set[asyncio.Task[None]]()
    most = 1 if one_by_one else load["at_once"] if rate is None else max(8, HELD_S * rate)

    async def call() -> None:
        number, picture = next(pictures)
        ticket, began_s = tally.begin(number), time.monotonic()
        answer: Prediction | InferenceError
        try:
            answer = await classify(picture)
        except InferenceError as error:
            answer = error
        tally.end(ticket, answer, time.monotonic() - began_s)

    for due_s in _due(load):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if len(under_way) >= most:
            tally.counts["held back"] += 1
            continue
        task = asyncio.create_task(call())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        while (one_by_one or rate is None) and len(under_way) >= most:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    if under_way:
        # A call that never ends is left open in the tally.
        await asyncio.wait(under_way, timeout=CONNECT_S)


def _due(load: dict[str, Any]) -> Iterator[float]:
    """When each call begins; late calls are not made up for by a burst."""
    now_s = time.monotonic()
    until_s, due_s = now_s + load["seconds"], now_s
    while due_s < until_s and (now_s := time.monotonic()) < until_s:
        yield due_s
        if load["rate"] is not None:
            due_s = max(due_s + 1 / load["rate"], now_s - 0.1)


def _pictures(seed: int) -> Iterator[tuple[int, Pixels]]:
    """Numbers of colours with their pictures, none twice in a row."""
    chance, number = random.Random(seed), 0
    known = [picture_of(number) for number in range(LEVELS**3)]
    while True:
        number = draw(chance, number)
        yield number, known[number]


async def main() -> None:
    """Play every load that stdin names."""
    asked = arguments(__doc__, fleet=str, style=str, seed=int, deadline_ms=float)
    pictures, sync = _pictures(asked.seed), asked.style == "sync"
    async with AsyncExitStack() as stack:
        client: Client | AsyncClient
        if sync:
            client = stack.enter_context(Client.connect(asked.fleet, timeout_s=CONNECT_S))
            thread = stack.enter_context(ThreadPoolExecutor(1))
            loop, call = asyncio.get_running_loop(), client.classify

            def classify(picture: Pixels) -> Awaitable[Prediction]:
                called = partial(call, picture, deadline_ms=asked.deadline_ms)
                return loop.run_in_executor(thread, called)
        else:
            client = await stack.enter_async_context(
                AsyncClient.connect(asked.fleet, timeout_s=CONNECT_S)
            )
            classify = partial(client.classify, deadline_ms=asked.deadline_ms)
        print("connected", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            tally = Tally(asked.deadline_ms)
            await play(json.loads(line), tally, classify, pictures, one_by_one=sync)
            print(json.dumps(tally.result(client.counters)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
