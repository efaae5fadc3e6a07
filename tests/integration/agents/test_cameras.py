"""Agents with cameras of their own, played by folders and a video: only logits are sent."""

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mdp
from devices.cli.main import main as agent_main
from mdp.cli.main import main as mdp_main
from mdp.client.sync import Client
from mdp.errors import InferenceError, QuorumNotMet
from mdp.formats.bundle import Bundle
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.rtsp import PASSWORD, NetworkCamera

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
NO_SOURCE = "no_frame: this agent has no source (--source)"


def put(folder: Path, name: str, colour: str) -> None:
    """Put a picture into a folder as a camera program should: whole or not at all."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{name}"
    Image.fromarray(colour_picture(colour)).save(hidden)
    hidden.rename(folder / name)


def frame_of(member: MemberTiming) -> int:
    """The number of the frame that a device looked at."""
    assert member.frame is not None
    return member.frame


def look_until_all(client: Client, count: int, **options: Any) -> Prediction:
    """The first look at which `count` devices have something to see."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < until_s
        try:
            answer = client.look(deadline_ms=PLENTY_MS, **options)
        except QuorumNotMet:
            continue
        if len(answer.used) == count:
            return answer


def test_two_devices_have_cameras_and_a_third_has_none(tmp_path: Path, fleet: Fleet) -> None:
    put(tmp_path / "door", "1.png", "red")
    put(tmp_path / "yard", "1.png", "red")
    fleet.start("alpha", "--source", f"folder:{tmp_path / 'door'}", "--source-fps", 100)
    fleet.start("beta", "--source", f"folder:{tmp_path / 'yard'}", "--source-fps", 100)
    fleet.start("gamma")
    with fleet.client() as client:
        answer = look_until_all(client, 2)
        assert (answer.label, answer.mode, answer.used) == ("red", "stacked", ("alpha", "beta"))
        assert answer.missing == {"gamma": NO_SOURCE}
        assert answer.frame_spread_ms is not None
        ages_ms = [m.frame_age_ms for m in answer.members if m.frame_age_ms is not None]
        assert len(ages_ms) == len(answer.members)
        assert answer.frame_spread_ms == pytest.approx(max(ages_ms) - min(ages_ms))
        first = [frame_of(member) for member in answer.members]

        def gone_on() -> bool:
            later = [frame_of(member) for member in look_until_all(client, 2).members]
            return all(then < now for then, now in zip(first, later, strict=True))

        until(gone_on, "both cameras give other frames")
        whole = client.classify(colour_picture("green"), deadline_ms=PLENTY_MS)
        assert (whole.label, whole.missing) == ("green", {})
        sources = {status.device: status.source for status in client.status(timeout_s=PATIENCE_S)}
        assert sources["gamma"] == ""
        assert sources["alpha"].startswith(f"folder:{tmp_path / 'door'}: frame ")
        watched = client.watch(every_ms=0, deadline_ms=PLENTY_MS)
        labels = [next(watched).label for _ in range(3)]
        assert labels == ["red"] * 3
    shown = look(fleet, "--json", "--count", 2, "--every-ms", 0)
    assert shown.returncode == 0, shown.stderr
    for line in map(json.loads, shown.stdout.splitlines()):
        assert (line["path"], line["label"], line["used"]) == (None, "red", ["alpha", "beta"])
        assert line["frame_spread_ms"] >= 0
        assert [member["frame"] > 0 for member in line["members"]] == [True, True]
    said = run_here(mdp_main, "mdp", "status", "--fleet", fleet.folder / "fleet.toml").stdout
    seen = [line for line in said.splitlines() if " looks at " in line]
    assert [line.split(": frame ")[0] for line in seen] == [
        f"alpha looks at folder:{tmp_path / 'door'}",
        f"beta looks at folder:{tmp_path / 'yard'}",
    ]
    words = look(fleet).stdout.splitlines()
    assert words[0].startswith("look: red (")
    assert words[1].startswith("  frames alpha ")
    assert words[2] == f"  without gamma: {NO_SOURCE}"


def look(fleet: Fleet, *options: object) -> subprocess.CompletedProcess[str]:
    where = ["--fleet", fleet.folder / "fleet.toml", "--deadline-ms", PLENTY_MS]
    return run_here(mdp_main, "mdp", "look", *where, *options)


def test_a_moment_of_the_past_is_looked_at(tmp_path: Path, fleet: Fleet) -> None:
    door = tmp_path / "door"
    put(door, "1.png", "red")
    # 64 frames are kept: those of twelve seconds.
    fleet.start("alpha", "--source", f"folder:{door}", "--source-fps", 5)
    with fleet.client() as client:
        assert look_until_all(client, 1).label == "red"
        moment_s = time.monotonic()
        # The next frames are of another colour; what was seen before is still there.
        until(lambda: frame_of(look_until_all(client, 1).members[0]) > 3, "some frames of red")
        put(door, "1.png", "blue")
        until(lambda: look_until_all(client, 1).label == "blue", "a frame of blue")
        past = client.look(deadline_ms=PLENTY_MS, at=moment_s, within_ms=PLENTY_MS)
        assert past.label == "red"
        with pytest.raises(QuorumNotMet, match=r"alpha: no_frame: .*the nearest frame is off by"):
            client.look(deadline_ms=PLENTY_MS, at=moment_s - 100, within_ms=10.0)


