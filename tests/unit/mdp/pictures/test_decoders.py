"""Decoders beside calls: bounded in number and memory, abandoned ones counted. No clocks."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mdp.errors import PictureError
from mdp.pictures import decoders
from mdp.pictures.decoders import LARGE_BYTES, NOT_DECODED, Decoders, Decoding, memory_for
from mdp.testing.processes import PATIENCE_S, LineProcess, until


@contextmanager
def held() -> Iterator[Callable[[], str]]:
    """Work that lasts until the end of the block."""
    free = threading.Event()

    def work() -> str:
        assert free.wait(PATIENCE_S)
        return "decoded"

    try:
        yield work
    finally:
        free.set()


def result_of(decoding: Decoding[str]) -> str:
    decoding.join(PATIENCE_S)
    assert not decoding.is_alive()
    return decoding.result()


def test_those_beyond_the_slots_wait_for_one_and_no_thread_stays_idle() -> None:
    pool, before = Decoders(slots=2, idle_s=0.01), threading.active_count()
    with held() as work:
        running = [pool.start(work) for _ in range(2)]
        waiting = [pool.start(lambda name=name: name) for name in "ab"]  # type: ignore[misc]
        assert [each.started for each in running + waiting] == [True, True, False, False]
        assert threading.active_count() == before + 2
    assert [result_of(each) for each in running + waiting] == ["decoded", "decoded", "a", "b"]
    until(lambda: threading.active_count() == before, "the threads have ended")


def test_a_thread_decodes_one_picture_after_another() -> None:
    pool = Decoders(slots=2, idle_s=PATIENCE_S)
    first = pool.start(threading.get_ident)
    first.join(PATIENCE_S)
    for _ in range(20):
        following = pool.start(threading.get_ident)
        following.join(PATIENCE_S)
        assert following.result() == first.result()


def test_any_number_from_many_threads_is_decoded() -> None:
    pool, results = Decoders(slots=3, idle_s=0.0), queue.SimpleQueue[int]()

    def caller(first: int) -> None:
        for number in range(first, first + 200):
            decoding = pool.start(lambda number=number: number)  # type: ignore[misc]
            decoding.join(PATIENCE_S)
            results.put(decoding.result())

    callers = [threading.Thread(target=caller, args=(1000 * each,)) for each in range(5)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(PATIENCE_S)
    found = sorted(results.get_nowait() for _ in range(1000))
    assert found == sorted(1000 * each + number for each in range(5) for number in range(200))


def test_abandoned_ones_are_counted_and_named_as_the_reason() -> None:
    pool = Decoders(slots=2)
    with held() as work:
        first, second, third, fourth = (pool.start(work) for _ in range(4))
        assert first.abandon() == NOT_DECODED
        assert pool.orphans == 1
        expected = "2 others are being decoded, 1 of them for calls that have ended"
        assert third.abandon() == f"{NOT_DECODED}: {expected}"
        assert third.abandon() == f"{NOT_DECODED}: {expected}", "twice is once"
    assert [result_of(each) for each in (first, second, fourth)] == ["decoded"] * 3
    assert third.is_alive(), "it was never begun"
    until(lambda: pool.orphans == 0, "none runs any more")


def test_what_decoding_raises_is_raised_where_it_is_waited_for() -> None:
    def broken() -> str:
        raise PictureError("half a picture")

    pool = Decoders(slots=1)
    with pytest.raises(PictureError, match="half a picture"):
        result_of(pool.start(broken))
    assert result_of(pool.start(lambda: "the next")) == "the next"


def test_a_system_without_threads_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = Decoders(slots=1)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.start(lambda: "")
    assert result_of(pool.start(lambda: "the next")) == "the next"


def test_large_pictures_are_decoded_one_at_a_time_and_small_ones_beside_them() -> None:
    pool, inside = Decoders(), threading.Event()

    def large() -> str:
        with memory_for(LARGE_BYTES + 1):
            inside.set()
            return work()

    def small() -> str:
        with memory_for(LARGE_BYTES):
            return "small"

    with held() as work:
        first = pool.start(large)
        assert inside.wait(PATIENCE_S)
        second = pool.start(large)
        assert result_of(pool.start(small)) == "small"
        assert second.is_alive()
        # Its slot is free again though the first one goes on.
        second.abandon()
        with pytest.raises(PictureError, match="its call has ended"):
            result_of(second)
        assert first.is_alive()
    assert result_of(first) == "decoded"
    assert result_of(pool.start(large)) == "decoded"


#: Holds a file's lock until its standard input ends.
HOLDER = (
    "import fcntl, sys; file = open(sys.argv[1], 'wb'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print(flush=True); sys.stdin.read()"
)


def test_large_pictures_take_turns_with_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(needed_bytes: int) -> Callable[[], str]:
        def work() -> str:
            with memory_for(needed_bytes):
                return "decoded"

        return work

    pool, turns = Decoders(), tmp_path / "turns"
    monkeypatch.setattr(decoders, "_SHARED", None)
    with turns.open("wb") as file:
        decoders.take_turns(file.fileno())
        with LineProcess("holder", [sys.executable, "-c", HOLDER, turns]) as holder:
            holder.line()
            given_up, waiting = (pool.start(decode(LARGE_BYTES + 1)) for _ in range(2))
            assert result_of(pool.start(decode(LARGE_BYTES))) == "decoded"
            assert waiting.is_alive()
            given_up.abandon()
            with pytest.raises(PictureError, match="its call has ended"):
                result_of(given_up)
            assert waiting.is_alive()
        # Killed, it has no turn any more.
        assert result_of(waiting) == "decoded"


def test_fewer_pictures_at_a_time() -> None:
    pool = Decoders()
    pool.limit(1)
    with held() as work:
        first, second = pool.start(work), pool.start(work)
        assert (first.started, second.started) == (True, False)
    assert (result_of(first), result_of(second)) == ("decoded", "decoded")


def test_a_forked_child_begins_with_free_slots() -> None:
    with held() as work:
        running = [decoders.DECODERS.start(work) for _ in range(decoders.SLOTS)]
        child = os.fork()
        if child == 0:
            done = decoders.DECODERS.start(lambda: "")
            done.join(PATIENCE_S)
            os._exit(done.is_alive())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [result_of(each) for each in running] == ["decoded"] * decoders.SLOTS
