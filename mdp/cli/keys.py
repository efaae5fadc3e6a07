"""`mdp keys`: make, rotate and revoke keys of clients and agents."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from mdp import console
from mdp.cli.answers import FleetFile, Json, show_pair
from mdp.client.status import DeviceStatus
from mdp.client.sync import Client
from mdp.errors import InferenceError, InputError
from mdp.files import write_toml
from mdp.formats.fleet import Fleet, FleetEntry, relative_to
from mdp.formats.fleet_edit import FleetFile as EditedFile
from mdp.formats.keys import (
    PUBLIC,
    SECRET,
    allow,
    load_pair,
    load_public,
    new_keys,
    next_name,
    revoke,
)
from mdp.transport import new_pair, public_key_of

#: How long agents have to answer a client with a new key.
ANSWER_S = 10.0
_NO_ANSWER = ("UNREACHABLE", "REFUSED", "SILENT")

keys_app = console.new_app("Make, rotate and revoke keys of clients and agents.")


@keys_app.callback()
def _group() -> None:
    """Make, rotate and revoke keys of clients and agents."""


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Option(help="A device's name, or a client's.")],
    out: Annotated[Path, typer.Option(help="Folder for both files.")] = Path("keys"),
    json: Json = False,
) -> None:
    """Write NAME.secret, which stays on this machine, and NAME.public, to be copied.

    Example: mdp keys new --out keys --name raspberry-pi-5

    Exit codes: 0 fine, 2 bad input (also if the files exist), 1 unforeseen.
    """
    made = new_keys(out, name, new_pair)
    show_pair(out, name, made.public, made.public, json)


@keys_app.command("allow")
def keys_allow(
    public: Annotated[Path, typer.Option(help="The client's public key file, NAME.public.")],
    clients: Annotated[Path, typer.Option(help="The agents' --clients, a folder on the device.")],
    record: Annotated[
        bool, typer.Option("--record", help="It may fetch pictures of the camera.")
    ] = False,
    push: Annotated[bool, typer.Option("--push", help="It may push and fetch bundles.")] = False,
    mask: Annotated[
        bool, typer.Option("--mask", help="It may change what of the pictures leaves the device.")
    ] = False,
    json: Json = False,
) -> None:
    """Let a client in, with rights in NAME.limits; those that it has already stay.

    Running agents read the folder again within some two seconds.

    Example: mdp keys allow --public keys/client.public --clients clients/ --record --push

    Exit codes: 0 fine, 2 bad input (no public key, or another key of that name), 1 unforeseen.
    """
    asked = {"record": record, "push": push, "mask": mask}
    limits = allow(clients, public, {right: True for right, wanted in asked.items() if wanted})
    rights = [right for right in asked if getattr(limits, right)]
    if json:
        console.print_json({"client": public.stem, "path": str(clients), "rights": rights})
        return
    print(f"{clients / public.name}: may ask{''.join(f', {right}' for right in rights)}")


@keys_app.command("rotate")
def keys_rotate(
    fleet: FleetFile,
    device: Annotated[
        str | None, typer.Option(help="Rotate this device's key, not this client's own.")
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="With --device: its new public key file, the first time.")
    ] = None,
    json: Json = False,
) -> None:
    """Replace a key in two calls, between which the old and the new one are accepted.

    The first call writes the client's new pair beside the old one, or the device's new key into
    the fleet file. The second asks the agents with the new key alone, and keeps only that if they
    answer; otherwise nothing changes.

    Example: mdp keys rotate --fleet fleet.toml --device n100 --public keys/n100-2.public

    Exit codes: 0 fine, 2 bad input, 3 an agent does not answer with the new key, 1 unforeseen.
    """
    file = EditedFile.read(fleet)
    if public is not None and device is None:
        raise InputError("--public: expected --device with it")
    if device is None:
        told = _rotate_client(file)
    elif public is not None:
        told = _begin_device(file, device, load_public(public))
    else:
        told = _end_device(file, device)
    if json:
        console.print_json({"path": str(fleet), "next": told})
        return
    print(*told, sep="\n")


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Option(help="The client's name: the stem of its file.")],
    clients: Annotated[Path, typer.Option(help="The agents' --clients, a folder on the device.")],
    json: Json = False,
) -> None:
    """Allow a client no more: rename its file to NAME.revoked, and any other with the same key.

    Running agents read the folder again within some two seconds, and end its connections.

    Example: mdp keys revoke --name office --clients clients/

    Exit codes: 0 fine, 2 bad input (also if there is no such client), 1 unforeseen.
    """
    if not clients.is_dir():
        raise InputError(f"--clients {clients}: expected a folder")
    renamed = revoke(clients, name)
    left = sorted(file.stem for file in clients.glob(f"*{PUBLIC}"))
    if json:
        console.print_json({"revoked": [str(path) for path in renamed], "allowed": left})
        return
    for path in renamed:
        print(f"{path}: revoked; agents end its connections within seconds")
    print(f"  still allowed: {', '.join(left) or 'nobody'}")


def _rotate_client(file: EditedFile) -> list[str]:
    """One step of this client's rotation; returns what was done, and what is to do."""
    if file.fleet.key is None:
        raise InputError(f"{file.path}: expected `key`, this client's secret key file")
    folder = file.path.parent
    old = folder / file.fleet.key
    load_pair(old, public_key_of)
    name = next_name(old)
    new = old.with_name(f"{name}{SECRET}")
    if not new.exists():
        new_keys(old.parent, name, new_pair)
        return [
            f"{new}: new, beside {old.name}",
            f"  copy {name}{PUBLIC} into every agent's --clients, then run this again",
        ]
    _require_answers(file, new, file.fleet.devices)
    file.with_client_key(relative_to(new, file.path)).write()
    return [
        f"{file.path}: every agent answers {new.name}, which is the `key` now",
        "  clients: Client.reload(); gateways read the file again within seconds",
        f"  then on each device: mdp keys revoke --name {old.stem} --clients ...",
    ]


