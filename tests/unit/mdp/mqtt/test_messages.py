"""Messages about answers and devices, and what Home Assistant makes of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest

from mdp.client.status import DeviceStatus
from mdp.errors import QuorumNotMet
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.mqtt.bridge import Bridge
from mdp.mqtt.messages import Topics, answer_payload, discovery, entities_of, health_payload
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.bundles import write_bundle
from tests.support.mqtt.home_assistant import check_discovery, states

NAMES = ("alpha", "alpha/attic", "alpha_attic", "beta.2")
ENTRIES = [
    FleetEntry(device=name, address=f"tcp://127.0.0.1:{7000 + n}", k=0)
    for n, name in enumerate(NAMES)
]
ANSWER = Prediction(
    label="red",
    probability=0.925,
    top=(("red", 0.925),),
    mode="single",
    used=("alpha",),
    missing={"beta.2": "late"},
    expected_accuracy=None,
    latency_ms=12.3456,
    deadline_ms=80.0,
    members=(MemberTiming(device="alpha", k=0, queue_ms=1.0, compute_ms=2.0, network_ms=3.0),),
)
READY = DeviceStatus(device="alpha", address="tcp://127.0.0.1:7000", state="READY", provider="CPU")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("mqtt") / "bundle"))


def configs(bundle: Bundle) -> dict[str, dict[str, Any]]:
    fleet = Fleet(bundle="bundle", devices=ENTRIES)
    return discovery(Topics("colours", NAMES), fleet, bundle)


def test_a_device_for_the_fleet_and_one_for_each_entry(bundle: Bundle) -> None:
    found = configs(bundle)
    for topic, payload in found.items():
        check_discovery(topic, payload)
    names = [topic.split("/")[3] for topic in found]
    assert names == [
        "fleet", "device-alpha", "device-alpha_attic_6ae3dd35", "device-alpha_attic",
        "device-beta_2",
    ]  # fmt: skip
    unique = [key for payload in found.values() for key in payload["components"]]
    assert len(set(unique)) == len(unique) == 10 + 6 * len(NAMES)
    states = [payload["state_topic"] for payload in found.values()]
    assert len(set(states)) == len(states), "no two devices share a topic"
    assert {payload["availability_topic"] for payload in found.values()} == {
        "mdp/colours/availability"
    }
    assert list(found.values())[1]["device"]["via_device"] == "mdp_colours"


def test_two_fleets_on_a_broker_share_no_identifier(bundle: Bundle) -> None:
    # Names that are the same once what Home Assistant refuses is gone, or once joined.
    fleets = {"porch": ["back_door", "a/b", "a.b"], "porch_back": ["door"], "porch.back": ["door"]}
    found, identifiers = [], []
    for name, devices in fleets.items():
        entries = [FleetEntry(device=each, address=f"tcp://{each}:1", k=0) for each in devices]
        topics = Topics(name, devices)
        assert topics.slugs == Topics(name, reversed(devices)).slugs
        configs = discovery(topics, Fleet(bundle="bundle", devices=entries), bundle)
        for topic, payload in configs.items():
            check_discovery(topic, payload)
            identifiers += [*payload["device"]["identifiers"], *payload["components"]]
        found += [*configs]
    for names in (found, identifiers):
        assert len(set(names)) == len(names)


def test_an_answer_and_none_are_shown(bundle: Bundle) -> None:
    config = next(iter(configs(bundle).values()))
    answered = json.loads(msgspec.json.encode(answer_payload("now", ANSWER)))
    assert states(config, answered) == {
        "Label": "red",
        "Probability": "92.5",
        "Expected accuracy": "None",
        "Mode": "single",
        "Devices in the answer": "1",
        "Devices missing": "1",
        "Latency": "12.35",
        "Problem": "ON",
        "Unknown item": "OFF",
        # Nobody has inspected it.
        "Different from good ones": "None",
    }
    fine = answer_payload("now", msgspec.structs.replace(ANSWER, normal=True, anomaly=0.2))
    assert states(config, fine)["Different from good ones"] == "OFF"
    worn = answer_payload(
        "now", msgspec.structs.replace(ANSWER, normal=False, anomaly=1.2, blind_sides=("beta.2",))
    )
    assert states(config, worn)["Different from good ones"] == "ON"
    assert (worn["anomaly"], worn["blind_sides"]) == (1.2, ("beta.2",))
    assert worn["verdict"] == "different: red (92%)"
    strange = answer_payload(
        "now", msgspec.structs.replace(ANSWER, known=False, novelty=1.5, known_rejected=0.02)
    )
    assert states(config, strange)["Unknown item"] == "ON"
    assert strange["verdict"] == "unknown, nearest red (92%)"
    assert (strange["label"], strange["known_rejected"]) == ("red", 0.02)
    label = next(iter(config["components"].values()))
    attributes = jinja2.Template(label["json_attributes_template"]).render(value_json=answered)
    assert json.loads(attributes) == {
        "used": ["alpha"],
        "missing": {"beta.2": "late"},
        "error": None,
    }
    error = QuorumNotMet("no device\ncan answer", dict.fromkeys(NAMES, "unreachable"))
    failed = answer_payload("now", error)
    assert failed["error"] == "no device can answer"
    assert failed.keys() == answered.keys()
    assert states(config, failed)["Unknown item"] == "OFF"
    shown = states(config, failed)
    assert (shown["Label"], shown["Probability"], shown["Problem"]) == ("None", "None", "ON")
    assert shown["Devices missing"] == "4"
    assert states(config, {**answered, "label": "x" * 300})["Label"] == "x" * 255


def test_a_devices_health_is_shown(bundle: Bundle) -> None:
    config = list(configs(bundle).values())[1]
    assert states(config, health_payload(READY, 3.25)) == {
        "State": "READY",
        "Provider": "CPU",
        "Latency": "3.25",
        "Temperature": "None",
        "Problem": "OFF",
        "Camera": "OFF",
    }
    suspect = health_payload(replace(READY, suspect="disagrees"), 3.25)
    assert states(config, suspect)["Camera"] == "ON"
    gone = DeviceStatus(device="alpha", address="", state="UNREACHABLE", reason="no connection")
    shown = states(config, health_payload(gone, 3.25))
    assert (shown["State"], shown["Latency"], shown["Problem"]) == ("UNREACHABLE", "None", "ON")


class Recorded:
    """Stands for a broker, and for a client whose devices say what they are told to."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.fleet = Fleet(bundle="bundle", devices=ENTRIES)
        self.statuses = [READY]
        self.sent: list[tuple[str, bool]] = []
        self.payloads: dict[str, str] = {}
        self.retracted: list[str] = []
        self.reloaded = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        json.loads(payload) if topic != "mdp/colours/availability" else None
        self.sent.append((topic, retain))
        self.payloads[topic] = payload

    def retract(self, topic: str) -> None:
        self.retracted.append(topic)

    def look(self, *, deadline_ms: float) -> Prediction:
        return ANSWER

    def status(self, *, timeout_s: float) -> list[DeviceStatus]:
        return self.statuses

    def reload(self) -> None:
        self.reloaded += 1
        self.fleet = Fleet(bundle="bundle", devices=ENTRIES[:1])
        self.meanwhile()