def test_an_empty_folder_is_opened_again(tmp_path: Path, fleet: Fleet) -> None:
    door = tmp_path / "door"
    door.mkdir()
    fleet.start("alpha", "--source", f"folder:{door}")
    with fleet.client() as client:
        with pytest.raises(
            QuorumNotMet,
            match=rf"no_frame: folder:{door} has given no frame yet \({door}: holds no",
        ):
            client.look(deadline_ms=PLENTY_MS)
        (door / "0.png").write_bytes(b"no picture")
        put(door, "1.png", "green")
        assert look_until_all(client, 1).label == "green"
        (status,) = client.status(timeout_s=PATIENCE_S)[:1]
        assert "could not be read" in status.source
        for file in door.iterdir():
            file.unlink()

        def gone() -> bool:
            try:
                client.look(deadline_ms=PLENTY_MS, within_ms=1.0)
            except QuorumNotMet as error:
                return f"at most 1 ms were asked for ({door}: holds no file)" in str(error)
            return False

        until(gone, "the frames are all too old")
    assert fleet.agents["alpha"].terminate() == 0


def test_an_async_client_looks_as_well(tmp_path: Path, fleet: Fleet) -> None:
    put(tmp_path / "door", "1.png", "blue")
    fleet.start("alpha", "--source", f"folder:{tmp_path / 'door'}", "--source-fps", 100)

    async def looks() -> list[str]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            labels = []
            watched = client.watch(every_ms=0, deadline_ms=PLENTY_MS, errors="yield")
            async for answer in watched:
                if not isinstance(answer, InferenceError):
                    labels.append(answer.label)
                if len(labels) == 3:
                    break
            await watched.aclose()  # type: ignore[attr-defined]
            answer = await client.look(deadline_ms=PLENTY_MS)
            return [*labels, answer.label]

    assert asyncio.run(looks()) == ["blue"] * 4


def test_crops_of_frames_follow_a_change_of_bundle(tmp_path: Path, fleet: Fleet) -> None:
    put(tmp_path / "door", "1.png", "blue")
    link = tmp_path / "served"
    link.symlink_to(fleet.bundle)
    source = ("--source", f"folder:{tmp_path / 'door'}", "--source-fps", 100)
    agent = fleet.start("alpha", *source, bundle=link)
    with fleet.client() as client:
        assert look_until_all(client, 1).label == "blue"
        # Of another image size, so that the crops are others.
        other = write_bundle(tmp_path / "other", sizes=(32, 12, 8))
        link.unlink()
        link.symlink_to(other)
        agent.signal(signal.SIGHUP)
        agent.wait_for(f"serves colours {Bundle.open(other).digest[:12]}")
        assert look_until_all(client, 1).label == "blue", "the former one is still served"
    fleet.bundle = other
    with fleet.client() as client:
        assert look_until_all(client, 1).label == "blue"


def test_a_network_camera_that_disconnects_and_one_that_hangs(tmp_path: Path, fleet: Fleet) -> None:
    pytest.importorskip("cv2", reason="needs the camera extra")
    with NetworkCamera(colour_picture("green", 48, 64)) as camera:
        agent = fleet.start("alpha", "--source", camera.url, "--source-fps", 50)
        with fleet.client() as client:
            first = look_until_all(client, 1)
            assert first.label == "green"
            camera.hang_up()
            until(lambda: camera.viewers == 2, "the agent has come back")
            # From here on, new frames come over the new connection.
            number = frame_of(look_until_all(client, 1).members[0])

            def sees_more() -> bool:
                return frame_of(look_until_all(client, 1).members[0]) > number

            until(sees_more, "there are new frames")
            (status,) = client.status(timeout_s=PATIENCE_S)[:1]
            assert status.source.startswith(f"{camera.shown_as}: frame ")
            camera.hangs.set()

            def told() -> str:
                try:
                    client.look(deadline_ms=PLENTY_MS, within_ms=100.0)
                except QuorumNotMet as error:
                    return str(error)
                return ""

            expected = f"no_frame: {camera.shown_as}: the newest frame is "
            until(lambda: expected in told(), "the frame is too old")
        # Its thread waits for the camera; it is not waited for.
        assert agent.terminate() == 0
        assert agent.stderr == ""
        events = json.dumps(agent.events)
    for secret in (PASSWORD, "t0ken"):
        assert secret not in events + str(status) + str(first)


def test_a_source_from_the_environment(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDP_SOURCE", "rtsp://me:s3cret@:0/")
    command = ["run", "--bundle", fleet.bundle, "--device", "alpha"]
    done = run_here(agent_main, "mdp-agent", *command)
    assert done.returncode == 2
    assert done.stderr == (
        "mdp-agent: --source: expected rtsp://HOST/PATH or rtsp://USER:PASSWORD@HOST/PATH\n"
    )


def test_a_video_as_camera_and_a_missing_camera_that_is_named(tmp_path: Path, fleet: Fleet) -> None:
    pytest.importorskip("cv2", reason="needs the camera extra")
    from tests.unit.devices.camera.test_capture import write_film

    write_film(tmp_path / "film.avi", ["green"] * 5)
    fleet.start("alpha", "--source", f"video:{tmp_path / 'film.avi'}", "--source-fps", 50)
    beta = fleet.start("beta", "--source", "camera:63")
    with fleet.client() as client:
        answer = look_until_all(client, 1)
        assert (answer.label, answer.used) == ("green", ("alpha",))
        until(
            lambda: (
                client.look(deadline_ms=PLENTY_MS).missing["beta"]
                == "no_frame: camera:63 has given no frame yet (camera:63: cannot be opened)"
            ),
            "beta has tried its camera",
        )
        beta.wait_for("no pictures: camera:63: cannot be opened")
        until(lambda: frame_of(look_until_all(client, 1).members[0]) > 5, "the film begins again")
    for device in ("alpha", "beta"):
        agent = fleet.agents[device]
        assert agent.terminate() == 0, agent.stderr
        assert agent.stderr == ""
