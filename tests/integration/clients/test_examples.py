"""The examples run as a user runs them, with real agents."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mdp.testing.bundles import DEVICES, colour_picture, write_bundle

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def red(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.fromarray(colour_picture("red")).save(path)
    return path


def run_example(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_three_agents(bundle: Path, red: Path) -> None:
    done = run_example("three_agents.py", bundle, red)
    assert done.returncode == 0, done.stderr
    assert f"{red}: red" in done.stdout
    assert "stacked" in done.stdout
    for device in DEVICES:
        assert f"{device}: READY" in done.stdout
        assert f"  {device}: computing" in done.stdout


def test_dying_device(bundle: Path, red: Path) -> None:
    done = run_example("dying_device.py", bundle, red)
    assert done.returncode == 0, done.stderr
    alive, killed, again = done.stdout.splitlines()
    assert alive.startswith("all alive: red, stacked from alpha + beta + gamma, missing nothing")
    assert killed.startswith("one killed: red, stacked from beta + gamma, missing alpha (")
    assert again.startswith("started again: red, stacked from alpha + beta + gamma")


def test_two_cameras(tmp_path: Path, bundle: Path, red: Path) -> None:
    cameras = [tmp_path / "door", tmp_path / "yard"]
    for camera in cameras:
        camera.mkdir()
        shutil.copy(red, camera)
    done = run_example("two_cameras.py", bundle, *cameras)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if " ms old" not in line][-3:] == ["red"] * 3
    for device in DEVICES[:2]:
        assert sum(line.startswith(f"  {device}: frame ") for line in lines) >= 3


def test_quickstart(tmp_path: Path, bundle: Path, red: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from three_agents import agent
    finally:
        sys.path.remove(str(EXAMPLES))
    from mdp.formats.bundle import Bundle
    from mdp.formats.fleet import new_fleet

    with agent(bundle, "beta") as only:
        fleet = tmp_path / "fleet.toml"
        new_fleet(Bundle.open(bundle), [f"beta={only.address}"], fleet)
        done = run_example("quickstart.py", fleet, tmp_path / "gone.png", red)
    assert done.returncode == 0, done.stderr
    gone, first, *rest = done.stdout.splitlines()
    assert gone.endswith("gone.png: No such file or directory")
    assert first.startswith(f"{red}: red")
    assert first.endswith("single")
    assert "  missing alpha: not in the fleet" in rest
    assert "  missing gamma: not in the fleet" in rest


def test_usage_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    names = ("quickstart.py", "three_agents.py", "dying_device.py", "two_cameras.py")
    for name in (*names, "build_bundle.py"):
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(SystemExit, match=f"^usage: {name}.*$"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
