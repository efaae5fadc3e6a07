"""A client of the soak, in a process of its own: calls at a given rate, and what became of each.

    python -m benchmarks.soak.client --fleet FILE --style sync|async --seed N --log FILE

Reads lines from stdin, each a load: {"name", "seconds", "rate" (calls a second, or null for as many
as can be), "at_once" (for those)}; writes one line a second, and one at the end of each load, to
the log. What it keeps does not grow with the number of calls, so that its memory can be watched.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.soak.pictures import CERTAIN, LEVELS, draw, label_of, picture_of
from mdp import AsyncClient, Client
from mdp.errors import InferenceError
from mdp.requests.prediction import Prediction

CONNECT_S = 60.0
#: A call is not begun while as many are under way as come due in so long: a machine that has become
#: slower since its capacity was measured would otherwise be ever further behind.
HELD_S = 0.75
#: Upper ends of the latency counts' bins, in ms.
BINS_MS = np.geomspace(0.1, 100_000.0, 241)


class Tally:
    """Every call of one load: begun, ended, and how."""

    def __init__(self, deadline_ms: float, log: TextIO) -> None:
        self._deadline_ms = deadline_ms
        self._log = log
        self.start("")

    def start(self, name: str) -> None:
        self.name = name
        self.open: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.latencies = np.zeros(len(BINS_MS) + 1, dtype=np.int64)
        self.worst_overshoot_ms = 0.0
        self._said_s = time.monotonic()

    def begin(self, number: int) -> int:
        """A call with picture `number` begins; returns its ticket."""
        self.counts["begun"] += 1
        ticket = self.counts["begun"]
        self.open[ticket] = number
        return ticket

    def end(self, ticket: int, answer: Prediction | InferenceError, took_s: float) -> None:
        """A call has ended; if for the second time, or as another picture's, that is kept."""
        number = self.open.pop(ticket, None)
        if number is None:
            self._complain(f"call {ticket} ended twice")
            return
        self.counts["ended"] += 1
        took_ms = took_s * 1e3
        self.worst_overshoot_ms = max(self.worst_overshoot_ms, took_ms - self._deadline_ms)
        self.latencies[int(np.searchsorted(BINS_MS, took_ms))] += 1
        if isinstance(answer, InferenceError):
            self.counts["error"] += 1
            self.reasons[type(answer).__name__] += 1
        else:
            self.counts["partial" if answer.partial else "complete"] += 1
            if answer.label != label_of(number) or answer.probability < CERTAIN:
                self._complain(
                    f"call {ticket}: sent {label_of(number)}, got {answer.label} with "
                    f"{answer.probability:g} from {', '.join(answer.used)}"
                )
        if time.monotonic() - self._said_s > 1.0:
            self.say("second")

    def _complain(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(text)

    def say(self, kind: str, **more: object) -> None:
        self._said_s = time.monotonic()
        said: dict[str, Any] = {
            "kind": kind,
            "load": self.name,
            "at_s": self._said_s,
            "counts": dict(self.counts),
            "open": len(self.open),
            "p50_ms": self.percentile(50),
            "p99_ms": self.percentile(99),
            "overshoot_ms": self.worst_overshoot_ms,
            **more,
        }
        if kind == "done":
            said |= {"wrong": self.wrong, "reasons": dict(self.reasons)}
            said |= {"p999_ms": self.percentile(99.9)}
        print(json.dumps(said), file=self._log, flush=True)

    def percentile(self, percent: float) -> float:
        """The upper end of the bin that holds this percentile, in ms."""
        if not self.latencies.sum():
            return 0.0
        up_to = np.cumsum(self.latencies) / self.latencies.sum()
        place = int(np.searchsorted(up_to, percent / 100))
        return float(BINS_MS[min(place, len(BINS_MS) - 1)])


def run_sync(options: argparse.Namespace, tally: Tally) -> None:
    with Client.connect(options.fleet, timeout_s=CONNECT_S) as client:
        tally.say("connected")
        pictures = _pictures(options.seed)
        for line in sys.stdin:
            load = json.loads(line)
            tally.start(load["name"])
            for due_s in _due(load):
                time.sleep(max(0.0, due_s - time.monotonic()))
                number, picture = next(pictures)
                ticket, began_s = tally.begin(number), time.monotonic()
                answer: Prediction | InferenceError
                try:
                    answer = client.classify(picture, deadline_ms=options.deadline_ms)
                except InferenceError as error:
                    answer = error
                tally.end(ticket, answer, time.monotonic() - began_s)
            tally.say("done", counters=client.counters)


async def run_async(options: argparse.Namespace, tally: Tally) -> None:
    async with AsyncClient.connect(options.fleet, timeout_s=CONNECT_S) as client:
        tally.say("connected")
        pictures = _pictures(options.seed)
        under_way: set[asyncio.Task[None]] = set()

        async def call() -> None:
            number, picture = next(pictures)
            ticket, began_s = tally.begin(number), time.monotonic()
            answer: Prediction | InferenceError
            try:
                answer = await client.classify(picture, deadline_ms=options.deadline_ms)
            except InferenceError as error:
                answer = error
            tally.end(ticket, answer, time.monotonic() - began_s)

        while line := await asyncio.to_thread(sys.stdin.readline):
            load = json.loads(line)
            tally.start(load["name"])
            most = load["at_once"] if load["rate"] is None else max(8, HELD_S * load["rate"])
            for due_s in _due(load):
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if load["rate"] is not None and len(under_way) >= most:
                    tally.counts["held back"] += 1
                    continue
                task = asyncio.create_task(call())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                while load["rate"] is None and len(under_way) >= most:
                    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            # A call that never ended would be waited for no longer than this.
            if under_way:
                await asyncio.wait(under_way, timeout=options.deadline_ms / 1e3 + CONNECT_S)
            tally.say("done", counters=client.counters)


def _pictures(seed: int) -> Iterator[tuple[int, Any]]:
    """Numbers of colours, each with its picture, none twice in a row."""
    chance, number = random.Random(seed), 0
    known = [picture_of(number) for number in range(LEVELS**3)]
    while True:
        number = draw(chance, number)
        yield number, known[number]


def _due(load: dict[str, Any]) -> Iterator[float]:
    """When each call of a load begins; what is late is not made up for by a burst."""
    now_s = time.monotonic()
    until_s, due_s = now_s + load["seconds"], now_s
    while due_s < until_s and (now_s := time.monotonic()) < until_s:
        yield due_s
        if load["rate"] is not None:
            due_s = max(due_s + 1 / load["rate"], now_s - 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--style", choices=("sync", "async"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--deadline-ms", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    with options.log.open("a") as log:
        tally = Tally(options.deadline_ms, log)
        if options.style == "sync":
            run_sync(options, tally)
        else:
            asyncio.run(run_async(options, tally))


if __name__ == "__main__":
    main()
