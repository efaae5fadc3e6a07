"""Memory of a gateway about its devices."""

import copy
from pathlib import Path

import msgspec
import pytest

from mdp.client.status import DeviceStatus
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.gateway.devices import KEPT_LATENCIES, Roll, kind_of
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.requests.reason import LEFT_OUT
from mdp.testing.bundles import DEVICES, subset_accuracy, write_bundle
from tests.support.bundles import with_cascade


@pytest.fixture
def roll(tmp_path: Path) -> Roll:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    entries = [
        FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
        for k, name in enumerate(DEVICES)
    ]
    return Roll(Fleet(bundle="bundle", devices=entries), bundle, "stacked")


def status(device: str, state: str = "READY", reason: str = "") -> DeviceStatus:
    return DeviceStatus(device=device, address="", state=state, reason=reason, queued=2)


def answer(*used: str, **missing: str) -> Prediction:
    return Prediction(
        label="red",
        probability=1.0,
        top=(("red", 1.0),),
        mode="stacked",
        used=used,
        missing=missing,
        expected_accuracy=None,
        latency_ms=1.0,
        deadline_ms=10.0,
        members=tuple(
            MemberTiming(device=name, k=k, queue_ms=1.0, compute_ms=2.0, network_ms=0.5)
            for k, name in enumerate(used)
        ),
    )


def test_a_fault_begins_and_ends_once(roll: Roll) -> None:
    roll.on_statuses([status(name) for name in DEVICES], 1.0)
    assert not roll.faults
    for now_s in (2.0, 3.0):
        roll.on_statuses([status("beta", "UNREACHABLE", "no connection")], now_s)
    # The status says more than the answer that lacks it.
    roll.on_answer(answer("alpha", beta="unreachable"), 3.5)
    roll.on_statuses([status("beta")], 4.0)
    assert [(f.at_s, f.device, f.what, f.over) for f in roll.faults] == [
        (2.0, "beta", "UNREACHABLE: no connection", False),
        (4.0, "beta", "back after UNREACHABLE: no connection", True),
    ]


def test_a_late_device_is_a_fault_until_it_is_in_an_answer(roll: Roll) -> None:
    roll.on_statuses([status(name) for name in DEVICES], 1.0)
    for now_s in (2.0, 3.0):
        roll.on_answer(answer("alpha", "beta", gamma="late"), now_s)
        # It says of itself that all is well.
        roll.on_statuses([status(name) for name in DEVICES], now_s + 0.5)
        assert roll.devices["gamma"].fault == "late"
    roll.on_answer(answer(*DEVICES), 4.0)
    assert [(f.at_s, f.what) for f in roll.faults] == [(2.0, "late"), (4.0, "back after late")]


def test_latencies_are_kept_and_shown(roll: Roll) -> None:
    for _ in range(KEPT_LATENCIES + 5):
        roll.on_answer(answer(*DEVICES), 1.0)
    shown = msgspec.json.decode(msgspec.json.encode(roll.snapshot()))
    assert shown["devices"][0]["latencies_ms"] == [3.5] * KEPT_LATENCIES
    assert shown["devices"][1]["submodel"] == "12 px, patch 4, 8 x 1"
    assert shown["devices"][1]["region"] == [0, 0, 1, 1]
    assert shown["devices"][1]["accuracy"] == subset_accuracy((1,)).stacked
    assert shown["expected_accuracy"] is None
    assert shown["expected_accuracy_all"] == subset_accuracy((0, 1, 2)).stacked


def test_accuracy_is_that_of_the_devices_that_can_answer_and_are_in_use(roll: Roll) -> None:
    assert roll.accuracy_now() is None
    roll.on_statuses([status(name) for name in DEVICES], 1.0)
    assert roll.accuracy_now() == subset_accuracy((0, 1, 2)).stacked
    roll.on_switch("beta", False, 2.0)
    assert roll.accuracy_now() == subset_accuracy((0, 2)).stacked
    roll.on_statuses([status("alpha", "UNREACHABLE")], 3.0)
    assert roll.accuracy_now() == subset_accuracy((2,)).stacked
    # What somebody asked for is no fault of the device.
    roll.on_answer(answer("gamma", beta=str(LEFT_OUT)), 4.0)
    assert [fault.device for fault in roll.faults] == ["beta", "alpha"]


def test_the_last_device_is_the_last_that_can_answer(roll: Roll) -> None:
    def last() -> list[str]:
        return [name for name, one in roll.devices.items() if one.in_use and roll.is_last(name)]

    # Before anything is known of them.
    assert last() == []
    roll.on_statuses([status("alpha"), status("beta"), status("gamma", "UNREACHABLE")], 1.0)
    assert last() == []
    roll.on_switch("alpha", False, 2.0)
    # Gamma is in use and cannot answer: it is no loss itself.
    assert last() == ["beta"]
    roll.on_statuses([status("beta", "UNREACHABLE")], 3.0)
    assert last() == []
    roll.on_switch("beta", False, 4.0)
    assert last() == ["gamma"]


def test_reasons_are_counted_by_their_kind() -> None:
    assert kind_of("slow: 3 of its last 4 answers took longer") == "slow"
    assert kind_of("late") == "late"


def test_a_roll_that_is_made_anew_keeps_what_is_switched_off(roll: Roll) -> None:
    def shown(off: tuple[str, ...]) -> list[bool]:
        for name in roll.devices:
            roll.devices[name].in_use = name not in off
        fresh = copy.deepcopy(roll)
        for device in fresh.devices.values():
            device.in_use = True
        fresh.faults.clear()
        fresh.take_over(roll)
        assert list(fresh.faults) == list(roll.faults)
        return [device.in_use for device in fresh.devices.values()]

    roll.on_switch("gamma", False, 1.0)
    assert shown(("gamma",)) == [True, True, False]
    # All of a fleet that was written anew: somebody has to answer.
    assert shown(DEVICES) == [True, True, True]


def test_the_accuracy_of_a_cascade_is_that_of_all_its_members(tmp_path: Path) -> None:
    bundle = Bundle.open(with_cascade(write_bundle(tmp_path / "bundle"), 0.5))
    entries = [
        FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
        for k, name in enumerate(DEVICES)
    ]
    roll = Roll(Fleet(bundle="bundle", devices=entries), bundle, "stacked", cascade=True)
    roll.on_statuses([status(name) for name in DEVICES], 1.0)
    measured = bundle.cascade_accuracy("stacked")
    assert measured is not None
    shown = roll.snapshot()
    assert shown["expected_accuracy"] == shown["expected_accuracy_all"] == measured
    # Without one of them it was not measured.
    roll.on_statuses([status("beta", "UNREACHABLE", "no connection")], 2.0)
    assert roll.snapshot()["expected_accuracy"] is None
