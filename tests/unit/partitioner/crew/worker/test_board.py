"""The table of all trainers on a terminal."""

import io
import re
import threading
from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

from partitioner.crew.messages import State
from partitioner.crew.worker import progress as shown
from partitioner.run.progress import Progress

pytestmark = pytest.mark.torch

STATE = State(
    job="member-12",
    share=0.456,
    pictures_per_s=1234.5,
    said="epoch 2 of 40, loss 0.292, bag 1.234",
    sent_bytes=2_500_000,
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Looks:
    """Two trainers; the second look at them is waited for."""

    def __init__(self) -> None:
        self.looks, self.looked = 0, threading.Event()

    def __call__(self) -> Mapping[str, State]:
        self.looks += 1
        if self.looks > 2:
            self.looked.set()
        return {"home": STATE, "tower": STATE}


@pytest.mark.parametrize(
    ("width", "row"),
    [
        (80, "home     member-12   46%       1,234  epoch 2 of 40, loss 0.292, bag…      2.5"),
        (40, "home     member-12   46%  epoch 2 of …"),
    ],
)
def test_a_table_is_redrawn_in_a_line_for_each_and_removed(
    monkeypatch: pytest.MonkeyPatch, width: int, row: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shown, "LOOK_S", 0.001)
    looks, terminal = Looks(), Terminal()
    told = shown.board(looks, ["home", "tower"], Progress(terminal))

    def interrupted() -> None:
        with told as note:
            note("a note")
            assert looks.looked.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    said = terminal.getvalue()
    lines = ANSI.sub("", said.replace("\r", "\n")).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.strip() for line in lines if line.startswith(" home")]
    assert len(rows) > 1
    assert set(rows) == {row}
    assert lines.count("a note") == 1
    # Three lines were drawn: each is cleared, and the cursor is shown again.
    assert said.endswith("\x1b[?25h\r" + "\x1b[1A\x1b[2K" * 3)
