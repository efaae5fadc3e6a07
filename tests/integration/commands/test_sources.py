"""`mdp classify` on standard input, videos and streams, and `mdp watch`, with real agents."""

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mdp.cli.main import main
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import LineProcess, Lines
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, PLENTY_MS, Fleet
from tests.support.mqtt.mosquitto import free_port
from tests.support.pictures import encode_picture
from tests.support.rtsp import PASSWORD, NetworkCamera

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Agents that look at red pictures."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "seen").mkdir()
    Image.fromarray(colour_picture("red")).save(folder / "seen" / "red.png")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        for device in DEVICES:
            fleet.start(device, "--source", f"folder:{folder / 'seen'}", wait_for=None)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet


def command(fleet: Fleet, name: str) -> list[object]:
    return ["mdp", name, "--fleet", fleet.folder / "fleet.toml", "--deadline-ms", PLENTY_MS]


def classify(
    fleet: Fleet, *words: object
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    done = run_here(main, *command(fleet, "classify"), "--json", *words)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_standard_input(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode_picture(colour_picture("blue"), "PNG")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    (tmp_path / "1.png").write_bytes(content)
    (tmp_path / "2.png").write_bytes(content[:100])
    (tmp_path / "3.mp4").write_bytes(b"no film")
    pytest.importorskip("cv2", reason="needs the camera extra")
    answers, done = classify(fleet, f"{tmp_path}/*", "-")
    assert [answer.get("label") for answer in answers] == ["blue", None, None, "blue"]
    assert [answer["path"] for answer in answers[2:]] == [f"{tmp_path}/3.mp4", "-"]
    assert done.returncode == 2
    broken, film = done.stderr.splitlines()
    assert broken.startswith(f"mdp: {tmp_path}/2.png: ")
    assert film == f"mdp: video:{tmp_path}/3.mp4: cannot be opened"


def test_a_video_at_its_own_pace(fleet: Fleet, tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the camera extra")
    from tests.unit.devices.camera.test_capture import write_film

    film = tmp_path / "film.avi"
    # Ten pictures a second.
    write_film(film, [*["red"] * 5, *["green"] * 5, *["blue"] * 5])
    answers, done = classify(fleet, film, "--every", "0.5s")
    assert (done.returncode, done.stderr) == (0, "")
    assert [(each["label"], round(each["at_s"], 3)) for each in answers] == [
        ("red", 0.0), ("green", 0.5), ("blue", 1.0),
    ]  # fmt: skip
    (first, *_) = run_here(main, *command(fleet, "classify"), film).stdout.splitlines()
    assert first.startswith(f"{film} at 0.00 s: red (")


def test_a_stream_until_it_ends_and_one_that_nobody_gives(fleet: Fleet, tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the camera extra")
    words = [BIN / "mdp", *command(fleet, "classify")[1:], "--json", "--every", "20ms"]
    with NetworkCamera(colour_picture("green", 48, 64)) as camera:
        log = tmp_path / "log"
        with LineProcess("classify", [*words, camera.url], log) as process:
            answers = [json.loads(process.line()) for _ in range(3)]
            camera.hang_up()
            rest = [json.loads(line) for line in process.rest()]
            assert process.process.wait(process.patience_s) == 2
        assert process.stderr == f"mdp: {camera.shown_as}: gives no picture\n"
    assert {(each["path"], each["label"]) for each in answers} == {(camera.shown_as, "green")}
    assert answers[0]["time"] < answers[1]["time"]
    assert rest[-1]["error"] == f"{camera.shown_as}: gives no picture"
    port = free_port()
    answers, done = classify(fleet, f"rtsp://me:{PASSWORD}@127.0.0.1:{port}/door")
    assert done.returncode == 2
    assert done.stderr == f"mdp: rtsp://127.0.0.1:{port}/door: cannot be opened\n"
    assert PASSWORD not in process.stderr + str(answers) + done.stderr


def test_watch_goes_on_while_the_fleet_is_away(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "seen.csv"
    words = [BIN / "mdp", *command(fleet, "watch")[1:], "--every", "50ms", "--out", file]
    log = tmp_path / "log"
    with LineProcess("watch", [*words, "--json"], log) as process:
        assert json.loads(process.line_with('"label":"red"'))["missing"] == {}
        for device in DEVICES:
            fleet.agents[device].kill()
        gone = json.loads(process.line_with('"error"'))
        assert gone["outcomes"].keys() == set(DEVICES)
        for device in DEVICES:
            fleet.restart(device, "--source", f"folder:{fleet.folder / 'seen'}")
        process.line_with('"label":"red"')
        process.signal(signal.SIGINT)
        assert process.process.wait(process.patience_s) == 130
    header, *lines = file.read_text().splitlines()
    assert header.startswith("time,label,")
    assert lines[0].split(",")[1] == "red"
    assert any(",,,,," in line for line in lines), "looks without an answer are kept too"
    shell = f"{shlex.join(map(str, words))} | head -n 1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    assert (": red (" in done.stdout, done.stderr) == (True, "")


def test_watch_follows_a_fleet_file_that_changes(fleet: Fleet, tmp_path: Path) -> None:
    toml = fleet.folder / "fleet.toml"
    whole = toml.read_text()
    words = [BIN / "mdp", *command(fleet, "watch")[1:], "--every", "50ms", "--json"]
    with LineProcess("watch", words, tmp_path / "log") as process:
        assert set(json.loads(process.line_with('"label":"red"'))["used"]) == set(DEVICES)
        gone, *stay = DEVICES
        done = run_here(
            main, "mdp", "fleet", "remove", "--fleet", toml, "--device", gone, "--anyway"
        )
        assert done.returncode == 0, done.stderr
        process.line_with(f'"used":{json.dumps(stay, separators=(",", ":"))}')
        process.signal(signal.SIGINT)
        assert process.process.wait(process.patience_s) == 130
    toml.write_text(whole)


def test_watch_is_a_table_on_a_terminal(fleet: Fleet) -> None:
    screen, terminal = pty.openpty()
    words = [BIN / "mdp", *command(fleet, "watch")[1:], "--every", "50ms"]
    process = subprocess.Popen(
        [str(word) for word in words], stdout=terminal, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    try:
        shown = Lines(screen)
        for part in ("red (", "in the answer", *DEVICES, "2 looks, 0 without an answer"):
            while part not in (line := shown.next(60.0) or "the end"):
                assert line != "the end", part
        process.send_signal(signal.SIGINT)
        # A terminal that nobody writes to any more cannot be read.
        with suppress(OSError):
            while shown.next(60.0) is not None:
                pass
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(screen)
