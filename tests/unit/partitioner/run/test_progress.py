"""Away from a terminal: a line now and then, with the time left, and one at the end."""

import io
import threading
from itertools import count

import pytest

from mdp.testing.processes import PATIENCE_S
from partitioner.run import progress as module
from partitioner.run.progress import Activity, Progress


class SetClock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_lines_come_every_ten_seconds_and_say_what_is_left() -> None:
    stream, ticks = io.StringIO(), count(0, 4)
    progress = Progress(stream, clock=lambda: float(next(ticks)))
    with progress.task("sorting", 6) as advance:
        for number in range(6):
            advance(1, f"item {number}")
    assert stream.getvalue().splitlines() == [
        "sorting: 50%, about 12 s left  item 2",
        "sorting: done in 28.0 s",
    ]


def test_time_left_does_not_count_what_was_done_before() -> None:
    stream, ticks = io.StringIO(), count(0, 10)
    progress = Progress(stream, clock=lambda: float(next(ticks)))
    with progress.task("sorting", 10, done=8) as advance:
        advance(1, "")
    assert stream.getvalue().splitlines()[0] == "sorting: 90%, about 10 s left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with Progress(stream).task("sorting", 2) as advance:
        advance(2, "last item")
    assert "sorting" in stream.getvalue()
    assert "100%" in stream.getvalue()


def test_a_line_says_how_far_a_work_is() -> None:
    work = Activity("sorting", 100.0, total=10, done=4, before=4)
    assert work.line(112.4) == "sorting: 12 s so far"
    work.done, work.said = 6, "item 5"
    assert work.line(112.4) == "sorting: 60%, about 25 s left  item 5"
    assert Activity("reading", 90.0).line(112.4) == "reading: 22 s so far"


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never looks, so that tests do."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", PATIENCE_S)


@pytest.mark.usefixtures("unseen")
def test_silence_ends_with_what_began_last() -> None:
    stream, clock = io.StringIO(), SetClock()
    progress = Progress(stream, clock=clock)

    def look_at(now_s: float) -> list[str]:
        clock.now_s = now_s
        progress.look()
        said = stream.getvalue().splitlines()
        stream.seek(0)
        stream.truncate()
        return said

    with progress.step("build"):
        assert look_at(108.4) == []
        assert look_at(109) == ["build: 9 s so far"]
        with progress.task("sorting", 4) as advance:
            # What begins is no line.
            assert look_at(117.4) == []
            assert look_at(118) == ["sorting: 9 s so far"]
            clock.now_s = 119
            advance(1, "item 0")
            assert look_at(127) == ["sorting: 25%, about 54 s left  item 0"]
            # The line that a unit would have had was just printed.
            clock.now_s = 128
            advance(1, "item 1")
            assert look_at(128) == []
        assert look_at(128) == ["sorting: done in 19.0 s"]
        progress.note("sorted")
        assert look_at(140) == ["sorted"]
        assert look_at(148.4) == []
        assert look_at(149) == ["build: 49 s so far"]
        with progress.display():
            assert look_at(200) == []
    assert look_at(300) == []


class HeardStream(io.StringIO):
    """A stream that says when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.heard.set()
        return written


def test_a_thread_looks_until_the_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    stream, clock = HeardStream(), SetClock()
    progress = Progress(stream, clock=clock)
    with progress.step("exporting"):
        clock.now_s += 9
        assert stream.heard.wait(PATIENCE_S)
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    assert stream.getvalue() == "exporting: 9 s so far\n"
    with pytest.raises(KeyboardInterrupt), progress.step("exporting"):
        raise KeyboardInterrupt
    assert "progress" not in [thread.name for thread in threading.enumerate()]
