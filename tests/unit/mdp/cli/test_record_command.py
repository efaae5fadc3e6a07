"""The moments that `mdp record` chooses."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

from mdp.cli.main import main
from mdp.client.scenes import Scene
from mdp.protocol.recording import PICTURES_PER_S
from tests.support.clock import Clock
from tests.support.command_lines import run_here


class SlowCameras:
    """Two cameras, the third picture of which takes longer than two moments."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked_s: list[float] = []

    def wait(self, until_s: float) -> None:
        # Woken a little too late, as on every machine.
        self.clock.now_s = max(self.clock.now_s, until_s) + 0.001

    def take(self) -> Scene:
        self.asked_s.append(self.clock.now_s)
        self.clock.now_s += 1.2 if len(self.asked_s) == 3 else 0.01
        number = len(self.asked_s)
        pictures = {"alpha": b"a%d" % number, "beta": b"b%d" % number}
        return Scene(pictures=pictures, missing={})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_slow_picture_brings_no_two_moments_closer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('devices = [{ device = "alpha", address = "tcp://127.0.0.1:1", k = 0 }]')
    clock = Clock()
    cameras = SlowCameras(clock)
    made: Callable[..., SlowCameras] = lambda *_, **__: cameras  # noqa: E731
    monkeypatch.setattr("mdp.cli.record.FleetCameras", made)
    monkeypatch.setattr("mdp.cli.record.time", SimpleNamespace(monotonic=clock))
    words = ("--fleet", path, "--label", "a", "--out", tmp_path / "out", "--every", "500ms")
    done = run_here(main, "mdp", "record", *words, "--count", 8)
    assert done.returncode == 0, done.stderr
    gaps_s = [b - a for a, b in zip(cameras.asked_s, cameras.asked_s[1:], strict=False)]
    assert len(gaps_s) == 7
    # The rate above which an agent refuses a picture.
    assert min(gaps_s) >= 1 / PICTURES_PER_S
    assert max(gaps_s) == pytest.approx(1.2 + 0.001)
