"""More calls at once than a device's window lets out: asyncio, threads, streams, ends of clients.

Alpha computes only while its gate is open, so that a test decides how long calls wait for it.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mdp
from mdp.gateway.fleets import ServedFleet
from mdp.mqtt.bridge import Bridge
from mdp.requests.prediction import Prediction
from mdp.requests.window import MOST_OUT
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import ROOT, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
CALLS = 20
#: An agent that was held takes itself to be slow.
AGES_MS = 600_000.0


class GatedFleet(Fleet):
    """A fleet whose first device waits at `gate`."""

    gate: Path

    @contextmanager
    def hold(self) -> Iterator[Callable[[], int]]:
        """Alpha computes nothing in the block; yields how many requests wait at it."""
        self.gate.unlink(missing_ok=True)
        with self.client() as watching:
            try:
                yield lambda: self.counts(watching)[0]
            finally:
                self.gate.touch()

    def counts(self, client: mdp.Client) -> tuple[int, int]:
        """The numbers of requests that wait at alpha, and that it has answered."""
        (status,) = [s for s in client.status(timeout_s=PATIENCE_S) if s.device == "alpha"]
        assert status.queued is not None
        assert status.counts is not None
        return status.queued, status.counts["answered"]

    def count_answers(self) -> int:
        with self.client() as client:
            return self.counts(client)[1]


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedFleet]:
    folder = tmp_path_factory.mktemp("gated")
    for name in ("gate", "seen"):
        (folder / name).mkdir()
    Image.fromarray(RED).save(folder / "seen" / "red.png")
    with GatedFleet(folder, write_bundle(folder / "bundle")) as fleet:
        fleet.gate = folder / "gate" / "run"
        fleet.gate.touch()
        camera = ("--source", f"folder:{folder / 'seen'}")
        gate = ("--work-ms", 3, "--hold", "run", "--gate", folder / "gate")
        fleet.start("alpha", *gate, *camera, odd=True, wait_for=None)
        for device in ("beta", "gamma"):
            fleet.start(device, *camera, wait_for=None)
        for agent in fleet.agents.values():
            agent.wait_for("READY")
        yield fleet


def whole(answers: list[Prediction]) -> int:
    return Counter(answer.used for answer in answers)[DEVICES]


def full(queued: Callable[[], int]) -> None:
    """Wait until as many are out as the window allows: one is computed, the others wait."""
    until(lambda: queued() == MOST_OUT - 1, "the window is full")


def test_calls_that_wait_may_be_cancelled_and_cost_no_device_anything(gated: GatedFleet) -> None:
    before = gated.count_answers()

    async def ask() -> list[Prediction]:
        async with mdp.AsyncClient.connect(gated.write(), timeout_s=PATIENCE_S) as client:
            calls = [
                asyncio.create_task(client.classify(RED, deadline_ms=AGES_MS)) for _ in range(CALLS)
            ]
            with gated.hold() as queued:
                await asyncio.to_thread(full, queued)
                for call in calls[-4:]:
                    call.cancel()
                await asyncio.wait(calls[-4:])
                assert queued() == MOST_OUT - 1
            answers = await asyncio.gather(*calls[:-4])
            assert all(call.cancelled() for call in calls[-4:])
            return answers

    answers = asyncio.run(ask())
    assert whole(answers) == CALLS - 4
    assert max(answer.members[0].held_ms for answer in answers) > 0
    assert gated.count_answers() == before + CALLS - 4


def in_threads(work: Callable[[], object], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_threads_share_a_client_and_their_calls_are_under_way_together(gated: GatedFleet) -> None:
    answers: list[Prediction] = []
    with gated.client() as client:
        with gated.hold() as queued:
            threads = in_threads(
                lambda: answers.append(client.classify(RED, deadline_ms=AGES_MS)), CALLS
            )
            full(queued)
            assert not answers
            # Asking how devices are has a turn of its own in between.
            assert {s.state for s in client.status(timeout_s=PATIENCE_S)} == {"READY"}
        for thread in threads:
            thread.join(PATIENCE_S)
    assert whole(answers) == CALLS


def test_a_stream_waits_in_the_window(gated: GatedFleet) -> None:
    answers: list[Prediction] = []

    def stream() -> None:
        with gated.client() as client:
            found = client.stream([RED] * CALLS, deadline_ms=AGES_MS, in_flight=CALLS)
            answers.extend(found)

    with gated.hold() as queued:
        (thread,) = in_threads(stream, 1)
        full(queued)
    thread.join(PATIENCE_S)
    assert whole(answers) == CALLS


def test_a_list_waits_in_the_window(gated: GatedFleet) -> None:
    answers: list[Prediction] = []

    def ask() -> None:
        with gated.client() as client:
            found = client.classify_many([RED] * CALLS, deadline_ms=AGES_MS, in_flight=CALLS)
            answers.extend(found)

    with gated.hold() as queued:
        (thread,) = in_threads(ask, 1)
        full(queued)
        assert not answers
    thread.join(PATIENCE_S)
    assert whole(answers) == CALLS
    assert max(answer.members[0].held_ms for answer in answers) > 0


def test_an_async_client_s_list_waits_in_the_window(gated: GatedFleet) -> None:
    async def ask() -> list[Prediction]:
        async with mdp.AsyncClient.connect(gated.write(), timeout_s=PATIENCE_S) as client:
            with gated.hold() as queued:
                asked = client.classify_many([RED] * CALLS, deadline_ms=AGES_MS, in_flight=CALLS)
                task = asyncio.create_task(asked)
                await asyncio.to_thread(full, queued)
                assert not task.done()
            return await task

    answers = asyncio.run(ask())
    assert whole(answers) == CALLS
    assert max(answer.members[0].held_ms for answer in answers) > 0


class Published:
    """Messages that a broker is given, from any thread."""

    def __init__(self) -> None:
        self.payloads: list[tuple[str, str]] = []

    def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        self.payloads.append((topic, payload))

    def retract(self, topic: str) -> None:
        raise AssertionError(topic)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(text) for topic, text in self.payloads if topic.endswith("/answer")]


def test_what_mqtt_asks_waits_in_the_window_behind_other_calls(gated: GatedFleet) -> None:
    broker, others, looks = Published(), list[Prediction](), list[Prediction]()
    with gated.client() as client, gated.hold() as queued, pytest.MonkeyPatch.context() as patch:
        # Made here, as a fleet file that is written anew has the client connect anew.
        bridge = Bridge(client, gated.folder / "fleet.toml", "colours", broker, print)
        look = client.look

        def step() -> None:
            bridge.step(deadline_ms=AGES_MS, now=lambda: "now")

        def noted(**how: Any) -> Prediction:
            looks.append(look(**how))
            return looks[-1]

        patch.setattr(client, "look", noted)
        threads = in_threads(
            lambda: others.append(client.classify(RED, deadline_ms=AGES_MS)), MOST_OUT
        )
        full(queued)
        threads += in_threads(step, 1)
        until(lambda: client._dispatcher._book.held == 1, "the look waits for its turn")
        # Beside the one that is computed.
        assert queued() == MOST_OUT - 1
        assert not broker.answers()
        gated.gate.touch()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert whole(others) == MOST_OUT
    (told,) = broker.answers()
    assert (told["used"], told["label"], told["error"]) == (list(DEVICES), "red", None)
    assert looks[0].members[0].held_ms > 0


def test_a_gateway_s_calls_wait_in_the_window(gated: GatedFleet) -> None:
    async def ask() -> list[Prediction]:
        served = ServedFleet("colours", gated.write(), timeout_s=PATIENCE_S)
        try:
            with gated.hold() as queued:
                requests = [
                    asyncio.create_task(served.classify([RED], AGES_MS)) for _ in range(CALLS)
                ]
                await asyncio.to_thread(full, queued)
            return [answer for (answer,) in await asyncio.gather(*requests)]
        finally:
            served.close()

    assert whole(asyncio.run(ask())) == CALLS


def test_a_client_is_closed_with_threads_calls_waiting(gated: GatedFleet) -> None:
    answers: list[Prediction] = []
    errors: list[str] = []

    def ask() -> None:
        try:
            answers.append(client.classify(RED, deadline_ms=AGES_MS))
        except mdp.InputError as error:
            errors.append(str(error))

    with gated.client() as client:
        with gated.hold() as queued:
            threads = in_threads(ask, CALLS)
            full(queued)
            (closing,) = in_threads(client.close, 1)
            until(lambda: client._closed, "the client is being closed")
            with pytest.raises(mdp.InputError, match="this client is closed"):
                client.classify(RED)
        for thread in (*threads, closing):
            thread.join(PATIENCE_S)
    # What had been begun has ended first; a thread may not have come so far.
    assert MOST_OUT <= whole(answers) == CALLS - len(errors)
    assert set(errors) <= {"this client is closed"}


def test_a_signal_handler_closes_the_client_of_a_call_that_waits(gated: GatedFleet) -> None:
    answers: list[Prediction] = []
    main = threading.main_thread().ident
    assert main is not None
    with gated.client() as client:

        def ask() -> None:
            answers.append(client.classify(RED, deadline_ms=AGES_MS))

        def interrupt() -> None:
            until(lambda: bool(client._followers), "the main thread waits for the other's turn")
            signal.pthread_kill(main, signal.SIGUSR1)
            until(lambda: client._closed, "the handler closes the client")
            gated.gate.touch()

        before = signal.signal(signal.SIGUSR1, lambda *_: client.close())
        try:
            with gated.hold():
                (other,) = in_threads(ask, 1)
                until(lambda: client._holder is not None, "the other thread has its turn")
                (interrupting,) = in_threads(interrupt, 1)
                ask()
        finally:
            signal.signal(signal.SIGUSR1, before)
        for thread in (other, interrupting):
            thread.join(PATIENCE_S)
        with pytest.raises(mdp.InputError, match="this client is closed"):
            client.classify(RED)
    assert whole(answers) == 2


def test_an_async_client_is_closed_with_calls_waiting(gated: GatedFleet) -> None:
    async def ask() -> Sequence[object]:
        client = await mdp.AsyncClient.connect(gated.write(), timeout_s=PATIENCE_S)
        calls = asyncio.gather(
            *(client.classify(RED, deadline_ms=AGES_MS) for _ in range(CALLS)),
            return_exceptions=True,
        )
        with gated.hold() as queued:
            await asyncio.to_thread(full, queued)
            await client.aclose()
            return await calls

    assert [str(end) for end in asyncio.run(ask())] == ["this client is closed"] * CALLS


FORKS = """
import os, sys, threading
from pathlib import Path
import numpy as np
import mdp

fleet, gate, calls = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
picture, answers = np.zeros((8, 8, 3), np.uint8), []
with mdp.Client.connect(fleet, timeout_s=60) as client:
    client.classify(picture, deadline_ms=20_000)
    gate.unlink()
    def call():
        answers.append(len(client.classify(picture, deadline_ms=600_000).used))
    threads = [threading.Thread(target=call) for _ in range(calls)]
    for thread in threads:
        thread.start()
    with mdp.Client.connect(fleet, timeout_s=60) as other:
        while max(status.queued for status in other.status(timeout_s=60)) < 7:
            pass
    child = os.fork()
    if child == 0:
        try:
            client.classify(picture)
        except mdp.InputError as error:
            print(error, flush=True)
        client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.touch()
    for thread in threads:
        thread.join(60)
    print(answers)
"""


def test_a_client_is_forked_with_calls_waiting(gated: GatedFleet) -> None:
    words = ["-W", "ignore", "-c", FORKS, gated.write(), gated.gate, CALLS]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    said = "this client was made in another process: expected one that is made after the fork"
    assert done.stdout.splitlines() == [said, str([3] * CALLS)], done.stderr
