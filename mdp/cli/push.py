"""`mdp bundle push|pull|rollback|status`: the bundles of a fleet's agents."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from mdp import console
from mdp.cli.answers import FleetFile, Json, KeyFile
from mdp.client.base import Options
from mdp.client.bundles import PATIENCE_S, DeviceBundles, Pushed, check_keyed
from mdp.errors import InputError, MDPError, TransferError
from mdp.formats.bundle import Bundle
from mdp.formats.device_part import Version, part_of
from mdp.formats.fleet import Fleet, FleetEntry, read_devices, read_fleet
from mdp.formats.fleet_edit import name_bundle
from mdp.formats.packaged import named_bundle

#: How long a device may take to tell its status.
STATUS_S = 3.0

T = TypeVar("T")
SomeDevices = Annotated[list[str] | None, typer.Argument(metavar="DEVICE", help="By default all.")]


class _Devices:
    """The chosen devices of a fleet file; raises InputError or ConfigError."""

    def __init__(self, fleet: Path, names: Sequence[str], key: Path | None) -> None:
        self._options = Options(fleet=fleet, key=key)
        self.fleet: Fleet = read_devices(fleet)
        if self.fleet.bundle:
            self.fleet, _ = read_fleet(fleet)
        known = {entry.device: entry for entry in self.fleet.devices}
        for name in names:
            if name not in known:
                raise InputError(f"{name}: expected one of {', '.join(known)}")
        self.entries = [known[name] for name in dict.fromkeys(names or known)]
        for entry in self.entries:
            check_keyed(entry)

    def connect(self, entry: FleetEntry, patience_s: float = PATIENCE_S) -> DeviceBundles:
        return DeviceBundles(self.fleet, entry, self._options, patience_s=patience_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolledBack:
    """A rollback that has succeeded."""

    device: str
    version: Version


def _one_by_one(
    entries: Sequence[FleetEntry],
    change: Callable[[FleetEntry], T],
    shown: Callable[[T], str],
    json: bool,
) -> None:
    """Change each device, and show what was done; ends at the first that fails."""
    done: list[T] = []
    try:
        for entry in entries:
            done.append(change(entry))
            if not json:
                print(shown(done[-1]), flush=True)
    except MDPError as error:
        left = [entry.device for entry in entries[len(done) :]]
        if json:
            console.print_json({"devices": done, "left": left, "error": console.one_line(error)})
        if isinstance(error, TransferError) and len(left) > 1:
            raise TransferError(f"{error}; not tried: {', '.join(left[1:])}") from error
        raise
    if json:
        console.print_json({"devices": done, "left": []})


def push(
    bundle: Annotated[
        Path, typer.Argument(callback=named_bundle, help="Bundle folder, or a name of MDP's.")
    ],
    fleet: FleetFile,
    devices: SomeDevices = None,
    key: KeyFile = None,
    json: Json = False,
) -> None:
    """Have agents serve a bundle: one after another, while they serve the one before.

    Each gets its own part, verifies and loads it, and then switches. After a break, the same
    command goes on where it was. Ends at the first device that fails. A fleet file that names no
    bundle names this one once all its devices serve it.

    Example: mdp bundle push bundle-2/ --fleet fleet.toml

    Exit codes: 0 all serve it, 2 bad input, 3 a device does not, 1 unforeseen.
    """
    opened, chosen = Bundle.open(bundle), _Devices(fleet, devices or [], key)
    # Before the first device serves it: a part is missing or damaged, a device is of another plan,
    # or the file cannot be changed.
    named = None
    if not chosen.fleet.bundle and len(chosen.entries) == len(chosen.fleet.devices):
        named = name_bundle(fleet, opened)
    for entry in chosen.entries:
        part_of(opened, opened.assignment(entry.plan_device).k)

    def push_to(entry: FleetEntry) -> Pushed:
        with chosen.connect(entry) as device, _bar(entry.device) as bar:
            return device.push(opened, bar)

    _one_by_one(chosen.entries, push_to, _pushed, json)
    if named is not None:
        named.write()
        print(f"mdp: {fleet}: names {named.fleet.bundle} from now on", file=sys.stderr)


def pull(
    device: Annotated[str, typer.Argument(help="A device of the fleet file.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    fleet: FleetFile,
    key: KeyFile = None,
    json: Json = False,
) -> None:
    """Write what a device serves now: its part of a bundle, with fusion weights.

    Example: mdp bundle pull n100 --out from-n100/ --fleet fleet.toml

    Exit codes: 0 fine, 2 bad input, 3 the device does not give it, 1 unforeseen.
    """
    chosen = _Devices(fleet, [device], key)
    with chosen.connect(chosen.entries[0]) as connected:
        version = connected.pull(out)
    if json:
        console.print_json({"path": str(out), "version": version})
        return
    print(f"{out}: {_named(version)}, as {device} serves it")


def rollback(
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE", help="Of the fleet file.")],
    fleet: FleetFile,
    key: KeyFile = None,
    json: Json = False,
) -> None:
    """Have devices serve their previous versions, one after another; once more, the later again.

    Ends at the first device that fails.

    Example: mdp bundle rollback n100 raspberry-pi-5 --fleet fleet.toml

    Exit codes: 0 fine, 2 bad input, 3 a device does not serve it, 1 unforeseen.
    """
    chosen = _Devices(fleet, devices, key)

    def roll_back(entry: FleetEntry) -> _RolledBack:
        with chosen.connect(entry) as device:
            return _RolledBack(device=entry.device, version=device.rollback())

    _one_by_one(
        chosen.entries,
        roll_back,
        lambda done: f"{done.device}: serves {_named(done.version)}",
        json,
    )


def status(
    fleet: FleetFile, devices: SomeDevices = None, key: KeyFile = None, json: Json = False
) -> None:
    """Show the version that each device serves, and the one that it would go back to.

    Example: mdp bundle status --fleet fleet.toml

    Exit codes: 0 fine, 2 bad input, 3 a device does not tell, 1 unforeseen.
    """
    chosen = _Devices(fleet, devices or [], key)
    rows: list[dict[str, object]] = []
    failed = False
    for entry in chosen.entries:
        row: dict[str, object] = {"device": entry.device, "serves": None, "previous": None}
        rows.append(row)
        try:
            with chosen.connect(entry, STATUS_S) as device:
                told = device.state()
        except TransferError as error:
            row["error"] = console.one_line(error)
            failed = True
            continue
        row.update(serves=told.serves, previous=told.previous, error=told.error)
        row["received_bytes"] = sum(told.received.values())
    if json:
        console.print_json({"devices": rows})
    else:
        Console(markup=False).print(_table(rows))
    raise typer.Exit(TransferError.exit_code if failed else 0)


def _table(rows: Sequence[dict[str, object]]) -> Table:
    table = Table("device", "serves", "previous", "reason")
    for row in rows:
        versions = [
            _named(version) if isinstance(version, Version) else ""
            for version in (row["serves"], row["previous"])
        ]
        table.add_row(str(row["device"]), *versions, str(row["error"]))
    return table


def _named(version: Version) -> str:
    return f"{version.name} {version.digest[:12]}"


def _pushed(pushed: Pushed) -> str:
    return (
        f"{pushed.device}: serves {_named(pushed.version)}, "
        f"{pushed.sent_bytes:,} of {pushed.total_bytes:,} bytes sent"
    )


class _Bar:
    """Shows the bytes that are there of all; on a terminal only."""

    def __init__(self, progress: Progress, device: str) -> None:
        self._progress = progress
        self._task = progress.add_task(device, total=None)

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)


@contextmanager
def _bar(device: str) -> Iterator[_Bar]:
    shown = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    ) as progress:
        yield _Bar(progress, device)


def add_to(app: typer.Typer) -> None:
    """Add the commands to `mdp bundle`."""
    for command in (push, pull, rollback, status):
        app.command(command.__name__)(command)
