"""Away from a terminal: a line now and then, with the time left, and one at the end."""

import io
from itertools import count

from partitioner.run.progress import Progress


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
