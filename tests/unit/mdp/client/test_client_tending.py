"""A slow decoder in a stream keeps no other call from being decided in time."""

import math
import threading

import pytest

from mdp.client.sync import Client
from mdp.transport import this_process


class Bench:
    """A client without sockets, whose clock goes on only while a picture is being decoded."""

    def __init__(self, decides_s: list[float], decoding_s: float) -> None:
        self.now_s = 0.0
        self.decides_s, self.done_s = decides_s, decoding_s
        self.decided: list[tuple[float, float]] = []
        self.client = object.__new__(Client)
        self.client._turn, self.client._holder = threading.RLock(), None
        self.client._claims, self.client._followers = set(), {}
        self.client._former, self.client._connection = [], self  # type: ignore[assignment]
        self.arrivals: list[None] = []
        self.client._closed, self.client._process = False, this_process()
        self.client._clock = lambda: self.now_s

    def step(self, timeout_s: float) -> None:
        assert timeout_s == 0.0
        self.tick()

    @property
    def dispatcher(self) -> "Bench":
        return self

    def tick(self) -> None:
        while self.decides_s and self.decides_s[0] <= self.now_s:
            self.decided.append((self.decides_s.pop(0), self.now_s))

    def next_wake_s(self) -> float:
        return self.decides_s[0] if self.decides_s else math.inf

    def is_alive(self) -> bool:
        return self.now_s < self.done_s

    def join(self, timeout: float) -> None:
        self.now_s = min(self.now_s + timeout, self.done_s)

    def decode(self, until_s: float, *, tending: bool) -> None:
        self.client._join(self, self, until_s, tending=tending)  # type: ignore[arg-type]


@pytest.mark.parametrize("decoding_s", [0.95, 50.0])
def test_calls_under_way_are_decided_while_a_picture_is_decoded(decoding_s: float) -> None:
    bench = Bench([0.25, 0.5], decoding_s)
    bench.decode(1.0, tending=True)
    assert bench.decided == [(0.25, 0.25), (0.5, 0.5)]
    assert bench.now_s == min(decoding_s, 1.0)


def test_a_single_call_waits_for_its_picture_alone() -> None:
    bench = Bench([0.25], 0.75)
    bench.decode(1.0, tending=False)
    assert (bench.decided, bench.now_s) == ([], 0.75)


def test_where_another_thread_has_the_turn_it_sees_to_the_calls() -> None:
    bench = Bench([0.25], 0.75)
    another = threading.Thread(target=bench.client._turn.acquire)
    another.start()
    another.join()
    bench.decode(1.0, tending=True)
    assert (bench.decided, bench.now_s) == ([], 0.75)
