"""`mdp status --wait`: asks again until the fleet can answer, or the time is over."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from mdp.cli import doctor
from mdp.cli.main import main
from mdp.client.status import DeviceStatus
from tests.support.command_lines import run_here

FLEET = """devices = [
  { device = "alpha", address = "tcp://127.0.0.1:1", k = 0 },
  { device = "beta", address = "tcp://127.0.0.1:2", k = 1 },
]
"""


class StartingCameras:
    """Cameras of which one is there at once, and the other at the third question."""

    def __init__(self, *_: object, **__: object) -> None:
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> list[DeviceStatus]:
        self.asked += 1
        late = "READY" if self.asked > 2 else "UNREACHABLE"
        return [
            DeviceStatus(device="alpha", address="", state="READY"),
            DeviceStatus(device="beta", address="", state=late),
        ]


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return path


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept so far, by which the clock goes on."""
    so_far: list[float] = []
    monkeypatch.setattr(doctor, "FleetCameras", StartingCameras)
    clock = SimpleNamespace(sleep=so_far.append, monotonic=lambda: 1000.0 + sum(so_far))
    monkeypatch.setattr(doctor, "time", clock)
    return so_far


def status(fleet: Path, *options: object) -> tuple[int, Any, str]:
    done = run_here(main, "mdp", "status", "--fleet", fleet, "--json", *options)
    told = json.loads(done.stdout)["devices"] if done.stdout else []
    return done.returncode, {one["device"]: one["state"] for one in told}, done.stderr


def test_it_asks_until_all_are_there(fleet: Path, slept: list[float]) -> None:
    told = status(fleet, "--wait", "60s")
    assert told == (0, {"alpha": "READY", "beta": "READY"}, "mdp: waiting for beta\n")
    assert len(slept) == 2


def test_it_ends_when_the_time_is_over(fleet: Path, slept: list[float]) -> None:
    told = status(fleet, "--wait", "500ms")
    assert told == (3, {"alpha": "READY", "beta": "UNREACHABLE"}, "mdp: waiting for beta\n")
    assert len(slept) == 1


@pytest.mark.parametrize("options", [(), ("--wait", "60s", "--allow-partial")])
def test_it_asks_once(fleet: Path, slept: list[float], options: tuple[str, ...]) -> None:
    code, told, said = status(fleet, *options)
    assert (code, told["beta"], said) == (0 if options else 3, "UNREACHABLE", "")
    assert slept == []


def test_a_time_that_is_none(fleet: Path, slept: list[float]) -> None:
    told = status(fleet, "--wait", "a while")
    expected = "mdp: --wait: expected a time such as 0.5s or 200ms, got 'a while'\n"
    assert told == (2, {}, expected)
