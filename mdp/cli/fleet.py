"""`mdp fleet`: make fleet files, and change them as devices come, break and leave."""

import difflib
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.cli import discover
from mdp.cli.answers import FleetFile, Json
from mdp.errors import InputError, PlanRefused
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import (
    NO_BUNDLE,
    Fleet,
    FleetEntry,
    absent_devices,
    new_entry,
    new_fleet,
    plain_text_entries,
)
from mdp.formats.fleet_edit import FleetFile as EditedFile
from mdp.formats.fleet_edit import accuracy_with, suggest_member
from mdp.formats.keys import PUBLIC, load_pair, load_public
from mdp.formats.packaged import bundle_by_name
from mdp.transport import public_key_of

fleet_app = console.new_app("Make and change fleet files.")

Keys = Annotated[
    Path | None,
    typer.Option(help="Folder with the agents' NAME.public (NAME-LABEL.public for replicas)."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the change, and write nothing.")]


@fleet_app.callback()
def _group() -> None:
    """Make and change fleet files."""


@fleet_app.command("new")
def fleet_new(
    device: Annotated[
        list[str],
        typer.Option(
            help="NAME=tcp://HOST:PORT, once per device; NAME/LABEL=... adds a replica of NAME."
        ),
    ],
    bundle: Annotated[
        Path | None,
        typer.Option(
            callback=bundle_by_name,
            help="Bundle folder that the agents serve, or the name of one of MDP's; none yet, for "
            "`mdp record`.",
        ),
    ] = None,
    keys: Keys = None,
    key: Annotated[
        Path | None, typer.Option(help="This client's secret key file, for the fleet file's `key`.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("fleet.toml"),
    json: Json = False,
) -> None:
    """Write fleet.toml: address and public key of each device of a bundle.

    A file that is there is not replaced: `mdp fleet add`, `replace` and `remove` change it, once it
    names a bundle; remove one without a bundle, and write it anew.

    Example: mdp fleet new --bundle bundle/ --device n100=tcp://10.0.0.8:7500 --keys keys/
    --key keys/client.secret --out fleet.toml

    Exit codes: 0 fine, 2 bad input, 1 unforeseen.
    """
    opened = None if bundle is None else Bundle.open(bundle)
    if opened is None and keys is None:
        raise InputError(f"--bundle: expected a bundle folder, or --keys and --key: {NO_BUNDLE}")
    if (keys is None) != (key is None):
        raise InputError("--keys and --key: expected both, or neither for plain text")
    if key is not None:
        load_pair(key, public_key_of)
    fleet = new_fleet(
        opened,
        device,
        out,
        public_key=lambda name: _public_key(keys, name),
        key=key,
        overwrite=False,
    )
    absent = [] if opened is None else absent_devices(opened, fleet)
    if json:
        console.print_json({"path": str(out), "devices": fleet.devices, "absent": absent})
        return
    use = (
        ", without a bundle yet: `mdp bundle push` names one"
        if opened is None
        else f" of bundle {opened.manifest.name}"
    )
    print(f"{out}: {console.say_count(len(fleet.devices), 'device')}{use}")
    if absent:
        print(f"  without {', '.join(absent)}: every answer will be partial")
    for entry in plain_text_entries(fleet):
        print(f"  {entry.device} has no key: expected --insecure, for plain text")


@fleet_app.command("add")
def fleet_add(
    fleet: FleetFile,
    device: Annotated[
        str, typer.Option(help="NAME=tcp://HOST:PORT; NAME/LABEL=... for a replica of NAME.")
    ],
    keys: Keys = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Add a device: one that the fleet lacks, or a replica of one.

    For a board that the bundle does not know, the refusal names the member that it should serve.

    Example: mdp fleet add --fleet fleet.toml --device n100/attic=tcp://10.0.0.9:7500 --keys keys/

    Exit codes: 0 fine, 2 bad input, 1 unforeseen.
    """
    before = EditedFile.read(fleet)
    name, separator, address = device.partition("=")
    own = name.partition("/")[0]
    if separator and before.bundle.manifest.plan.assignment_of(own) is None:
        _refuse_unknown(before, name, address)
    entry = new_entry(before.bundle, device, _public_key(keys, name))
    _check_key(before.fleet, entry)
    after = before.with_entry(entry)
    _finish(before, after, entry.device, dry_run=dry_run, json=json)
    if json or dry_run:
        return
    _print_start(after, entry, f"on {name}")
    print("  clients: Client.reload(); gateways read the file again within seconds")


@fleet_app.command("replace")
def fleet_replace(
    fleet: FleetFile,
    device: Annotated[
        str, typer.Option(help="NAME=tcp://HOST:PORT of the new board; NAME is in the fleet.")
    ],
    keys: Keys = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Put another board in a device's place: its address, and its key with --keys.

    Example: mdp fleet replace --fleet fleet.toml --device n100=tcp://10.0.0.12:7500 --keys keys/

    Exit codes: 0 fine, 2 bad input, 1 unforeseen.
    """
    before = EditedFile.read(fleet)
    name, _, address = device.partition("=")
    entry = before.entry(name)
    if not address:
        raise InputError(f"--device {device}: expected NAME=tcp://HOST:PORT")
    for other in before.fleet.devices:
        if other.address == address and other is not entry:
            raise InputError(f"--device {device}: {other.device} is at {address}")
    values: dict[str, str | list[str]] = {"address": address}
    if (key := _public_key(keys, name)) is not None:
        values["key"] = key
    after = before.with_values(name, values)
    _check_key(before.fleet, after.entry(name))
    _finish(before, after, name, dry_run=dry_run, json=json)
    if json or dry_run:
        return
    _print_start(after, after.entry(name), "on the new board")
    if keys is None and entry.keys:
        print("  its key is as before: with a key of its own, expected --keys")
    print("  clients: Client.reload(); gateways read the file again within seconds")


@fleet_app.command("remove")
def fleet_remove(
    fleet: FleetFile,
    device: Annotated[str, typer.Option(help="The device's name in the fleet file.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", "--force", help="Also where answers become less accurate.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove a device; refused where answers become less accurate by it, unless --anyway.

    Example: mdp fleet remove --fleet fleet.toml --device n100/attic

    Exit codes: 0 fine, 2 bad input, 4 answers would become less accurate, 1 unforeseen.
    """
    before = EditedFile.read(fleet)
    after = before.without(device)
    lost = before.fleet.members().keys() - after.fleet.members().keys()
    was, will = (accuracy_with(f.bundle, f.fleet.members()) for f in (before, after))
    if lost and not anyway and not dry_run and (was is None or will is None or will < was):
        raise PlanRefused(
            f"{device} is the only device of its sub-model: {_accuracy(before, after)}: expected "
            "--anyway, or first a device that takes its place"
        )
    _finish(before, after, device, dry_run=dry_run, json=json)
    if json or dry_run:
        return
    print(f"  clients: Client.reload(), then end the agent of {device}")


def _print_start(file: EditedFile, entry: FleetEntry, where: str) -> None:
    print(f"  {where}: put the bundle there, and run its agent with --device {entry.plan_device}")
    if entry.keys:
        words = ["mdp", "bundle", "push", str(file.bundle.path), entry.device]
        command = shlex.join([*words, "--fleet", str(file.path)])
        print(f"  or, if its agent serves another bundle with --allow-push: {command}")


def _refuse_unknown(file: EditedFile, name: str, address: str) -> None:
    """Raise InputError that names the member which another board should serve."""
    member, why = suggest_member(file.bundle, file.fleet)
    served = file.fleet.members().get(member.k)
    label = name.replace("/", "-")
    wanted = f"{member.device}/{label}" if served else member.device
    raise InputError(
        f"--device {name}={address}: the bundle has no device of that name; it helps most as "
        f"{wanted}={address}: {why}"
    )


def _check_key(fleet: Fleet, entry: FleetEntry) -> None:
    """Raise InputError for a device in plain text among encrypted ones."""
    if not entry.keys and any(other.keys for other in fleet.devices):
        raise InputError(
            f"--device {entry.device}: the other devices have keys: expected --keys, with "
            f"{_public_file(entry.device)} in it"
        )


def _public_file(name: str) -> str:
    return f"{name.replace('/', '-')}{PUBLIC}"


def _public_key(keys: Path | None, name: str) -> str | None:
    return None if keys is None else load_public(keys / _public_file(name))


def _finish(before: EditedFile, after: EditedFile, name: str, *, dry_run: bool, json: bool) -> None:
    """Write the change, or print it; says what it does to answers."""
    if not dry_run:
        after.write()
    members = [accuracy_with(f.bundle, f.fleet.members()) for f in (before, after)]
    if json:
        written = {"path": str(after.path), "device": name, "written": not dry_run}
        told = {"devices": after.fleet.devices, "expected_accuracy": members}
        console.print_json({**written, **told})
        return
    if dry_run:
        old, new = (file.text.splitlines(keepends=True) for file in (before, after))
        sys.stdout.writelines(difflib.unified_diff(old, new, str(before.path), str(after.path)))
    else:
        print(f"{after.path}: {console.say_count(len(after.fleet.devices), 'device')}")
    print(f"  {_accuracy(before, after)}")
    for k, names in after.fleet.members().items():
        if name in names and len(names) > 1:
            others = ", ".join(other for other in names if other != name)
            print(f"  sub-model {k} is also served by {others}")


def _accuracy(before: EditedFile, after: EditedFile) -> str:
    """Accuracies of the members of two fleets, in words."""
    was, will = (accuracy_with(f.bundle, f.fleet.members()) for f in (before, after))
    evaluation = after.bundle.manifest.evaluation
    if was is None or will is None or evaluation is None:
        return "how accurate answers then are was never measured"
    told = f"with every device, {will:.1%} of {evaluation.pictures:,} pictures are answered right"
    return told if was == will else f"{told}, {was:.1%} before"


discover.add_to(fleet_app)
