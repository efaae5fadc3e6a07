"""Calls of before a reload beside those after it: a client whose connections are a test's."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from mdp.client import sync
from mdp.client.sync import Client, _Waiting
from mdp.errors import PictureError
from mdp.requests.deadline import Deadline
from mdp.transport import this_process

PICTURE = b"any"


class PlayedCall:
    """A call that is answered by the next step."""

    def __init__(self, done: Callable[[Any], None] | None, answer: str) -> None:
        self.done, self.told, self.answer = done, answer, None

    def end(self) -> None:
        self.answer = self.told  # type: ignore[assignment]
        if self.done is not None:
            self.done(self)

    def result(self) -> str:
        assert self.answer is not None
        return self.answer


class PlayedConnection:
    """Answers each call with its own name at the step after its beginning."""

    def __init__(self, name: str) -> None:
        self.name, self.closed, self.steps = name, False, 0
        self.users: set[object] = set()
        self.arrivals: deque[Callable[[], None]] = deque()
        self.calls: list[PlayedCall] = []
        self.transport = self.dispatcher = self

    @property
    def busy(self) -> bool:
        return bool(self.calls)

    def cut(self, picture: object) -> object:
        return picture

    def submit(self, question: object, deadline: object, done: Any = None) -> PlayedCall:
        call = PlayedCall(done, self.name)
        self.calls.append(call)
        return call

    def abandon(self, call: PlayedCall) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def take_in(self) -> None:
        assert not self.closed, f"{self.name} is closed"

    def step(self, timeout_s: float = 0.0) -> None:
        self.take_in()
        self.steps += 1
        assert self.steps < 1000, f"only {self.name} is seen to"
        calls, self.calls = self.calls, []
        while self.arrivals:
            self.arrivals.popleft()()
        for call in calls:
            call.end()

    def is_settled(self) -> bool:
        return True

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self.closed = True


class Bench:
    """A client, the connection that it has, and the one that a reload brings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before, self.after = PlayedConnection("before"), PlayedConnection("after")
        client: Any = object.__new__(Client)
        client._turn, client._holder = threading.RLock(), None
        client._claims, client._followers, client._former = set(), {}, []
        client._closed, client._process = False, this_process()
        client._clock, client._options = lambda: 0.0, None
        client._connection = self.before

        def adopt(connection: Any) -> Any:
            former, client._connection = client._connection, connection
            return former

        client._adopt = adopt
        client._cut = lambda connection, *_, **__: connection.cut(PICTURE)
        self.client = client
        monkeypatch.setattr(sync, "FleetConnection", lambda *_, **__: self.after)

    def reload_before(self, name: str) -> None:
        """Reload the client right before its method `name` is called for the first time."""
        real = getattr(self.client, name)

        def late(*args: Any, **more: Any) -> Any:
            setattr(self.client, name, real)
            self.client.reload()
            return real(*args, **more)

        setattr(self.client, name, late)


def test_a_connection_without_calls_closes_with_the_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    assert bench.client.classify(PICTURE) == "before"
    bench.client.reload()
    assert (bench.before.closed, bench.after.closed) == (True, False)
    assert bench.client.classify(PICTURE) == "after"
    bench.client.close()
    assert bench.after.closed


@pytest.mark.parametrize("name", ["_cut", "_hand_in"])
def test_a_stream_s_connection_stays_open_over_a_reload(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bench = Bench(monkeypatch)
    bench.reload_before(name)
    answers = bench.client.stream([PICTURE] * 3, in_flight=2)
    assert next(answers) == "before"
    # Its call has ended, and so nothing keeps the connection.
    assert bench.before.closed
    assert [*answers] == ["after", "after"]
    assert not bench.after.users


@pytest.mark.parametrize("name", ["_cut", "_ask"])
def test_a_call_s_connection_closes_with_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bench = Bench(monkeypatch)
    bench.reload_before(name)
    assert bench.client.classify(PICTURE) == "before"
    assert bench.before.closed
    assert not bench.before.users


def test_a_stream_that_is_left_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    answers = bench.client.stream([PICTURE] * 9, in_flight=3)
    assert next(answers) == "before"
    bench.client.reload()
    assert not bench.before.closed
    answers.close()
    assert bench.before.closed


def test_a_picture_of_a_stream_that_cannot_be_read_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)

    def cut(*_: object, **__: object) -> object:
        raise PictureError("expected a picture")

    bench.client._cut = cut
    (found,) = bench.client.stream([PICTURE], errors="yield")
    assert str(found) == "expected a picture"
    assert not bench.before.users


def test_closing_sees_to_calls_of_before_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    user = object()
    bench.before.users.add(user)
    bench.client.reload()
    assert not bench.before.closed
    # As of a thread that has decoded meanwhile, and waits for another one's turn.
    waiting = _Waiting(object(), Deadline(0.0, 1000.0))  # type: ignore[arg-type]
    bench.before.arrivals.append(lambda: waiting.begin(bench.before))  # type: ignore[arg-type]
    bench.client._followers[waiting] = None
    bench.client.close()
    assert waiting.result() == "before"  # type: ignore[comparison-overlap]
    assert bench.before.closed
    assert bench.after.closed


def test_calls_of_before_and_after_a_reload_go_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    user = object()
    bench.before.users.add(user)
    bench.client.reload()
    waiting = _Waiting(object(), Deadline(0.0, 1000.0))  # type: ignore[arg-type]
    bench.client._hand_in(bench.after, waiting)
    # The thread whose turn it is has a call of before.
    former = bench.before.submit(object(), object())
    while former.answer is None or not waiting.over:
        bench.client._step(bench.before)
    assert waiting.result() == "after"