def test_health_is_published_when_it_changes_and_a_device_that_left_is_removed(
    bundle: Bundle,
) -> None:
    file = bundle.path.parent / "fleet.toml"
    file.write_text("one")
    seen = Recorded(bundle)
    bridge = Bridge(seen, file, "colours", seen, print)  # type: ignore[arg-type]
    assert all(retain for _, retain in seen.sent)
    seen.sent.clear()

    def step() -> list[str]:
        bridge.step(deadline_ms=80.0, now=lambda: "now")
        topics = [topic for topic, _ in seen.sent]
        seen.sent.clear()
        return topics

    answer, health = "mdp/colours/answer", "mdp/colours/devices/alpha"
    assert step() == [answer, health]
    assert step() == [answer], "nothing has changed"
    seen.statuses = [DeviceStatus(device="alpha", address="", state="SILENT")]
    assert step() == [answer, health]
    bridge.again()
    assert step() == [answer, health]
    seen.statuses = [replace(seen.statuses[0], temperature_c=61.5)]
    assert step() == [answer], "a temperature is not a change"
    file.write_text("another")
    assert health in step()
    assert (seen.reloaded, len(seen.retracted)) == (1, 3)
    assert "homeassistant/device/mdp_colours/device-beta_2/config" in seen.retracted
    # Changed again while it is read: once more.
    seen.meanwhile = lambda: file.write_text("a third")
    file.write_text("in between")
    step()
    seen.meanwhile = lambda: None
    step()
    step()
    assert seen.reloaded == 3


