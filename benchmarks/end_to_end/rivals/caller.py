"""The client's machine: asks every rival in turns, and writes what came of it.

    python -m benchmarks.end_to_end.rivals.caller --setup setup.json --out found.json

One picture at a time first, in rounds; then with several under way. Says a line for each round.
"""

import argparse
import math
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.end_to_end.outcomes import Answers, Found, SplitFound
from benchmarks.end_to_end.rivals.chain_rival import Chain, ChainRival
from benchmarks.end_to_end.rivals.http_rival import HttpRival
from benchmarks.end_to_end.rivals.mdp_rival import MdpRival
from benchmarks.end_to_end.rivals.part import Pass
from benchmarks.end_to_end.rivals.rivals import Rival
from benchmarks.end_to_end.rivals.split import FP16_BYTES, FP32_BYTES
from benchmarks.end_to_end.rivals.split_rival import Exchange, SplitDevices, calculated, request
from benchmarks.end_to_end.setup import Setup
from mdp.files import read_json, write_json

#: Pictures before a burst that are not counted.
_WARM_UP = 1
SPLIT = {"tensors split": FP32_BYTES, "tensors split, fp16 exchange": FP16_BYTES}


class Measured:
    def __init__(self, rival: Rival, counting: Sequence[str]) -> None:
        self.rival = rival
        self._counting = counting
        self._latency_ms: list[float] = []
        self._per_s: list[float] = []
        self._sent_bytes: list[float] = []

    def burst(self, pictures: Sequence[Path]) -> None:
        for picture in pictures[:_WARM_UP]:
            self.rival.ask(picture)
        before = sent_bytes(self._counting)
        for picture in pictures:
            started_s = time.perf_counter()
            self.rival.ask(picture)
            self._latency_ms.append((time.perf_counter() - started_s) * 1e3)
        self._sent_bytes.append((sent_bytes(self._counting) - before) / len(pictures))

    def stream(self, pictures: Sequence[Path], seconds: float, in_flight: int) -> None:
        """Several at once, as many as take about `seconds`; the first ones fill what is empty."""
        expected = self._per_s[-1] if self._per_s else 2e3 / median(self._latency_ms)
        count = 2 * in_flight + math.ceil(seconds * expected)
        moments = self.rival.stream(list(islice(cycle(pictures), count)), in_flight)
        counted = moments[in_flight:]
        self._per_s.append((len(counted) - 1) / (counted[-1] - counted[0]))

    def answers(self) -> Answers:
        return Answers(
            name=self.rival.name,
            latency_ms=self._latency_ms,
            per_s=self._per_s,
            sent_bytes=self._sent_bytes,
        )


def sent_bytes(counting: Sequence[str]) -> int:
    """Bytes that all machines have sent until now."""
    told = subprocess.run(counting, capture_output=True, text=True, check=True).stdout
    return sum(map(int, told.split()))


def opened(setup: Setup, stack: ExitStack) -> tuple[list[Measured], ChainRival, ChainRival]:
    """Everybody who is really asked; and the whole teacher and the pipeline, to be compared."""
    rivals: list[Measured] = []
    for name, fleet in setup.fleets.items():
        mdp_rival = MdpRival(name, Path(fleet))
        stack.callback(mdp_rival.close)
        rivals.append(Measured(mdp_rival, setup.counting))
    chains = []
    for first, reply in (
        (setup.teacher, setup.teacher_reply),
        (setup.pipeline, setup.pipeline_reply),
    ):
        chains.append(Chain(first, reply))
        stack.callback(chains[-1].close)
    whole, pieces = chains
    size = setup.image_size
    chained = [
        ChainRival("teacher on one device", whole, size, "jpeg"),
        ChainRival("teacher on one device, raw picture", whole, size, "raw"),
        ChainRival("pipeline", pieces, size, "jpeg"),
        ChainRival("pipeline, fp16 between", pieces, size, "jpeg", half=True),
    ]
    rivals += [Measured(rival, setup.counting) for rival in chained]
    if setup.http:
        http_rival = HttpRival("HTTP servers", setup.http, setup.amount.in_flight)
        stack.callback(http_rival.close)
        rivals.append(Measured(http_rival, setup.counting))
    return rivals, chained[0], chained[2]


def compare(whole: ChainRival, pieces: ChainRival, picture: Path) -> tuple[float, float]:
    """Largest difference of the two's logits, and the largest of them."""
    expected = whole.logits(picture)
    return float(np.abs(pieces.logits(picture) - expected).max()), float(np.abs(expected).max())


def measure(setup: Setup) -> Found:
    pictures, amount = [Path(text) for text in setup.pictures], setup.amount
    with ExitStack() as stack:
        devices = SplitDevices(setup.split)
        stack.callback(devices.close)
        link = devices.measure_link()
        rivals, whole, pieces = opened(setup, stack)
        error, largest = compare(whole, pieces, pictures[0])
        passes: list[list[Pass]] = [[] for _ in setup.split.addresses]
        for number in range(amount.rounds):
            print(f"round {number + 1} of {amount.rounds}", flush=True)
            for one in rivals:
                one.burst(list(islice(cycle(pictures), amount.per_round)))
            for known, new in zip(passes, devices.passes(amount.per_round), strict=True):
                known += new
        for number in range(amount.stream_rounds):
            print(f"stream {number + 1} of {amount.stream_rounds}", flush=True)
            for one in rivals:
                one.stream(pictures, amount.stream_s, amount.in_flight)
        requests = [request(picture, setup.image_size) for picture in pictures]
    answers, split = [one.answers() for one in rivals], dict[str, SplitFound]()
    for name, value_bytes in SPLIT.items():
        row, split[name] = calculated(
            name,
            split=setup.split,
            link=link,
            exchange=Exchange(setup.split, link, value_bytes),
            passes=passes,
            requests=requests,
            reply_bytes=4 * setup.num_classes,
        )
        answers.append(row)
    return Found(
        link=link, answers=answers, split=split, pipeline_error=error, largest_logit=largest
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask every rival in turns.")
    parser.add_argument("--setup", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print("READY", flush=True)
    write_json(options.out, measure(read_json(options.setup, Setup)))


if __name__ == "__main__":
    main()
