"""`mdp bundle push|pull|rollback|status`: the bundles of a fleet's agents, and of registries."""

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
from mdp.cli.answers import FLEET_OPTION, FleetFile, Json, KeyFile
from mdp.client.base import Options
from mdp.client.bundles import PATIENCE_S, DeviceBundles, Pushed, check_keyed
from mdp.errors import ConfigError, InputError, MDPError, TransferError
from mdp.formats.bundle import Bundle
from mdp.formats.device_part import Version, part_of
from mdp.formats.fleet import Fleet, FleetEntry, read_devices, read_fleet
from mdp.formats.fleet_edit import name_bundle
from mdp.formats.packaged import bundle_by_name
from mdp.formats.signing import load_bundle_key
from mdp.registry.connection import Repository, connect
from mdp.registry.reference import is_reference, parse_reference
from mdp.registry.transfer import Stored, WantedPart, pull_from_registry, push_to_registry

#: How long a device may take to tell its status.
STATUS_S = 3.0

T = TypeVar("T")
SomeDevices = Annotated[list[str] | None, typer.Argument(metavar="DEVICE", help="By default all.")]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE", help="By default all of the fleet file; or one oci://HOST/NAME:TAG."
    ),
]
SomeFleet = Annotated[Path | None, FLEET_OPTION]
PlainHTTP = Annotated[
    bool, typer.Option("--insecure", help="Speak plain HTTP with the registry, not HTTPS.")
]


class _Devices:
    """The chosen devices of a fleet file; raises InputError or ConfigError."""

    def __init__(self, fleet: Path, names: Sequence[str], key: Path | None) -> None:
        self.path = fleet
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
            rest = ", ".join(left[1:])
            raise TransferError(f"{error}; not tried: {rest} (name these to go on)") from error
        raise
    if json:
        console.print_json({"devices": done, "left": []})


def push(
    bundle: Annotated[
        Path, typer.Argument(callback=bundle_by_name, help="Bundle folder, or a name of MDP's.")
    ],
    devices: Targets = None,
    fleet: SomeFleet = None,
    key: KeyFile = None,
    insecure: PlainHTTP = False,
    json: Json = False,
) -> None:
    """Have agents serve a bundle, one after another, or store it in a registry.

    Each agent gets its own part, verifies and loads it while it serves the one before, and then
    switches. After a break, the same command goes on where it was. Ends at the first device that
    fails. A fleet file that names no bundle names this one once the devices serve it: those that
    were named, or all.

    A registry gets the whole bundle with its signature, what it lacks of it, and then the tag.
    Logins are those of `podman login` and `docker login`.

    Example: mdp bundle push bundle-2/ --fleet fleet.toml

    Exit codes: 0 all serve it, or it is stored, 2 bad input, 3 a device or the registry does not
    take it, 1 unforeseen.
    """
    if devices and any(map(is_reference, devices)):
        if len(devices) > 1:
            raise InputError(f"{' '.join(devices)}: expected devices, or one registry")
        _push_to_registry(bundle, _repository(devices[0], insecure), json)
        return
    if insecure:
        raise InputError("--insecure: expected oci://HOST/NAME:TAG with it")
    opened, chosen = Bundle.open(bundle), _Devices(_require_fleet(fleet), devices or [], key)
    # Before the first device serves it: a part is missing or damaged, a device is of another plan,
    # or the file cannot be changed.
    named, unnamed = None, ""
    if not chosen.fleet.bundle:
        try:
            named = name_bundle(chosen.path, opened)
        except ConfigError as error:
            # A device that is not asked to serve the bundle may be none of its plan.
            if len(chosen.entries) == len(chosen.fleet.devices):
                raise
            unnamed = console.one_line(error)
    for entry in chosen.entries:
        part_of(opened, opened.assignment(entry.plan_device).k)

    def push_to(entry: FleetEntry) -> Pushed:
        with chosen.connect(entry) as device, _bar(entry.device) as bar:
            return device.push(opened, bar)

    _one_by_one(chosen.entries, push_to, _format_push, json)
    if unnamed:
        print(f"mdp: {chosen.path}: names no bundle yet: {unnamed}", file=sys.stderr)
    if named is not None:
        named.write()
        pushed = {entry.device for entry in chosen.entries}
        left = [one.device for one in chosen.fleet.devices if one.device not in pushed]
        lacking = f"; not pushed to {', '.join(left)}" if left else ""
        print(
            f"mdp: {chosen.path}: names {named.fleet.bundle} from now on{lacking}", file=sys.stderr
        )