def test_a_fleet_file_that_is_away_for_a_moment_is_no_reason_to_end(bundle: Bundle) -> None:
    seen = Recorded(bundle)
    file = bundle.path.parent / "away.toml"
    file.touch()
    bridge = Bridge(seen, file, "colours", seen, print)  # type: ignore[arg-type]
    Path(file).unlink()
    bridge.step(deadline_ms=80.0, now=lambda: "now")
    assert seen.reloaded == 0


def test_labels_that_hold_have_a_sensor_each(tmp_path: Path) -> None:
    labels = ('a "bent" {{ pin }}', "dirty%}", "bent", "dent", "\U0001f529 schräg\\")
    several = Bundle.open(write_bundle(tmp_path / "bundle", labels=labels, several=True))
    topic, config = next(iter(configs(several).items()))
    check_discovery(topic, config)
    held = ((labels[0], 0.9), ("bent", 0.75), (labels[4], 0.7))
    answer = msgspec.structs.replace(ANSWER, label=f"bent+{labels[0]}+{labels[4]}", holds=held)
    told = json.loads(msgspec.json.encode(answer_payload("now", answer)))
    assert told["holds"] == [[*one] for one in held]
    shown = states(config, told)
    assert [shown[label] for label in labels] == ["ON", "OFF", "ON", "OFF", "ON"]
    none = states(config, {**told, "label": "none", "holds": []})
    assert [none[label] for label in labels] == ["OFF"] * 5
    failed = states(config, answer_payload("now", QuorumNotMet("nobody", {})))
    assert [failed[label] for label in labels] == ["None"] * 5, "shown as unknown"


def test_too_many_labels_have_the_one_sensor(tmp_path: Path) -> None:
    labels = [f"fault {number}" for number in range(51)]
    several = Bundle.open(write_bundle(tmp_path / "bundle", labels=labels, several=True))
    assert len(next(iter(configs(several).values()))["components"]) == 10


FLEET = "homeassistant/device/mdp_colours/fleet/config"


def test_sensors_of_labels_that_a_bundle_has_no_more_are_removed(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Home Assistant keeps an entity that is merely left out of a device's discovery."""
    former, later = (
        Bundle.open(write_bundle(tmp_path / name, labels=labels, several=True))
        for name, labels in (("former", ("bent", "dirty")), ("later", ("bent", "worn")))
    )
    file = tmp_path / "fleet.toml"
    file.write_text("one")
    seen = Recorded(former)
    bridge = Bridge(seen, file, "colours", seen, print)  # type: ignore[arg-type]
    first = seen.payloads[FLEET]

    def labels() -> dict[str, int]:
        """Keys of each label's sensor: with a platform alone it is removed."""
        config = json.loads(seen.payloads[FLEET])
        check_discovery(FLEET, config)
        return {
            key.split(".label_")[1].split("_")[0]: len(one)
            for key, one in config["components"].items()
            if ".label_" in key
        }

    assert {label: count > 1 for label, count in labels().items()} == {"bent": True, "dirty": True}
    for number, (now, told) in enumerate((
        (later, {"bent": True, "worn": True, "dirty": False}),
        (bundle, {"bent": False, "worn": False, "dirty": False}),
        (former, {"bent": True, "dirty": True, "worn": False}),
    )):  # fmt: skip
        seen.bundle = now
        file.write_text(f"another {number}")
        bridge.step(deadline_ms=80.0, now=lambda: "now")
        assert {label: count > 1 for label, count in labels().items()} == told

    # A process that begins later hears what this one had announced, and then its own.
    again = Recorded(later)
    bridge = Bridge(again, file, "colours", again, print)  # type: ignore[arg-type]
    seen = again
    assert "dirty" not in labels()
    for content in (first, "no discovery", '{"components": {"x": 1}}'):
        bridge.on_former(FLEET, content.encode())
    bridge.on_former("another/topic", first.encode())
    bridge.step(deadline_ms=80.0, now=lambda: "now")
    assert {label: count > 1 for label, count in labels().items()} == {
        "bent": True, "worn": True, "dirty": False
    }  # fmt: skip
    again.sent.clear()
    bridge.on_former(FLEET, seen.payloads[FLEET].encode())
    bridge.step(deadline_ms=80.0, now=lambda: "now")
    assert FLEET not in [topic for topic, _ in again.sent], "its own has nothing new"
    assert "label_dirty" not in "".join(entities_of(seen.payloads[FLEET].encode()))
