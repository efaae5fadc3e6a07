"""A gateway's connections without sockets: a loop and a transport that only remember."""

import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from mdp.gateway import server
from mdp.gateway.places import ConnectionPlaces


class Timer:
    """A call that is due after some seconds, unless it is cancelled."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s, self.call, self._cancelled = delay_s, call, False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class Loop:
    """Timers that nobody waits for."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, call))
        return self.timers[-1]


class Transport:
    """A connection that says whether it was aborted."""

    def __init__(self) -> None:
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else ("127.0.0.1", 1)

    # As its socket.

    def setsockopt(self, *given: int) -> None:
        """Nothing."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8080

    getpeername = getsockname

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        """A connection that is closed waits until all is read."""


async def answer(scope: object, receive: object, send: object) -> None:
    """An application that nobody asks."""


def connection() -> tuple[Any, Transport, Loop]:
    loop, transport = Loop(), Transport()
    of_protocol: dict[str, Any] = {
        "config": uvicorn.Config(answer, log_config=None),
        "server_state": ServerState(),
        "app_state": {},
        "_loop": loop,
    }
    protocol = server._Protocol(ConnectionPlaces(16), **of_protocol)
    protocol.connection_made(transport)
    return protocol, transport, loop


def test_a_reader_whose_buffer_does_not_drain_is_ended() -> None:
    protocol, transport, loop = connection()
    protocol.pause_writing()
    (timer,) = [timer for timer in loop.timers if timer.delay_s == server.UNREAD_S]
    assert not transport.aborted
    timer.call()
    assert transport.aborted


def test_a_reader_that_reads_in_time_is_not() -> None:
    protocol, _, loop = connection()
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.pause_writing()
    protocol.connection_lost(None)
    unread = [timer for timer in loop.timers if timer.delay_s == server.UNREAD_S]
    assert [timer.cancelled() for timer in unread] == [True, True]


def test_only_an_answer_that_is_read_keeps_its_place() -> None:
    protocol, _, _ = connection()
    protocol.cycle = SimpleNamespace(response_complete=False, more_body=False)
    busy = []
    for event in (protocol._note_busy, protocol.pause_writing, protocol.resume_writing):
        event()
        busy.append(protocol._claim.busy)
    assert busy == [True, False, True]


@pytest.mark.parametrize(("descriptors", "most"), [(64, 32), (1024, 256), (2**20, 256)])
def test_connections_leave_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, 2**20))
    assert server.most_connections() == most
