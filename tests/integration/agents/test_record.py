"""`mdp record`: agents with folders as cameras give pictures of scenes where they are allowed."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

from devices.cli.main import main as agent_main
from mdp.cli.main import main as mdp_main
from mdp.client.base import Options
from mdp.client.cameras import FleetCameras
from mdp.client.scenes import Scene
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet, read_fleet
from mdp.formats.keys import new_keys
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.machine_faults import fill, mounting_works, small_disk
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import new_pair
from partitioner.data.datasets import open_dataset
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

COLOURS = {"alpha": "red", "beta": "green", "gamma": "blue"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents with keys; the client's key may record."""
    write_bundle(tmp_path / "bundle")
    with Fleet(tmp_path, tmp_path / "bundle", keys=True) as fleet:
        (tmp_path / "client.limits").write_text("record = true\n")
        yield fleet


def start(fleet: Fleet, name: str, *options: object, colour: str = "") -> AgentProcess:
    """An agent whose camera shows two pictures in turn."""
    folder = fleet.folder / f"camera-{name}"
    folder.mkdir()
    for number, side in enumerate((48, 64)):
        picture = colour_picture(colour or COLOURS[name], side, side)
        Image.fromarray(picture).save(folder / f"{number}.png")
    source = ("--source", f"folder:{folder}", "--source-fps", 20)
    return fleet.start(name, *source, "--audit", fleet.folder / "audit.jsonl", *options)


def record(fleet: Fleet, out: Path, *options: object) -> subprocess.CompletedProcess[str]:
    asked = ["--fleet", fleet.write(), "--out", out, "--every", "500ms", *options]
    return run_here(mdp_main, "mdp", "record", *asked)


