"""What the gateway's metrics say of its devices."""

from pathlib import Path
from typing import cast

import pytest

from mdp.client.status import DeviceStatus
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.gateway.devices import Roll
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.metrics import Metrics
from mdp.testing.bundles import DEVICES, write_bundle


class Told:
    """A fleet whose devices said what they were told to."""

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle.open(write_bundle(folder / "bundle"))
        entries = [
            FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
            for k, name in enumerate(DEVICES)
        ]
        self.roll = Roll(Fleet(bundle="bundle", devices=entries), self.bundle, "stacked")
        self._metrics = Metrics({"colours": cast(ServedFleet, self)})

    def scraped(self, family: str, *statuses: DeviceStatus) -> dict[str, float]:
        """Labels -> value of the samples of `family`, after the devices have said `statuses`."""
        self.roll.told(statuses, 1.0)
        lines = self._metrics.exposition("")[0].decode().splitlines()
        found = [line for line in lines if line.startswith(f"{family}{{")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_suspected_camera_is_a_gauge_of_devices_with_a_camera(told: Told) -> None:
    alpha = DeviceStatus(device="alpha", address="", state="READY", source="camera:0: frame 1, ...")
    beta = DeviceStatus(
        device="beta", address="", state="READY", source="camera:0: frame 1", suspect="disagrees"
    )
    gamma = DeviceStatus(device="gamma", address="", state="READY")
    assert told.scraped("mdp_camera_suspect", alpha, beta, gamma) == {
        f'mdp_camera_suspect{{device="{device}",model="colours",why="{why}"}}': value
        for device, why, value in (
            ("alpha", "disagrees", 0.0),
            ("alpha", "frozen", 0.0),
            ("beta", "disagrees", 1.0),
            ("beta", "frozen", 0.0),
        )
    }
