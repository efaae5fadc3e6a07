"""Both clients from their making to their end, in threads, event loops and processes."""

import asyncio
import itertools
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mdp
from mdp.client import crops as views
from mdp.client import sync
from mdp.client.base import FleetConnection
from mdp.pictures.crop import Picture
from mdp.testing.bundles import LABELS, colour_picture
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.raw_agent import raw_agent
from mdp.transport import dealers
from tests.support.fakes import FakeAgent
from tests.support.fleet import PLENTY_MS, ROOT, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")
RED = colour_picture("red")


def test_a_closed_client_stays_closed(fleet: Fleet) -> None:
    with fleet.client() as client:
        pass
    client.close()
    for use in (client.reload, client.__enter__, client.status, partial(client.classify, RED)):
        with pytest.raises(mdp.InputError, match="this client is closed"):
            use()


def test_a_client_can_be_closed_while_other_threads_call(fleet: Fleet) -> None:
    ends: list[BaseException | str] = []
    for _ in range(5):
        with fleet.client() as client:
            calling = threading.Barrier(4)

            def call(client: mdp.Client = client, calling: threading.Barrier = calling) -> None:
                try:
                    calling.wait(PATIENCE_S)
                    while True:
                        assert client.classify(RED, deadline_ms=PLENTY_MS).label == "red"
                except mdp.InputError as error:
                    ends.append(str(error))
                except BaseException as error:
                    ends.append(error)

            threads = [threading.Thread(target=call) for _ in range(3)]
            for thread in threads:
                thread.start()
            calling.wait(PATIENCE_S)
            client.classify(RED, deadline_ms=PLENTY_MS)
            client.close()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert ends == ["this client is closed"] * 15


def test_a_call_that_begins_to_wait_while_another_thread_closes_the_client(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed, may_wait, others_turn = (threading.Event() for _ in range(3))
    with fleet.client() as client:
        await_answer, is_awaited = client._await_answer, client._is_awaited

        def await_when_told(connection: FleetConnection, waiting: Any) -> mdp.Prediction:
            handed.set()
            assert may_wait.wait(PATIENCE_S)
            return await_answer(connection, waiting)

        def is_awaited_after_another_turn() -> bool:
            if threading.current_thread() is closing and not others_turn.is_set():
                # The turn of a third thread ended before the one that closes got its own.
                client._close_all()
                others_turn.set()
                may_wait.set()
                until(lambda: bool(client._followers), "the call waits")
            return is_awaited()

        monkeypatch.setattr(client, "_await_answer", await_when_told)
        monkeypatch.setattr(client, "_is_awaited", is_awaited_after_another_turn)
        ends: list[object] = []

        def end_of(use: Callable[[], object]) -> None:
            try:
                ends.append(use())
            except mdp.InputError as error:
                ends.append(str(error))

        closing = threading.Thread(target=end_of, args=[client.close])
        # A stream hands its calls in before it waits for them.
        calling = threading.Thread(
            target=end_of, args=[lambda: list(client.classify_many([RED], deadline_ms=PLENTY_MS))]
        )
        with ExitStack() as stack:
            # A stopped agent's answer cannot come before the call waits.
            for agent in fleet.agents.values():
                agent.signal(signal.SIGSTOP)
                stack.callback(agent.signal, signal.SIGCONT)
            calling.start()
            assert handed.wait(PATIENCE_S)
            closing.start()
            for thread in (closing, calling):
                thread.join(PATIENCE_S)
        assert sorted(map(str, ends)) == ["None", "this client is closed"]


FORKS = """
import os, sys
import numpy as np
import mdp

picture = np.zeros((8, 8, 3), np.uint8)
with mdp.Client.connect(sys.argv[1], timeout_s=60) as client:
    client.classify(picture, deadline_ms=20_000)
    child = os.fork()
    if child == 0:
        for use in (lambda: client.classify(picture), client.status, client.reload):
            try:
                use()
            except mdp.InputError as error:
                print(error, flush=True)
        client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(len(client.classify(picture, deadline_ms=20_000).used))
"""


def test_ctrl_c_at_any_line_of_a_call_lets_the_client_close(fleet: Fleet) -> None:
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal lines
        if frame.f_code.co_filename != sync.__file__ or frame.f_code.co_name == "close":
            return None
        lines -= event == "line"
        if lines == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    for number in itertools.count(1):
        with fleet.client() as client:
            lines, before = number, sys.gettrace()
            try:
                sys.settrace(trace)
                client.classify(RED, deadline_ms=PLENTY_MS)
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
        break
    assert number > 20


def test_a_client_refuses_use_in_a_forked_process(fleet: Fleet) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(fleet.write())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    said = "this client was made in another process: expected one that is made after the fork"
    assert done.stdout.splitlines() == [said] * 3 + ["3"], done.stderr


def test_a_cancelled_call(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    Image.fromarray(RED).save(tmp_path / "red.png")
    decoded = threading.Event()
    decode = views.Cutter.views

    def decode_and_signal(self: views.Cutter, picture: Picture) -> object:
        try:
            return decode(self, picture)
        finally:
            decoded.set()

    monkeypatch.setattr(views.Cutter, "views", decode_and_signal)

    async def cancel_calls(path: Path) -> int:
        count = 0
        async with mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S) as client:
            for number in range(30):
                decoded.clear()
                picture = tmp_path / "red.png"
                call = asyncio.create_task(client.classify(picture, deadline_ms=PLENTY_MS))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                # The decoder ends while the loop stands still, and the call is cancelled then.
                assert decoded.wait(PATIENCE_S)
                for _ in range(number % 5):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call], timeout=1.0)
                count += call.cancelled()
        return count

    with ExitStack() as stack:
        silent = {name: stack.enter_context(FakeAgent(lambda _: [])) for name in fleet.agents}
        path = fleet.write(**{name: agent.address for name, agent in silent.items()})
        assert asyncio.run(cancel_calls(path)) == 30


