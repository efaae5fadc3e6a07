"""Jobs side by side: in order, at the same time, and ended by the first error."""

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mdp.testing.processes import PATIENCE_S
from partitioner.run import threads
from partitioner.run.progress import Progress
from partitioner.run.threads import side_by_side


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def test_two_at_a_time_and_in_order() -> None:
    both, said = threading.Barrier(2, timeout=PATIENCE_S), io.StringIO()

    def double(number: int) -> int:
        # Alone none of them would go on.
        both.wait()
        return 2 * number

    assert side_by_side(double, range(4), Progress(said), "doubling") == [0, 2, 4, 6]
    assert "doubling" in said.getvalue()


def test_after_an_error_nothing_further_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        """Says when it is told to begin no more."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            given_up.set()
            super().shutdown(wait)

    def fail(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("the first")
        assert given_up.wait(PATIENCE_S)

    monkeypatch.setattr(threads, "ThreadPoolExecutor", Pool)
    with pytest.raises(ValueError, match="the first"):
        side_by_side(fail, range(100), Progress(io.StringIO()), "failing")
    assert len(begun) <= 3
