"""`mdp fleet discover`: announced agents, and a fleet file of them."""

from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.discovery.announcements import DIGEST_DIGITS, FleetProposal, fleet_text, propose
from mdp.discovery.mdns import MAX_FOUND, listen
from mdp.errors import ConfigError, InferenceError, InputError
from mdp.files import write_new
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, relative_to
from mdp.formats.keys import PUBLIC, is_loopback, load_pair, load_public
from mdp.formats.packaged import bundle_by_name
from mdp.logs import quiet_libraries
from mdp.transport import public_key_of

#: Most listed announcements among those left out, as a flood would hide the rest.
MAX_LISTED = 20


def fleet_discover(
    bundle: Annotated[
        Path, typer.Option(callback=bundle_by_name, help="Bundle folder that the agents serve.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder with the agents' public key files, as for `mdp fleet new`."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="This client's secret key file, for the fleet file's `key`.")
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Listen on this IPv4 address of this machine only, e.g. 127.0.0.1."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long to listen.")] = 3.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the proposed fleet file, a new one; read it before use."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Machine-readable on stdout, nothing else.")
    ] = False,
) -> None:
    """List the agents that announce themselves (`mdp-agent run --announce`), and propose a fleet.

    Announcements are claims. No key is taken from one: an agent with a key gets an entry only if
    a public key file in --keys has the announced fingerprint.

    Example: mdp fleet discover --bundle bundle/ --keys keys/ --key keys/client.secret
    --out fleet.toml

    Exit codes: 0 at least one entry, 2 bad input, 3 nothing that could be proposed, 1 unforeseen.
    """
    quiet_libraries()
    opened = Bundle.open(bundle)
    if (keys is None) != (key is None):
        raise InputError("--keys and --key: expected both, or neither for plain text on loopback")
    if key is not None:
        load_pair(key, public_key_of)
    trusted = {} if keys is None else _public_keys(keys)
    found, more = listen(interface, seconds=seconds)
    on_loopback = interface is not None and is_loopback(f"tcp://{interface}:1")
    proposal = propose(opened, found, keys=trusted, on_loopback=on_loopback)
    fleet = None
    if proposal.entries:
        # Paths are relative to the file's folder.
        place = out or Path("fleet.toml")
        fleet = Fleet(
            bundle=relative_to(opened.path, place),
            key=None if key is None else relative_to(key, place),
            devices=list(proposal.entries),
        )
        if out is not None:
            write_new(out, fleet_text(fleet, proposal.left_out[:MAX_LISTED]), 0o666)
    written = out if fleet is not None else None
    if json:
        console.print_json(
            {
                "path": None if written is None else str(written),
                "devices": proposal.entries,
                "left_out": proposal.left_out,
                "absent": proposal.absent,
                "not_looked_at": more,
            }
        )
    else:
        _print(opened, proposal, more, written)
    raise typer.Exit(0 if proposal.entries else InferenceError.exit_code)


def _public_keys(folder: Path) -> dict[str, str]:
    """Stem -> key of every public key file in `folder`; raises ConfigError."""
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == PUBLIC)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return {file.stem: load_public(file) for file in files}


def _print(bundle: Bundle, proposal: FleetProposal, more: int, written: Path | None) -> None:
    print(f"agents of bundle {bundle.manifest.name} {bundle.digest[:DIGEST_DIGITS]}:")
    for entry in proposal.entries:
        how = "plain text" if entry.key is None else "its key is in --keys"
        print(f"  {entry.device} = {entry.address}, sub-model {entry.k}, {how}")
    for left in proposal.left_out[:MAX_LISTED]:
        print(f"  left out: {left.device} at {left.address}: {left.reason}")
    unlisted = len(proposal.left_out) - MAX_LISTED
    if unlisted > 0:
        print(f"  left out: {unlisted} more")
    if more:
        print(f"  {more} announcements beyond the first {MAX_FOUND} were not read")
    if proposal.absent:
        print(f"  not in the proposal: {', '.join(proposal.absent)}")
    if written is not None:
        entries = console.say_count(len(proposal.entries), "device")
        print(f"{written}: proposed, {entries}; check the addresses")


def add_to(app: typer.Typer) -> None:
    """Add the command to `mdp fleet`."""
    app.command("discover")(fleet_discover)
