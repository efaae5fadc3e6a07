"""Has all agents of a fleet serve another bundle, or the one before: all of them, or none."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mdp.client.base import Options
from mdp.client.bundles import DeviceBundles, check_keyed
from mdp.errors import ConfigError, InputError, MDPError, TransferError
from mdp.formats.bundle import Bundle
from mdp.formats.device_part import Version, part_of, version_of
from mdp.formats.fleet import Fleet, FleetEntry, read_devices
from mdp.formats.fleet_edit import name_bundle

#: The device, and the share of its bytes that are there.
Told = Callable[[str, float], None]


class FleetRollout:
    """The bundles of a fleet's agents; for one thread at a time."""

    def __init__(self, fleet: Path, key: Path | None) -> None:
        """`key` is the client's secret key file, instead of the fleet file's."""
        self._path = fleet
        self._options = Options(fleet=fleet, key=key)

    def push(self, folder: Path, told: Told) -> list[str]:
        """Have every agent serve the bundle in `folder`, and the fleet file name it.

        Those that serve it by then go back where one does not; the file is changed last. Returns
        the devices. Raises ConfigError, InputError or TransferError.
        """
        opened, fleet = Bundle.open(folder), self._fleet()
        named = name_bundle(self._path, opened)
        for entry in fleet.devices:
            part_of(opened, opened.assignment(entry.plan_device).k)
        pushed, wanted = list[FleetEntry](), version_of(opened).manifest
        try:
            for entry in fleet.devices:
                told(entry.device, 0.0)
                with self._connect(fleet, entry) as device:
                    before = device.state().serves
                    if before is None or before.manifest != wanted:
                        # Before it is pushed: an agent may switch whose answer never comes.
                        pushed.append(entry)
                    device.push(
                        opened,
                        lambda n, total, name=entry.device: told(name, n / max(1, total)),  # type: ignore[misc]
                    )
            named.write()
        except (MDPError, OSError) as error:
            raise self._undone(error, fleet, pushed, wanted) from error
        return [entry.device for entry in fleet.devices]

    def _undone(
        self, error: Exception, fleet: Fleet, entries: Iterable[FleetEntry], unwanted: str
    ) -> TransferError:
        """Have devices that serve the manifest `unwanted` serve what they did before.

        Returns `error`, with the names of those that do not.
        """
        stuck = []
        for entry in entries:
            try:
                with self._connect(fleet, entry) as device:
                    serves = device.state().serves
                    if serves is not None and serves.manifest == unwanted:
                        device.rollback()
            except MDPError:
                stuck.append(entry.device)
        also = f"; these could not go back: {', '.join(stuck)}" if stuck else ""
        return TransferError(f"{error}{also}")

    def roll_back(self, folders: Iterable[Path], told: Told) -> Version:
        """Have every agent serve its version before, and the fleet file name the bundle of it.

        That is looked for in `folders`. Where an agent does not go back, the others serve again
        what they did. Returns the version. Raises TransferError, before anything is changed where
        the agents do not have the same one.
        """
        fleet = self._fleet()
        previous = self._previous(fleet)
        named = name_bundle(self._path, self._find(previous, folders))
        gone = list[FleetEntry]()
        try:
            for entry in fleet.devices:
                told(entry.device, 0.0)
                gone.append(entry)
                with self._connect(fleet, entry) as device:
                    device.rollback()
                told(entry.device, 1.0)
            named.write()
        except (MDPError, OSError) as error:
            raise self._undone(error, fleet, gone, previous.manifest) from error
        return previous

    def _previous(self, fleet: Fleet) -> Version:
        found: dict[str, Version] = {}
        for entry in fleet.devices:
            with self._connect(fleet, entry) as device:
                version = device.state().previous
            if version is None:
                raise TransferError(f"{entry.device}: keeps no previous version")
            found[entry.device] = version
        first = next(iter(found.values()))
        for name, version in found.items():
            if version.digest != first.digest:
                raise TransferError(
                    f"{name}: would go back to {version.digest[:12]}, others to "
                    f"{first.digest[:12]}: expected one version"
                )
        return first

    @staticmethod
    def _find(version: Version, folders: Iterable[Path]) -> Bundle:
        for folder in folders:
            with suppress(ConfigError):
                bundle = Bundle.open(folder)
                if bundle.digest == version.digest:
                    return bundle
        raise InputError(
            f"no folder of the bundle {version.name} {version.digest[:12]} is here: expected one, "
            "to name it in the fleet file"
        )

    def _fleet(self) -> Fleet:
        fleet = read_devices(self._path)
        for entry in fleet.devices:
            check_keyed(entry)
        return fleet

    def _connect(self, fleet: Fleet, entry: FleetEntry) -> DeviceBundles:
        return DeviceBundles(fleet, entry, self._options)