def _begin_device(file: EditedFile, device: str, key: str) -> list[str]:
    entry = file.entry(device)
    if len(entry.keys) != 1 or key in entry.keys:
        found = ["none", "this one", "two"][len(entry.keys)]
        raise InputError(f"--device {device}: expected one other `key` in {file.path}, is {found}")
    file.with_values(device, {"key": [*entry.keys, key]}).write()
    return [
        f"{file.path}: {device} may have either key",
        "  clients: Client.reload(); gateways read the file again within seconds",
        f"  then start {device}'s agent with its new --key, and run this again without --public",
    ]


def _end_device(file: EditedFile, device: str) -> list[str]:
    entry = file.entry(device)
    if len(entry.keys) != 2:
        raise InputError(
            f"--device {device}: expected --public, its new public key file: {file.path} has "
            f"{len(entry.keys)} key of it"
        )
    after = file.with_values(device, {"key": entry.keys[1]})
    own = None if file.fleet.key is None else file.path.parent / file.fleet.key
    _require_answers(file, own, [after.entry(device)])
    after.write()
    return [
        f"{file.path}: {device} answers with its new key, the old one is gone",
        "  clients: Client.reload(); gateways read the file again within seconds",
    ]


def _require_answers(file: EditedFile, key: Path | None, entries: Sequence[FleetEntry]) -> None:
    """Raise InferenceError unless the agents of all `entries` answer a client with `key`."""
    keyed = [entry for entry in entries if entry.keys]
    if not keyed:
        return
    fleet = Fleet(
        bundle=str(file.bundle.path.resolve()),
        key=None if key is None else str(key.resolve()),
        devices=keyed,
    )
    statuses: list[DeviceStatus] = []
    with TemporaryDirectory(prefix="mdp-keys-") as folder:
        path = Path(folder) / "fleet.toml"
        write_toml(path, fleet)
        with Client.connect(path, timeout_s=ANSWER_S) as client:
            statuses = client.status(timeout_s=ANSWER_S)
    failed = {each.device: each.reason for each in statuses if each.state in _NO_ANSWER}
    if failed:
        reasons = "; ".join(f"{device}: {reason}" for device, reason in failed.items())
        text = f"{file.path}: unchanged, as the new key gets no answer ({reasons})"
        raise InferenceError(text, failed)