def look_until(fleet: Fleet, device: str) -> Scene:
    """Scene of the cameras, once that of `device` gives something."""
    path = fleet.write()
    taken: list[Scene] = []

    def given() -> bool:
        taken.append(cameras.take())
        return device in taken[-1].pictures

    known, _ = read_fleet(path)
    with FleetCameras(known, Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:
        until(given, f"a picture of {device}")
    return taken[-1]


def is_shown_as_recorded(fleet: Fleet) -> bool:
    """Tell whether `mdp status` says so after a further picture."""
    look_until(fleet, "alpha")
    shown = run_here(mdp_main, "mdp", "status", "--fleet", fleet.write()).stdout
    (seen,) = (line for line in shown.splitlines() if line.startswith("alpha looks at "))
    return seen.endswith("; being recorded")


def test_recorded_scenes_are_data_for_several_cameras(tmp_path: Path, fleet: Fleet) -> None:
    alpha = start(fleet, "alpha", "--allow-record")
    start(fleet, "beta", "--allow-record")
    start(fleet, "gamma")
    look_until(fleet, "alpha")
    look_until(fleet, "beta")
    out = tmp_path / "scenes"
    for label in ("part-a", "part-b"):
        done = record(fleet, out, "--label", label, "--count", 4)
        assert done.returncode == 0, done.stderr
        assert f"mdp: {out / label}: 4 scenes, 4 without gamma\n" in done.stderr
        reason = "no_frame: this agent's camera is not recorded (--allow-record)"
        assert f"  without gamma: {reason}\n" in done.stdout
    until(lambda: is_shown_as_recorded(fleet), "mdp status says so")
    again = record(fleet, out, "--label", "part-a", "--count", 2, "--json")
    lines = [json.loads(line) for line in again.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert (line["path"] is None) == (len(line["cameras"]) < 2)
        assert line["path"] is None or (Path(line["path"]) / "beta.jpg").is_file()
    data = open_dataset(str(out), cameras=("alpha", "beta"))
    assert data.labels == ("part-a", "part-b")
    assert (data.left_out, data.incomplete) == ({}, {})
    total = len(data.train) + len(data.calibration) + len(data.test)
    assert total == len([path for path in out.glob("*/*") if path.is_dir()]) >= 6
    source = data.train.sources[0]
    assert isinstance(source, dict)
    for device in ("alpha", "beta"):
        red, green, _ = Image.open(source[device]).resize((1, 1)).getpixel((0, 0))  # type: ignore[misc]
        assert (red > green) == (device == "alpha")
    alpha.wait_for("client begins to record")
    alpha.wait_for(re.compile(r"client has ended recording: pictures \d+"))
    log = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    told = [line for line in log if line["event"] == "record"]
    assert told[0]["reason"] == "begins to record"
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", line["address"]) for line in told)


def test_cameras_are_recorded_before_there_is_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    for name in ("client", "alpha", "beta"):
        new_keys(tmp_path, name, new_pair)
    (tmp_path / "client.public").rename(tmp_path / "allowed" / "client.public")
    (tmp_path / "allowed" / "client.limits").write_text("record = true\n")
    with ExitStack() as stack:
        devices: list[object] = []
        for name in ("alpha", "beta"):
            folder = tmp_path / f"camera-{name}"
            folder.mkdir()
            Image.fromarray(colour_picture(COLOURS[name], 48, 64)).save(folder / "1.png")
            command = [
                BIN / "mdp-agent", "camera", "--json", "--device", name, "--bind", ANY_PORT,
                "--source", f"folder:{folder}", "--key", tmp_path / f"{name}.secret",
                "--clients", tmp_path / "allowed",
            ]  # fmt: skip
            agent = stack.enter_context(AgentProcess(name, command, tmp_path / f"{name}.log"))
            devices += ["--device", f"{name}={agent.wait_for('READY').address}"]
        path, out = tmp_path / "cameras.toml", tmp_path / "scenes"
        keys = ("--keys", tmp_path, "--key", tmp_path / "client.secret", "--out", path)
        assert run_here(mdp_main, "mdp", "fleet", "new", *devices, *keys).returncode == 0

        def is_recorded() -> bool:
            asked = ("--fleet", path, "--label", "a", "--out", out, "--count", 1)
            return run_here(mdp_main, "mdp", "record", *asked).returncode == 0

        until(is_recorded, "a scene of both cameras")
        check_before_recording(path, tmp_path)
    (scene,) = (out / "a").iterdir()
    assert sorted(file.name for file in scene.iterdir()) == ["alpha.jpg", "beta.jpg"]


def check_before_recording(path: Path, folder: Path) -> None:
    """`mdp status` and `mdp doctor` of a fleet file without a bundle."""

    def told(command: str) -> tuple[int, list[str]]:
        done = run_here(mdp_main, "mdp", command, "--fleet", path)
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    code, lines = told("status")
    assert code == 0, lines
    assert [line.split(" at ")[0] for line in lines] == [
        "alpha: READY", "beta: READY", "alpha looks", "beta looks",
    ]  # fmt: skip
    subjects = ["alpha", "alpha's camera", "alpha's picture"]
    subjects += [subject.replace("alpha", "beta") for subject in subjects]

    def is_well() -> bool:
        code, lines = told("doctor")
        return (
            code == 0 and [re.split(r" +|: ", line, maxsplit=1)[0] for line in lines] == ["ok"] * 6
        )

    until(is_well, "pictures of both cameras, within the rate")
    (folder / "allowed" / "client.limits").write_text("record = false\n")
    refused = "no_frame: this client's key may not record (`record = true` in its .limits file)"
    problems = [f"PROBLEM {name}'s picture: {refused}" for name in ("alpha", "beta")]

    def is_refused() -> bool:
        code, lines = told("doctor")
        return code == 3 and [line for line in lines if line.startswith("PROBLEM")] == problems

    until(is_refused, "the right is taken away")


def test_refused_without_the_right_and_above_the_rate(tmp_path: Path, fleet: Fleet) -> None:
    start(fleet, "alpha", "--allow-record")
    look_until(fleet, "alpha")
    path = fleet.write()
    known, _ = read_fleet(path)
    with FleetCameras(known, Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:

        def too_fast() -> bool:
            return cameras.take().missing.get("alpha", "").startswith("overloaded: expected at mo")

        until(too_fast, "more than two pictures a second")
    (tmp_path / "client.limits").write_text("record = false\n")
    expected = "no_frame: this client's key may not record (`record = true` in its .limits file)"

    def refused() -> bool:
        done = record(fleet, tmp_path / "scenes", "--label", "part-a", "--count", 1)
        return done.returncode == 3 and expected in done.stdout

    until(refused, "the right is taken away")
    assert not (tmp_path / "scenes").exists()


def test_one_picture_from_two_cameras_and_ctrl_c(tmp_path: Path, fleet: Fleet) -> None:
    for name in ("alpha", "beta"):
        folder = tmp_path / f"camera-{name}"
        start(fleet, name, "--allow-record", colour="red")
        (folder / "1.png").unlink()
    look_until(fleet, "alpha")
    out = tmp_path / "scenes"
    command = [BIN / "mdp", "record", "--fleet", fleet.write(), "--label", "a", "--out", out]
    with subprocess.Popen(
        [*map(str, command), "--every", "500ms"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        until(lambda: len(list(out.glob("a/2*"))) >= 5, "five scenes")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert said.count("alpha and beta: the same picture: expected a camera for each") == 1
    assert said.count("alpha: the same picture 3 times in a row") == 1
    assert re.search(rf"mdp: {out / 'a'}: \d+ scenes?", said)
    for scene in (out / "a").iterdir():
        assert sorted(file.name for file in scene.iterdir()) == ["alpha.jpg", "beta.jpg"]
    # An agent that is stopped has ended its recordings.
    assert [agent.terminate() for agent in fleet.agents.values()] == [0, 0]
    log = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    told = [line["reason"] for line in log if line["event"] == "record"]
    begun = told.count("begins to record")
    assert begun >= 2
    assert len([reason for reason in told if reason.startswith("has ended recording")]) == begun


def test_a_full_disk(tmp_path: Path, fleet: Fleet) -> None:
    if why := mounting_works():
        pytest.skip(why)
    for name in ("alpha", "beta"):
        start(fleet, name, "--allow-record")
        look_until(fleet, name)
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        full = fill(disk)
        done = record(fleet, disk / "scenes", "--label", "part-a", "--count", 3)
        assert done.returncode == 2
        assert done.stderr.startswith(f"mdp: {disk / 'scenes' / 'part-a'}/2")
        assert done.stderr.endswith(": cannot be written: No space left on device\n")
        assert done.stderr.count("\n") == 1
        assert list(disk.rglob("*")) == [full]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--every", "400ms"], "--every: expected at least 0.5s, got '400ms'"),
        (["--label", "a/b"], "--label 'a/b': expected the name of a folder"),
    ],
)
def test_bad_input(fleet: Fleet, tmp_path: Path, options: list[str], expected: str) -> None:

    asked = ["--label", "a", "--out", tmp_path / "out", "--fleet", tmp_path / "fleet.toml"]
    done = run_here(mdp_main, "mdp", "record", *asked, *options)
    assert (done.returncode, done.stderr) == (2, f"mdp: {expected}\n")


def test_recording_needs_keys_and_a_camera(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    command = ["run", "--bundle", bundle, "--device", "alpha", "--allow-record"]
    done = run_here(agent_main, "mdp-agent", *command, "--source", f"folder:{tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith("mdp-agent: --allow-record: expected --source, --key and --cli")
    path = tmp_path / "fleet.toml"
    new_fleet(Bundle.open(bundle), ["alpha=tcp://127.0.0.1:7500"], path)
    asked = ["--fleet", path, "--label", "a", "--out", tmp_path / "out"]
    done = run_here(mdp_main, "mdp", "record", *asked)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mdp: {path}: no `key` in the fleet file")