def test_an_async_client_lives_as_the_other_one_does(fleet: Fleet, tmp_path: Path) -> None:
    path = fleet.write()

    async def pictures() -> AsyncIterator[Picture]:
        for label in LABELS:
            yield colour_picture(label)

    async def ask() -> None:
        client = await mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S)
        assert len((await client.classify(RED, deadline_ms=PLENTY_MS)).used) == 3
        stream = client.stream(pictures(), deadline_ms=PLENTY_MS)
        assert [answer.label async for answer in stream] == list(LABELS)
        answers = await client.classify_many([RED] * 3, deadline_ms=PLENTY_MS)
        assert [answer.label for answer in answers] == ["red"] * 3
        await client.aclose()
        # A device that never answers, so that no call ends before the client is closed.
        with FakeAgent(lambda _: []) as silent:
            silenced = fleet.write(alpha=silent.address)
            waiting = await mdp.AsyncClient.connect(silenced, timeout_s=PATIENCE_S)
            under_way = asyncio.gather(
                *(waiting.classify(RED, deadline_ms=PLENTY_MS) for _ in range(3)),
                return_exceptions=True,
            )
            await asyncio.sleep(0)
            await waiting.aclose()
            ended = await under_way
        fleet.write()
        assert [str(end) for end in ended] == ["this client is closed"] * 3
        for use in (client.classify(RED), client.status(), client.reload(), client.__aenter__()):
            with pytest.raises(mdp.InputError, match="this client is closed"):
                await use
        client.close()
        # Nobody has waited for the agents: the first call does.
        other = mdp.AsyncClient(path, timeout_s=PATIENCE_S)
        assert len((await other.classify(RED, deadline_ms=PLENTY_MS)).used) == 3
        other.close()

    asyncio.run(ask())
    with mdp.Client(path, timeout_s=PATIENCE_S) as client:
        assert len(client.classify(RED, deadline_ms=PLENTY_MS).used) == 3
        answers = client.classify_many(map(colour_picture, LABELS), deadline_ms=PLENTY_MS)
        assert [answer.label for answer in answers] == list(LABELS)


def test_a_client_leaves_devices_out_until_it_is_told_otherwise(fleet: Fleet) -> None:
    path = fleet.write()
    with mdp.Client.connect(path, opinions=True, timeout_s=PATIENCE_S) as client:
        with pytest.raises(mdp.InputError, match="no device 'omega': expected some of alpha, beta"):
            client.leave_out("alpha", "omega")
        client.leave_out("beta")
        client.reload(timeout_s=PATIENCE_S)
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.missing == {"beta": "left out: by this client"}
        assert [member.label for member in answer.members] == ["red", "red"]
        client.leave_out()
        assert client.classify(RED, deadline_ms=PLENTY_MS).missing == {}
        client.leave_out("alpha", "beta", "gamma")
        with pytest.raises(mdp.QuorumNotMet, match=r"alpha, beta, gamma: left out: by this client"):
            client.classify(RED, deadline_ms=PLENTY_MS)


def test_one_call_connects_asks_and_closes(fleet: Fleet) -> None:
    answer = mdp.classify(fleet.write(), RED, deadline_ms=PLENTY_MS, timeout_s=PATIENCE_S)
    assert (answer.label, len(answer.used), answer.deadline_ms) == ("red", 3, PLENTY_MS)
    nobody = {name: f"tcp://127.0.0.1:{port}" for port, name in enumerate(fleet.agents, 1)}
    # Half of the deadline is left to ask, however long the agents may be waited for.
    with pytest.raises(mdp.InferenceError):
        mdp.classify(fleet.write(**nobody), RED, deadline_ms=100, timeout_s=PATIENCE_S)


def test_an_async_stream_gives_errors_in_their_place(fleet: Fleet) -> None:
    nobody = {name: f"tcp://127.0.0.1:{port}" for port, name in enumerate(fleet.agents, 1)}

    async def ask() -> list[object]:
        async with mdp.AsyncClient.connect(fleet.write(**nobody), timeout_s=0.0) as client:
            return [answer async for answer in client.stream([RED] * 3, errors="yield")]

    assert [type(answer) for answer in asyncio.run(ask())] == [mdp.QuorumNotMet] * 3


def test_a_flooding_device_leaves_the_loop(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def flood(peer: socket.socket) -> None:
        while True:
            peer.sendall(b"\x00\x01x" * 10_000)

    # As if it were never cut off.
    monkeypatch.setattr(dealers, "MOST_UNASKED", 10**9)

    async def ask(path: Path) -> list[tuple[str, ...]]:
        async with mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S) as client:
            calls = (client.classify(RED, deadline_ms=PLENTY_MS) for _ in range(3))
            return [(await call).used for call in calls]

    with raw_agent(flood) as address:
        used = asyncio.run(ask(fleet.write(alpha=address)))
    assert used == [("beta", "gamma")] * 3