def _require_fleet(fleet: Path | None) -> Path:
    if fleet is None:
        raise InputError("--fleet: expected a fleet file, or a registry's oci://HOST/NAME:TAG")
    return fleet


def _repository(reference: str, insecure: bool) -> Repository:
    return connect(parse_reference(reference), insecure=insecure)


def _push_to_registry(bundle: Path, repository: Repository, json: bool) -> None:
    with _bar(repository.reference.host) as bar:
        stored = push_to_registry(Bundle.open(bundle), repository, bar)
    _tell_stored(repository.reference, stored, "sent", json)


def _tell_stored(path: object, stored: Stored, moved: str, json: bool) -> None:
    if json:
        console.print_json({"path": str(path), "stored": stored})
        return
    amount = f"{stored.moved_bytes:,} of {stored.total_bytes:,} bytes {moved}"
    print(f"{path}: bundle {_format_version(stored.version)}, {amount}: {stored.reference}")


def pull(
    device: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE|oci://...", help="A device of the fleet file; or oci://HOST/NAME:TAG."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    fleet: SomeFleet = None,
    key: KeyFile = None,
    device_part: Annotated[
        list[str] | None,
        typer.Option("--device", help="Of a registry: this device's model alone; repeatable."),
    ] = None,
    models: Annotated[
        bool,
        typer.Option(
            "--models/--no-models", help="Of a registry: a gateway or client needs no model."
        ),
    ] = True,
    bundle_key: Annotated[
        Path | None, typer.Option(help="Of a registry: only a bundle signed with this public key.")
    ] = None,
    insecure: PlainHTTP = False,
    json: Json = False,
) -> None:
    """Write what a device serves now, or a bundle of a registry, or a device's part of one.

    From a registry, --out may be a folder that was pulled before: what it has is not fetched, and
    it is replaced once all is there and right. The tag is read once, and the printed digest names
    what was pulled from then on.

    Example: mdp bundle pull oci://registry.example/shelf/cifar10:1 --device n100 --out bundle/

    Exit codes: 0 fine, 2 bad input (also a wrong signature, no room), 3 the device or the registry
    does not give it, 1 unforeseen.
    """
    if is_reference(device):
        if device_part and not models:
            raise InputError("--device, --no-models: expected one of them, or none for all models")
        part = WantedPart(devices=device_part or (None if models else ()))
        signed_by = None if bundle_key is None else load_bundle_key(bundle_key)
        repository = _repository(device, insecure)
        with _bar(repository.reference.host) as bar:
            stored = pull_from_registry(
                repository, out, part=part, signed_by=signed_by, progress=bar
            )
        _tell_stored(out, stored, "fetched", json)
        return
    for option, given in (
        ("--device", device_part),
        ("--no-models", not models),
        ("--bundle-key", bundle_key),
        ("--insecure", insecure),
    ):
        if given:
            raise InputError(f"{option}: expected oci://HOST/NAME:TAG with it, got {device}")
    chosen = _Devices(_require_fleet(fleet), [device], key)
    with chosen.connect(chosen.entries[0]) as connected:
        version = connected.pull(out)
    if json:
        console.print_json({"path": str(out), "version": version})
        return
    print(f"{out}: {_format_version(version)}, as {device} serves it")


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
        lambda done: f"{done.device}: serves {_format_version(done.version)}",
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
    table = Table()
    for column in ("device", "serves", "previous", "reason"):
        # A truncated address is useless.
        table.add_column(column, overflow="fold")
    for row in rows:
        versions = [
            _format_version(version) if isinstance(version, Version) else ""
            for version in (row["serves"], row["previous"])
        ]
        table.add_row(str(row["device"]), *versions, str(row["error"]))
    return table


def _format_version(version: Version) -> str:
    return f"{version.name} {version.digest[:12]}"


def _format_push(pushed: Pushed) -> str:
    return (
        f"{pushed.device}: serves {_format_version(pushed.version)}, "
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
