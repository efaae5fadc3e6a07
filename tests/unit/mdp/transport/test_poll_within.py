"""Waits of a client: whole milliseconds first, then for what is left. No sockets, no sleeps."""

import math
import select
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.transport.sockets import poll_within

TOLD = [(7, 1)]


class World:
    """A clock that waiting sets forward, an `epoll` and a `select`; something comes at `comes_s`.

    `epoll` rounds up to whole milliseconds, as the real one does.
    """

    def __init__(self, comes_s: float = math.inf, descriptor: int = 5) -> None:
        self.now_s, self._comes_s, self._descriptor = 100.0, 100.0 + comes_s, descriptor
        self.selected: list[float] = []

    def fileno(self) -> int:
        return self._descriptor

    def poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if timeout_s is None:
            self.now_s = self._comes_s
        elif timeout_s > 0:
            self._wait(math.ceil(timeout_s * 1e3) / 1e3)
        return TOLD if self._comes_s <= self.now_s else []

    def select(self, readers: list[Any], *_: Any) -> None:
        assert readers == [self]
        timeout_s = _[-1]
        self.selected.append(timeout_s)
        self._wait(timeout_s)

    def monotonic(self) -> float:
        return self.now_s

    def _wait(self, timeout_s: float) -> None:
        self.now_s = min(self.now_s + timeout_s, max(self.now_s, self._comes_s))

    def poll_within(self, timeout_s: float | None) -> list[tuple[int, int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", self.monotonic)
            patch.setattr(select, "select", self.select)
            waited: Any = self
            return poll_within(waited, timeout_s)


@given(st.floats(1e-6, 20.0), st.floats(0.0, 20.0))
def test_nobody_waits_longer_than_asked_nor_ends_before(timeout_s: float, comes_s: float) -> None:
    world = World(comes_s)
    told = world.poll_within(timeout_s)
    assert world.now_s == pytest.approx(100.0 + min(timeout_s, comes_s), abs=1e-9)
    if abs(comes_s - timeout_s) > 1e-9:
        assert told == (TOLD if comes_s < timeout_s else [])


@given(st.floats(1e-6, 20.0))
def test_only_the_last_millisecond_is_waited_for_more_finely(timeout_s: float) -> None:
    world = World()
    world.poll_within(timeout_s)
    assert sum(world.selected) <= 0.001 + 1e-9


def test_who_is_told_in_the_whole_milliseconds_pays_nothing_for_the_rest() -> None:
    world = World(comes_s=0.0012)
    assert world.poll_within(0.0025) == TOLD
    assert not world.selected


def test_a_descriptor_that_is_too_large_for_select_waits_a_little_longer() -> None:
    world = World(descriptor=1024)
    assert world.poll_within(0.0025) == []
    assert not world.selected
    assert 100.0025 <= world.now_s < 100.0035


@pytest.mark.parametrize("timeout_s", [0.0, None])
def test_now_and_whenever_are_no_times_to_split(timeout_s: float | None) -> None:
    world = World(comes_s=0.0 if timeout_s == 0.0 else 3.3)
    assert world.poll_within(timeout_s) == TOLD
    assert not world.selected
