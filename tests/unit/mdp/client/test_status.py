"""States of a device, by what it says of itself and what its client holds."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mdp.client.status import device_status, with_camera_faults
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.protocol.messages import NO_DIGEST, State, Status, answers_key
from mdp.testing.bundles import write_bundle

ENTRY = FleetEntry(device="beta/attic", address="tcp://10.0.0.8:7500", k=1, key="0" * 40)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("status") / "bundle"))


def make_status(bundle: Bundle, /, **changes: Any) -> Status:
    status = Status(
        request_id=1,
        device="beta",
        state="READY",
        bundle="colours",
        digest=bundle.digest,
        k=1,
        provider="CPUExecutionProvider",
        fallback=False,
        reason="",
        queued=0,
        counts={"answered": 3},
    )
    return msgspec.structs.replace(status, **changes)


@pytest.mark.parametrize(
    ("changes", "usable", "reason"),
    [
        ({}, True, ""),
        ({"state": "WARMING"}, False, ""),
        ({"state": "DRAINING"}, False, ""),
        ({"state": "FAILED", "reason": "RuntimeError: no"}, False, "RuntimeError: no"),
        (
            {"digest": "a" * 64, "bundle": "other"},
            False,
            "wrong_bundle: serves other aaaaaaaaaaaa, expected colours ",
        ),
        (
            {"digest": NO_DIGEST, "bundle": "", "reason": "this agent has a camera and no bundle"},
            False,
            "wrong_bundle: this agent has a camera and no bundle, expected colours ",
        ),
        ({"k": 2, "device": "gamma"}, False, "wrong_submodel: serves 2 (gamma), expected 1"),
        ({"fallback": True}, True, "runs on CPUExecutionProvider, not as planned"),
        (
            {"fallback": True, "state": "FAILED", "reason": "RuntimeError: no"},
            False,
            "RuntimeError: no; runs on CPUExecutionProvider, not as planned",
        ),
    ],
)
def test_what_a_device_says(
    bundle: Bundle, changes: dict[str, Any], usable: bool, reason: str
) -> None:
    status = device_status(ENTRY, make_status(bundle, **changes), bundle, silent=False)
    assert (status.device, status.address) == ("beta/attic", "tcp://10.0.0.8:7500")
    assert status.state == changes.get("state", "READY")
    assert status.usable is usable
    assert status.reason.startswith(reason)
    assert bool(status.reason) == bool(reason)
    assert status.counts == {"answered": 3}


def test_a_client_without_a_bundle_asks_for_cameras_alone(bundle: Bundle) -> None:
    told = make_status(
        bundle, digest=NO_DIGEST, bundle="", k=0, reason="no bundle", source="folder:door"
    )
    status = device_status(ENTRY, told, None, silent=False)
    assert (status.usable, status.reason, status.source) == (True, "no bundle", "folder:door")


@pytest.mark.parametrize("state", ["READY", "DRAINING"])
def test_a_device_that_changes_over_still_serves_this_client(bundle: Bundle, state: State) -> None:
    counts = {"answered": 3, answers_key(bundle.digest): 2, answers_key("a" * 64): 1}
    told = make_status(bundle, digest="a" * 64, bundle="other", k=2, state=state, counts=counts)
    status = device_status(ENTRY, told, bundle, silent=False)
    assert status.usable is (state == "READY")
    assert status.reason == (
        "serves other aaaaaaaaaaaa by now, and this client's bundle until nobody asks for it: "
        "reload this client"
    )


@pytest.mark.parametrize(
    ("silent", "state", "reason"),
    [(True, "SILENT", "connected, but does not answer"), (False, "UNREACHABLE", "no connection")],
)
def test_a_device_that_says_nothing(bundle: Bundle, silent: bool, state: str, reason: str) -> None:
    status = device_status(ENTRY, None, bundle, silent=silent)
    assert (status.state, status.reason, status.usable) == (state, reason, False)
    assert status.bundle is None
    assert status.provider is None


@pytest.mark.parametrize(
    ("address", "key", "encrypted", "reason"),
    [
        ("tcp://10.0.0.8:7500", "0" * 40, True, ""),
        ("tcp://127.0.0.1:7500", "0" * 40, True, ""),
        ("tcp://127.0.0.1:7500", None, False, ""),
        ("tcp://10.0.0.8:7500", None, False, "plain text over the network"),
    ],
)
def test_plain_text_over_a_network_is_said(
    bundle: Bundle, address: str, key: str | None, encrypted: bool, reason: str
) -> None:
    entry = FleetEntry(device="beta", address=address, k=1, key=key)
    status = device_status(entry, make_status(bundle), bundle, silent=False)
    assert (status.encrypted, status.reason, status.usable) == (encrypted, reason, True)


def test_a_suspected_camera_is_a_reason_and_the_device_stays_usable(bundle: Bundle) -> None:
    status = device_status(ENTRY, make_status(bundle, suspect="frozen"), bundle, silent=False)
    assert (status.suspect, status.usable) == ("frozen", True)
    assert status.reason == "camera: the same picture again and again: camera frozen?"


class Seats:
    """A fleet of agents, each at a host with a camera of the scene and a source."""

    def __init__(self, bundle: Bundle, *seats: tuple[str, str, str]) -> None:
        plan = bundle.manifest.plan
        cameras = list(dict.fromkeys(camera for _, camera, _ in seats))
        parts = [
            replace(plan.assignments[0], k=k, device=camera, camera=camera)
            for k, camera in enumerate(cameras)
        ]
        manifest = replace(bundle.manifest, plan=replace(plan, assignments=parts), evaluation=None)
        self.bundle = Bundle(bundle.path, manifest)
        entries, self.told = [], []
        for number, (host, camera, source) in enumerate(seats):
            address, k = f"tcp://{host}:{7500 + number}", cameras.index(camera)
            entries.append(FleetEntry(device=f"d{number}", address=address, k=k))
            told = make_status(self.bundle, k=k, source=source)
            self.told.append(device_status(entries[-1], told, self.bundle, silent=False))
        self.fleet = Fleet(bundle="bundle", devices=entries)

    @property
    def reasons(self) -> list[str]:
        found = with_camera_faults(self.told, self.fleet, self.bundle)
        plain = "plain text over the network"
        return [each.reason.removeprefix(plain).removeprefix("; ") for each in found]


DOOR = "rtsp://10.0.0.30:554/door"


@pytest.mark.parametrize(
    ("seats", "told"),
    [
        (
            [("a", "door", "camera:0: no frame yet"), ("a", "yard", "camera:0: frame 7, 1 ms old")],
            [
                "camera:0 is camera door, and camera yard of d1",
                "camera:0 is camera yard, and camera door of d0",
            ],
        ),
        (
            [("a", "door", f"{DOOR}: no frame yet"), ("b", "yard", f"{DOOR}: frame 7, 1 ms old")],
            [f"{DOOR} is camera door, and camera yard of d1", f"{DOOR} is camera yard, and camera"],
        ),
        (
            [("a", "door", "camera:0: frame 1, 1 ms old"), ("b", "door", "camera:0: no frame yet")],
            [
                "camera door is camera:0, and camera:0 of d1",
                "camera door is camera:0, and camera:0 of d0",
            ],
        ),
        # Cameras of their own, one stream for two devices or two of one camera, and no source.
        (
            [("a", "door", "camera:0: no frame yet"), ("b", "yard", "camera:0: no frame yet")],
            ["", ""],
        ),
        (
            [("a", "door", f"{DOOR}: no frame yet"), ("b", "door", f"{DOOR}: no frame yet")],
            ["", ""],
        ),
        (
            [("a", "door", f"{DOOR}: no frame yet"), ("b", "door", f"{DOOR}/sub: no frame yet")],
            ["", ""],
        ),
        ([("a", "door", ""), ("a", "door", "")], ["", ""]),
        # One agent was started without its camera.
        (
            [("a", "door", "camera:0: frame 1, 1 ms old"), ("b", "yard", "")],
            ["", "camera yard: this agent has no source (--source)"],
        ),
    ],
)
def test_two_agents_that_claim_one_camera_are_told_of(
    bundle: Bundle, seats: list[tuple[str, str, str]], told: list[str]
) -> None:
    for reason, expected in zip(Seats(bundle, *seats).reasons, told, strict=True):
        assert reason.startswith(expected)
        assert bool(reason) == bool(expected)
