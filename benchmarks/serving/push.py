"""Latency of calls while a bundle is pushed, beside the same calls without.

    python -m benchmarks.serving --only push      # about 1 minute

An agent with keys whose model takes next to no time, so that nothing hides a delay. A client calls
it without pause; another process pushes a bundle of 50 MB, as fast as it can, and another one once
that is served. Everything is on one machine: the pusher's processor time counts against the calls.
`pieces` are the calls while files are sent, `switch` those while the agent verifies and loads.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import client_of
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import LineProcess

SIDE, MODEL_BYTES = 224, 50_000_000
ROUNDS, ALONE_S = 6, 3.0
DEADLINE_MS = 1_000.0
#: Shorter than the pusher waits between a rollback and the next push.
GRACE_S = 0.5
#: argv: a fleet file and bundles; pushes one after each line of its input, prints when it began,
#: had sent all and was done, by the clock that all processes share, and has the agent go back.
PUSHER = """
import json, sys, time
from pathlib import Path
from mdp.client.base import Options
from mdp.client.bundles import DeviceBundles
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_fleet
path = Path(sys.argv[1])
fleet, _ = read_fleet(path)
with DeviceBundles(fleet, fleet.devices[0], Options(fleet=path)) as device:
    for folder in sys.argv[2:]:
        times = {}
        def progress(there, total):
            times.setdefault("begin_s", time.monotonic())
            times["sent_s"] = time.monotonic()
        done = device.push(Bundle.open(folder), progress)
        times.update(done_s=time.monotonic(), bytes=done.sent_bytes)
        print(json.dumps(times), flush=True)
        device.rollback()
        # Until the agent has dropped the pushed one.
        time.sleep(1.0)
        print("back", flush=True)
        input()
"""


class Caller:
    """Calls without pause, in a thread; keeps when each began and what it took."""

    def __init__(self, client: Client) -> None:
        self.calls: list[tuple[float, float]] = []
        self._client, self._over = client, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        picture = noise_picture(SIDE)
        while not self._over.is_set():
            started_s = time.monotonic()
            answer = self._client.classify(picture, deadline_ms=DEADLINE_MS)
            assert not answer.partial, answer
            self.calls.append((started_s, (time.monotonic() - started_s) * 1e3))

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Milliseconds of the calls that began in between."""
        return [took_ms for started_s, took_ms in self.calls if begin_s <= started_s < end_s]

    def __enter__(self) -> "Caller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _measure(fleet: AgentFleet, rounds: int) -> Iterator[dict[str, Any]]:
    folders = [
        write_bundle(
            fleet.folder / f"pushed-{number}", devices=("board",), sizes=(SIDE,),
            bag_scale=5.0 + number, comment_bytes=MODEL_BYTES,
        )
        for number in range(rounds + 1)
    ]  # fmt: skip
    found: dict[str, list[list[float]]] = {"alone": [], "pieces": [], "switch": []}
    rates: list[float] = []
    command = [sys.executable, "-c", PUSHER, fleet.folder / "fleet.toml", *folders]
    with (
        client_of(fleet) as client,
        Caller(client) as caller,
        LineProcess("pusher", command) as pusher,
    ):
        for number in range(rounds + 1):
            told = json.loads(pusher.line("a push"))
            pusher.line_with("back")
            until_s = time.monotonic() + ALONE_S
            time.sleep(ALONE_S)
            if number:
                found["pieces"].append(caller.between(told["begin_s"], told["sent_s"]))
                found["switch"].append(caller.between(told["sent_s"], told["done_s"]))
                found["alone"].append(caller.between(until_s - ALONE_S, until_s))
                rates.append(told["bytes"] / (told["sent_s"] - told["begin_s"]) / 1e6)
            pusher.say("next")
    for name, blocks in found.items():
        calls = [took_ms for block in blocks for took_ms in block]
        yield {
            "what": name,
            "calls": len(calls),
            "call_ms": percentiles(calls, (50, 99)),
            "most_ms": max(calls),
            "ratio_95": ratio_interval(blocks, found["alone"], 50),
            "mb_per_s": sum(rates) / len(rates) if name == "pieces" else 0.0,
        }


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_bundle(folder / "bundle", devices=("board",), sizes=(SIDE,))
        with AgentFleet(folder, folder / "bundle", keys=True) as fleet:
            (folder / "client.limits").write_text("push = true\n")
            fleet.start("board", "--allow-push", folder / "kept", "--grace-s", GRACE_S)
            fleet.write()
            yield from _measure(fleet, 1 if quick else ROUNDS)


COLUMNS = (
    ("calls during", "{what}"),
    ("calls", "{calls}"),
    ("p50 ms", "{call_ms[p50]:.2f}"),
    ("p99", "{call_ms[p99]:.2f}"),
)
