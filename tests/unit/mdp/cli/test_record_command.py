"""The moments that `mdp record` chooses."""

import io
import os
import pty
import select
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from mdp.cli.main import main
from mdp.cli.record import await_enter
from mdp.client.cameras import SIDE, WITHIN_MS, FleetCameras
from mdp.client.scenes import Scene
from mdp.protocol.recording import PICTURES_PER_S
from tests.support.clock import Clock
from tests.support.command_lines import run_here


class SlowCameras(FleetCameras):
    """Two cameras, the third picture of which takes longer than two moments."""

    def __init__(self, clock: Clock) -> None:
        self.clock = self._clock = clock
        self.asked_s: list[float] = []

    def wait(self, until_s: float) -> None:
        # Woken a little too late, as on every machine.
        self.clock.now_s = max(self.clock.now_s, until_s) + 0.001

    def take(self, side: int = SIDE) -> Scene:
        self.asked_s.append(self.clock.now_s)
        self.clock.now_s += 1.2 if len(self.asked_s) == 3 else 0.01
        number = len(self.asked_s)
        pictures = {"alpha": b"a%d" % number, "beta": b"b%d" % number}
        return Scene(pictures=pictures, missing={})

    def close(self) -> None:
        pass


@pytest.fixture
def cameras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowCameras:
    """Cameras of the fleet file in `tmp_path`, and a clock of theirs."""
    (tmp_path / "fleet.toml").write_text(
        'devices = [{ device = "alpha", address = "tcp://127.0.0.1:1", k = 0 }]'
    )
    cameras = SlowCameras(Clock())
    made: Callable[..., SlowCameras] = lambda *_, **__: cameras  # noqa: E731
    monkeypatch.setattr("mdp.cli.record.FleetCameras", made)
    monkeypatch.setattr("mdp.cli.record.time", SimpleNamespace(monotonic=cameras.clock))
    return cameras


def record(folder: Path, *words: object) -> CompletedProcess[str]:
    asked = ("--fleet", folder / "fleet.toml", "--out", folder / "out", "--every", "500ms")
    return run_here(main, "mdp", "record", *asked, *words)


def test_a_slow_picture_brings_no_two_moments_closer(tmp_path: Path, cameras: SlowCameras) -> None:
    done = record(tmp_path, "--label", "a", "--count", 8)
    assert done.returncode == 0, done.stderr
    gaps_s = [b - a for a, b in zip(cameras.asked_s, cameras.asked_s[1:], strict=False)]
    assert len(gaps_s) == 7
    # The rate above which an agent refuses a picture.
    assert min(gaps_s) >= 1 / PICTURES_PER_S
    # A whole `--every` after it: whoever turns the item has the time.
    assert max(gaps_s) == pytest.approx(1.2 + 0.5 + 0.001)


def test_further_classes_wait_for_enter(
    tmp_path: Path, cameras: SlowCameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    done = record(tmp_path, "--label", "a", "b", "unknown", "--count", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"mdp: {tmp_path / 'out' / 'a'}: 2 scenes",
        "mdp: put b before the cameras, then press Enter",
        f"mdp: {tmp_path / 'out' / 'b'}: 2 scenes",
        "mdp: put unknown before the cameras, then press Enter",
        f"mdp: {tmp_path / 'out' / 'unknown'}: 2 scenes",
    ]
    # A picture is at most so old: none shows what was there before.
    begins = [cameras.asked_s[n] - cameras.asked_s[n - 1] for n in (2, 4)]
    assert min(begins) >= WITHIN_MS / 1e3
    assert {path.parent.name for path in (tmp_path / "out").glob("*/*")} == {"a", "b", "unknown"}


def test_enter_that_was_pressed_before_the_question_does_not_answer_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would record the items of one class under the name of the next."""
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(master, b"early\n")
        select.select([terminal], [], [])

        def press(*_: object) -> str:
            assert capsys.readouterr().err.startswith("mdp: put nut before")
            assert not select.select([terminal], [], [], 0)[0]
            return "\n"

        monkeypatch.setattr(terminal, "readline", press, raising=False)
        assert await_enter("nut") > 0
    os.close(master)


@pytest.mark.parametrize(
    ("words", "typed", "expected"),
    [
        (("--label", "a", "b"), "", "--label a b: expected --count, as there are several"),
        (
            ("--label", "a", "b", "--count", "1"),
            "",
            "--label b: expected a line on standard input, which has ended",
        ),
        (("--label", "a", "b/c"), "", "--label 'b/c': expected the name of a folder"),
    ],
)
def test_several_classes_that_cannot_be_recorded(
    tmp_path: Path,
    cameras: SlowCameras,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    typed: str,
    expected: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = record(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"mdp: {expected}"
