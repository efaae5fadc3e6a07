"""The client's machine: asks every rival in turns, and writes what came of it.

    python -m benchmarks.end_to_end.rivals.caller SETUP FOUND

One picture at a time first, in rounds; then with several under way. Says a line for each round.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.end_to_end.machines import sent_bytes
from benchmarks.end_to_end.rivals.chain_rival import Chain, ChainRival
from benchmarks.end_to_end.rivals.http_rival import HttpRival
from benchmarks.end_to_end.rivals.rivals import MdpRival, Rival
from mdp.files import write_json


class Measured:
    """What one rival's answers came to."""

    def __init__(self, rival: Rival, counting: Sequence[str]) -> None:
        self._rival, self._counting = rival, counting
        #: Of each picture, one at a time; pictures in a second with several under way, and the
        #: bytes that all machines together sent for a picture, of each round.
        self.latency_ms: list[float] = []
        self.per_s: list[float] = []
        self.sent_bytes: list[float] = []

    def burst(self, pictures: Sequence[Path]) -> None:
        self._rival.ask(pictures[0])  # warms up
        before = sent_bytes(self._counting)
        for picture in pictures:
            started_s = time.perf_counter()
            self._rival.ask(picture)
            self.latency_ms.append((time.perf_counter() - started_s) * 1e3)
        self.sent_bytes.append((sent_bytes(self._counting) - before) / len(pictures))

    def stream(self, pictures: Sequence[Path], seconds: float, in_flight: int) -> None:
        """Several at once, as many as take about `seconds`; the first ones fill what is empty."""
        expected = self.per_s[-1] if self.per_s else 2e3 / median(self.latency_ms)
        count = 2 * in_flight + math.ceil(seconds * expected)
        counted = self._rival.stream(list(islice(cycle(pictures), count)), in_flight)[in_flight:]
        self.per_s.append((len(counted) - 1) / (counted[-1] - counted[0]))

    def row(self) -> dict[str, Any]:
        return {
            "name": self._rival.name, "latency_ms": self.latency_ms, "per_s": self.per_s,
            "sent_bytes": self.sent_bytes,
        }  # fmt: skip


def opened(setup: dict[str, Any], stack: ExitStack) -> tuple[list[Rival], ChainRival, ChainRival]:
    """Everybody who is asked; and the whole teacher and the pipeline, to be compared."""
    fleets = [MdpRival(name, Path(fleet)) for name, fleet in setup["fleets"].items()]
    whole, pieces = Chain(*setup["teacher"]), Chain(*setup["pipeline"])
    servers = setup["http"]
    http = [HttpRival("HTTP servers", servers, setup["in_flight"])] if servers else []
    for one in (whole, pieces):
        stack.callback(one.close)
    for fleet in fleets:
        stack.callback(fleet.close)
    for rival in http:
        stack.callback(rival.close)
    size = setup["image_size"]
    chained = [
        ChainRival("teacher on one device", whole, size, "jpeg"),
        ChainRival("teacher on one device, raw picture", whole, size, "raw"),
        ChainRival("pipeline", pieces, size, "jpeg"),
        ChainRival("pipeline, fp16 between", pieces, size, "jpeg", half=True),
    ]
    return [*fleets, *chained, *http], chained[0], chained[2]


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    pictures = [Path(text) for text in setup["pictures"]]
    with ExitStack() as stack:
        rivals, whole, pieces = opened(setup, stack)
        measured = [Measured(rival, setup["counting"]) for rival in rivals]
        expected = whole.logits(pictures[0])
        error = float(np.abs(pieces.logits(pictures[0]) - expected).max())
        for number in range(setup["rounds"]):
            print(f"round {number + 1} of {setup['rounds']}", flush=True)
            for one in measured:
                one.burst(list(islice(cycle(pictures), setup["per_round"])))
        for number in range(setup["stream_rounds"]):
            print(f"stream {number + 1} of {setup['stream_rounds']}", flush=True)
            for one in measured:
                one.stream(pictures, setup["stream_s"], setup["in_flight"])
    return {
        "answers": [one.row() for one in measured],
        "pipeline_error": error,
        "largest_logit": float(np.abs(expected).max()),
    }


def main() -> None:
    setup, found = map(Path, sys.argv[1:])
    print("READY", flush=True)
    write_json(found, measure(json.loads(setup.read_text())))


if __name__ == "__main__":
    main()
