"""`mdp demo` on a ready-made bundle: all that it claims to have seen, it has; and its page."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mdp.cli.main import main
from mdp.demo.scenes import DemoFailed
from mdp.demo.walk import start_agents
from mdp.testing.agents import AgentFleet, AgentProcess
from mdp.testing.bundles import DEVICES, LABELS, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess, until
from tests.support.bundles import with_novelty
from tests.support.command_lines import run_here
from tests.support.demo import agents_of, asked, write_scenes
from tests.support.faults.stage import with_cameras
from tests.support.fleet import ROOT

MDP = (str(Path(sys.executable).parent / "mdp"),)

pytestmark = pytest.mark.usefixtures("no_leaks")


def demo(*args: object) -> subprocess.CompletedProcess[str]:
    with chdir(ROOT):
        # No test here depends on a machine that has nothing else to do.
        return run_here(main, "mdp", "demo", "--text", "--deadline-ms", 10_000, *args)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for label in LABELS:
        folder = tmp_path / "pictures" / label
        folder.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(colour_picture(label)).save(folder / f"{number}.png")
    (tmp_path / "pictures/README.md").write_text("What these are.")
    return tmp_path / "pictures"


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "scenes")


def test_the_demo_verifies_its_claims(tmp_path: Path, bundle: Path, pictures: Path) -> None:
    seen = tmp_path / "seen.json"
    work = tmp_path / "work"
    work.mkdir()
    (work / "fleet.toml").write_text("of an earlier demo")
    (work / ".mdp-demo").touch()
    done = demo("--work", work, "--bundle", bundle, "--pictures", pictures, "--report", seen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert agents_of(bundle) == []
    content = json.loads(seen.read_text())
    assert content["ok"] is True
    assert len(content["claims"]) == 5
    assert set(content["claims"].values()) == {True}
    assert content["killed"]["device"] == content["restarted"]["device"] == "beta"
    assert content["killed"]["answers"] == 20
    assert content["live"]["pictures"] == 24
    assert content["live"]["accuracy"] == 1.0
    assert content["live"]["modes"] == ["stacked"]
    assert set(content["live"]["compute_ms"]) == set(DEVICES)
    assert len(content["evaluation"]["subsets"]) == 7
    # Exactly the commands that a user would type are shown.
    for command in ("mdp-agent run", "mdp fleet new", "mdp status", "kill -KILL"):
        assert f"$ {command}" in done.stdout
    assert "NOT SEEN" not in done.stdout


def test_pictures_beside_a_bundle_are_its_own(tmp_path: Path, bundle: Path, pictures: Path) -> None:
    pictures.rename(bundle / "pictures")
    seen = tmp_path / "seen.json"
    done = demo("--work", tmp_path / "work", "--bundle", bundle, "--report", seen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(seen.read_text())["live"]["pictures"] == 24


def test_cameras_look_are_killed_and_covered(tmp_path: Path, bundle: Path, scenes: Path) -> None:
    seen, work = tmp_path / "seen.json", tmp_path / "work"
    with_cameras(bundle, 0.8)
    # Of an earlier demo.
    (work / "camera-alpha").mkdir(parents=True)
    (work / "camera-alpha/old.png").write_bytes(b"no picture")
    (work / ".mdp-demo").touch()
    done = demo("--work", work, "--bundle", bundle, "--pictures", scenes, "--report", seen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert agents_of(bundle) == []
    content = json.loads(seen.read_text())
    assert content["ok"] is True
    assert set(content["claims"].values()) == {True}
    assert "camera alpha was covered, and is the only suspect" in content["claims"]
    assert "a client that has just begun is told of it" in content["claims"]
    assert content["live"]["pictures"] == 36
    assert content["live"]["accuracy"] == 1.0
    assert content["live"]["alone"] == pytest.approx(dict.fromkeys(DEVICES, 5 / 6))
    assert content["killed"]["device"] == content["restarted"]["device"] == "beta"
    assert content["covered"]["device"] == "alpha"
    assert 5 < content["covered"]["looks"] <= 48
    assert "suspect alpha: disagrees" in " ".join(done.stdout.split())
    assert "--source-fps" in done.stdout
    assert "items of no class" not in done.stdout


def test_a_claim_that_does_not_hold_is_told(tmp_path: Path, bundle: Path, scenes: Path) -> None:
    """A camera that never saw the scene gives away that the measured accuracy is another one."""
    for picture in scenes.glob("*/*/*.png"):
        other = LABELS[(LABELS.index(picture.parent.parent.name) + 1) % len(LABELS)]
        Image.fromarray(colour_picture(other)).save(picture)
    done = demo("--work", tmp_path / "work", "--bundle", with_cameras(bundle), "--pictures", scenes)
    assert done.returncode == 3
    assert "NOT SEEN the agents are as accurate as the bundle was measured to be" in done.stdout


@pytest.mark.parametrize(
    ("work", "bundle", "pictures", "expected"),
    [
        (
            "w",
            "nowhere",
            None,
            "nowhere: expected a bundle's folder, or one of cifar10, digits, imagenette, parts",
        ),
        ("w", "new", None, "new: never evaluated; run mdp-partition evaluate --write first"),
        ("w", "bundle", "other", "expected folders named after classes of"),
        ("w", "bundle", "w", "w: expected pictures, or a folder per class with some"),
        ("file", "bundle", None, "file: cannot be made: File exists"),
        ("other", "bundle", None, "other: expected an empty folder, or one with .mdp-demo"),
    ],
)
def test_what_the_demo_refuses(
    tmp_path: Path, work: str, bundle: str, pictures: str | None, expected: str
) -> None:
    if bundle != "nowhere":
        write_bundle(tmp_path / bundle, evaluated=bundle == "bundle")
    (tmp_path / "file").touch()
    (tmp_path / "other/unicorn").mkdir(parents=True)
    (tmp_path / "other/unicorn/0.png").touch()
    more = [] if pictures is None else ["--pictures", tmp_path / pictures]
    done = demo("--work", tmp_path / work, "--bundle", tmp_path / bundle, *more)
    assert done.returncode == 2
    assert done.stderr.startswith("mdp: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_agent_that_does_not_start_ends_the_demo(tmp_path: Path, bundle: Path) -> None:
    (bundle / "submodels/1/model.onnx").unlink()
    done = demo("--work", tmp_path / "work", "--bundle", bundle)
    assert done.returncode == 3
    assert done.stderr.startswith("mdp: the agent of beta ended: mdp-agent: ")
    assert "model.onnx: missing, but listed in manifest.json" in done.stderr
    assert done.stderr.count("\n") == 1
    assert agents_of(bundle) == []


def test_agents_that_are_not_ready_in_time_are_said_to_be_so(tmp_path: Path, bundle: Path) -> None:
    def hurry(agent: AgentProcess) -> None:
        # Shorter than any Python takes to start.
        agent.patience_s = 0.001

    with AgentFleet(tmp_path, bundle) as fleet:
        with pytest.raises(
            DemoFailed, match=r"^the agent of alpha was not ready within 0\.001 s: "
        ):
            start_agents(fleet, None, hurry)
        for agent in fleet.agents.values():
            agent.patience_s = PATIENCE_S
    assert agents_of(bundle) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("empty", "scenes: expected scenes, CLASS/SCENE/CAMERA.jpg, of "),
        ("lacking", "s03: expected a picture of camera 'beta'"),
        ("strange", "scenes: expected folders named after classes of "),
    ],
)
def test_scenes_that_are_refused(
    tmp_path: Path, bundle: Path, scenes: Path, change: str, expected: str
) -> None:
    with_cameras(bundle)
    if change == "lacking":
        (scenes / LABELS[0] / "s03/beta.png").unlink()
    elif change == "strange":
        (scenes / LABELS[0]).rename(scenes / "unicorn")
    else:
        shutil.rmtree(scenes)
        scenes.mkdir()
    done = demo("--work", tmp_path / "work", "--bundle", bundle, "--pictures", scenes)
    assert done.returncode == 2
    assert done.stderr.startswith("mdp: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_whoever_watches_may_cover_unplug_and_put_something_else_there(
    tmp_path: Path, bundle: Path, scenes: Path
) -> None:
    with_novelty(with_cameras(bundle, 0.8), threshold=-1.17)
    strange = scenes / "unknown/s00"
    strange.mkdir(parents=True)
    for device in DEVICES:
        Image.new("RGB", (64, 64), (128, 128, 128)).save(strange / f"{device}.png")
    options = ("--bundle", bundle, "--pictures", scenes, "--no-browser", "--deadline-ms", 10_000)
    with LineProcess("demo", [*MDP, "demo", *options], own_session=True) as running:
        url = running.line_with("Ctrl-C ends everything").partition(" ")[0]

        def state() -> dict[str, Any]:
            content: dict[str, Any] = json.loads(asked(f"{url}/state")[1])
            return content

        def alpha() -> dict[str, Any]:
            found: dict[str, Any] = state()["cameras"][0]
            return found

        def brightest(device: str) -> int:
            content = asked(f"{url}/picture/{device}")[1]
            return int(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).max())

        def change(**content: object) -> int:
            return asked(f"{url}/change", json.dumps(content).encode())[0]

        until(lambda: state()["tally"]["items"] > 2, "items")
        assert state()["tally"]["fused"] >= 2
        assert brightest("alpha") > 0
        assert change(do="cover", device="alpha") == 200
        until(lambda: alpha()["covered"], "a covered camera")
        assert brightest("alpha") == 0
        assert brightest("beta") > 0
        assert change(do="cover", device="alpha", on=False) == 200
        assert change(do="plug", device="alpha", on=False) == 200
        until(lambda: alpha()["missing"] is not None, "a missing device")
        assert not alpha()["plugged"]
        until(lambda: (state()["answer"] or {}).get("used") == ["beta", "gamma"], "the others")
        assert change(do="plug", device="alpha") == 200
        until(lambda: "alpha" in (state()["answer"] or {}).get("used", ()), "all of them")
        assert change(do="something else") == 200
        until(lambda: (state()["answer"] or {}).get("known") is False, "an unknown item")
        for refused in ({"do": "cover", "device": "omega"}, {"do": "dance", "device": "alpha"}, {}):
            assert change(**refused) == 400
        assert asked(f"{url}/change", b"{" * 2000)[0] == 413
        assert asked(f"{url}/picture/omega")[0] == 404
        assert asked(f"{url}/state", headers={"Host": "elsewhere.example"})[0] == 403
        said = state()["lines"]
        assert said[:2] == ["camera alpha is covered", "camera alpha is uncovered"]
        assert "alpha is unplugged" in said
        assert agents_of(bundle)
        # As Ctrl-C in a terminal: all processes are told.
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(PATIENCE_S) in (0, 130, -signal.SIGINT)
    assert agents_of(bundle) == []


def test_a_port_that_is_taken(bundle: Path, scenes: Path) -> None:
    with_cameras(bundle)
    with socket.create_server(("127.0.0.1", 0)) as taken, chdir(ROOT):
        port = taken.getsockname()[1]
        options = ("--bundle", bundle, "--pictures", scenes, "--port", port)
        done = run_here(main, "mdp", "demo", *options)
    assert done.returncode == 2
    assert done.stderr == f"mdp: --port 127.0.0.1:{port}: Address already in use\n"
    # Nothing was started for it.
    assert done.stdout == ""
    assert agents_of(bundle) == []


def test_the_page_needs_cameras(bundle: Path) -> None:
    done = run_here(main, "mdp", "demo", "--bundle", bundle)
    assert done.returncode == 2
    assert done.stderr.endswith("expected a bundle of cameras for the page, or --text\n")
