"""`mdp mqtt` before real agents, on a real broker."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mdp.cli.main import main
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import LineProcess, until
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, PLENTY_MS, Fleet
from tests.support.mqtt.home_assistant import check_discovery, states
from tests.support.mqtt.mosquitto import Mosquitto, free_port, require_program
from tests.support.web.gateway import self_signed

pytestmark = pytest.mark.usefixtures("no_leaks")

AVAILABILITY = "mdp/colours/availability"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require_program("mosquitto")
    folder = tmp_path_factory.mktemp("mqtt")
    (folder / "seen").mkdir()
    Image.fromarray(colour_picture("red")).save(folder / "seen" / "red.png")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        for device in DEVICES:
            fleet.start(device, "--source", f"folder:{folder / 'seen'}", wait_for=None)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet


@contextmanager
def publishing(fleet: Fleet, broker: Mosquitto, *options: object) -> Iterator[LineProcess]:
    """`mdp mqtt`, until the block ends."""
    command = [
        BIN / "mdp", "mqtt", "--fleet", fleet.folder / "fleet.toml", "--broker", broker.address,
        "--login", broker.login, "--every", "100ms", "--deadline-ms", PLENTY_MS, *options,
    ]  # fmt: skip
    log = broker.login.with_name("mqtt.log")
    with LineProcess("mdp mqtt", command, log) as process:
        yield process


def message(heard: LineProcess, topic: str, part: str = "") -> tuple[str, Any]:
    """The next message of a topic that has `part` in it: whether it was retained, and its JSON."""
    while True:
        retained, found, payload = heard.line_with(f" {topic} ").split(" ", 2)
        if found == topic and part in payload:
            return retained, json.loads(payload) if payload.startswith("{") else payload


def test_home_assistant_finds_the_fleet(fleet: Fleet, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker")
    former = "homeassistant/device/mdp_colours/device-former/config"
    with broker.running(), publishing(fleet, broker) as process:
        broker.publish(former, "{}")
        assert process.line() == f"publishing to {broker.address} as mdp/colours; Ctrl-C ends it"
        with broker.hear() as heard:
            assert message(heard, AVAILABILITY) == ("1", "online")
            answer = message(heard, "mdp/colours/answer", '"gamma"')[1]
            assert (answer["label"], answer["used"], answer["error"]) == ("red", [*DEVICES], None)
            health = "mdp/colours/devices/gamma"
            fleet.agents["gamma"].kill()
            gone = message(heard, health, "UNREACHABLE")[1]
            assert (gone["usable"], gone["latency_ms"]) == (False, None)
            later = message(heard, "mdp/colours/answer", "unreachable")[1]
            assert (later["label"], later["degraded"]) == ("red", True)
            fleet.restart("gamma", "--source", f"folder:{fleet.folder / 'seen'}")
            assert message(heard, health, "READY")[1]["provider"] == "CPUExecutionProvider"
            process.kill()
            assert message(heard, AVAILABILITY) == ("0", "offline")
        with broker.hear("homeassistant/#") as heard:
            found = {}
            for _ in range(1 + len(DEVICES)):
                retained, topic, payload = heard.line().split(" ", 2)
                assert (retained, topic == former) == ("1", False), "a former device is removed"
                found[topic] = json.loads(payload)
    for topic, payload in found.items():
        check_discovery(topic, payload)
    assert states(found["homeassistant/device/mdp_colours/fleet/config"], answer)["Label"] == "red"
    config = found["homeassistant/device/mdp_colours/device-gamma/config"]
    assert states(config, gone)["State"] == "UNREACHABLE"


def test_a_sensor_that_only_a_process_before_had_is_removed(fleet: Fleet, tmp_path: Path) -> None:
    """Of a label of another bundle, which was served while no `mdp mqtt` ran."""
    broker, topic = Mosquitto(tmp_path / "broker"), "homeassistant/device/mdp_colours/fleet/config"
    former = {"platform": "binary_sensor", "unique_id": "mdp_colours.label_dirty"}
    with broker.running():
        broker.publish(topic, json.dumps({"components": {"mdp_colours.label_dirty": former}}))
        with publishing(fleet, broker), broker.hear("homeassistant/#") as heard:
            config = message(heard, topic, '"mdp_colours.label_dirty":{"platform":"binary_sensor"}')
    check_discovery(topic, config[1])
    assert len(config[1]["components"]) == 11


def test_a_late_and_a_restarted_broker(fleet: Fleet, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker")
    away = f"mdp: broker {broker.address}: Connection refused; trying again\n"
    lost = f"mdp: broker {broker.address}: the connection is lost; trying again\n"
    with publishing(fleet, broker) as process:
        for expected in (away, away + lost):
            until(lambda text=expected: process.stderr == text, expected)  # type: ignore[misc]
            with broker.running(), broker.hear() as heard:
                assert process.line().startswith("publishing to ")
                assert message(heard, "mdp/colours/answer")[1]["label"] == "red"
                if expected != away:
                    assert process.terminate() == 0
                    assert message(heard, AVAILABILITY, "offline") == ("0", "offline")
        assert process.stderr == away + lost


def test_a_wrong_password_or_certificate_is_one_line(fleet: Fleet, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    plain = Mosquitto(tmp_path / "plain")
    encrypted = Mosquitto(tmp_path / "tls", (certificate, key))
    other = self_signed(tmp_path / "other")[0]
    with plain.running(), encrypted.running():
        plain.login.write_text("fleet\nwrong\n")
        with publishing(fleet, plain) as process:
            assert process.process.wait(process.patience_s) == 5
        assert process.stderr == (
            f"mdp: broker {plain.address}: it refuses this user or password: Not authorized\n"
        )
        with publishing(fleet, encrypted, "--ca", other) as process:
            assert process.process.wait(process.patience_s) == 5
        assert "its certificate is not trusted" in process.stderr
        assert process.stderr.count("\n") == 1
        encrypted.login.with_name("mqtt.log").unlink()
        with publishing(fleet, encrypted, "--ca", certificate, "--json") as process:
            told = {"event": "publishing", "broker": encrypted.address, "topics": "mdp/colours"}
            assert json.loads(process.line()) == told
            process.signal(signal.SIGINT)
            assert process.process.wait(process.patience_s) == 130
        assert process.stderr == ""


def mdp_mqtt(fleet: Fleet, *options: object) -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp", "mqtt", "--fleet", fleet.folder / "fleet.toml", *options)


def test_refused_options(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("--broker", f"127.0.0.1:{free_port()}")
    login, open_login = tmp_path / "login", tmp_path / "open"
    login.touch(mode=0o600)
    login.write_text("only a user\n")
    open_login.write_text("user\npassword\n")
    open_login.chmod(0o644)
    for options, part in (
        (("--broker", "nowhere:x"), "--broker nowhere:x: expected HOST, HOST:PORT or [IPV6]:PORT"),
        ((*place, "--every", "10ms"), "--every: expected at least 0.1s, got '10ms'"),
        ((*place, "--name", "a/b"), "--name a/b: expected 1 to 64 letters"),
        ((*place, "--login", login), f"{login}: expected two lines, the user and the password"),
        ((*place, "--login", open_login), f"{open_login}: expected a file that only its owner"),
        ((*place, "--login", tmp_path / "none"), "cannot be read: No such file"),
        ((*place, "--ca", login), f"{login}: expected a PEM file of certificates"),
    ):
        done = mdp_mqtt(fleet, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert part in done.stderr
    monkeypatch.setattr("mdp.cli.mqtt.missing", lambda modules: "paho")
    assert mdp_mqtt(fleet, *place).stderr == (
        "mdp: paho is not installed; mdp mqtt needs it: "
        "pip install '.[mqtt]' in a checkout of MDP\n"
    )
