"""`mdp keys`: make the keys with which clients and agents know each other."""

from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.formats.keys import PUBLIC, SECRET, new_keys
from mdp.transport import new_pair

keys_app = console.new_app("Make the keys with which clients and agents know each other.")


@keys_app.callback()
def _group() -> None:
    """Make the keys with which clients and agents know each other."""


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Option(help="Whose keys: a device's name, or a client's.")],
    out: Annotated[Path, typer.Option(help="Folder for both files.")] = Path("keys"),
    json: Annotated[
        bool, typer.Option("--json", help="Machine-readable on stdout, nothing else.")
    ] = False,
) -> None:
    """Write NAME.secret, which stays on this machine, and NAME.public, to be copied.

    Example: mdp keys new --out keys --name raspberry-pi-5

    Exit codes: 0 fine, 2 bad input (also if the files exist), 1 unforeseen.
    """
    made = new_keys(out, name, new_pair)
    secret, public = out / f"{name}{SECRET}", out / f"{name}{PUBLIC}"
    if json:
        content = {"secret_file": str(secret), "public_file": str(public), "public": made.public}
        console.print_json(content)
        return
    print(f"{secret}: stays on this machine, readable by its owner only")
    print(f"{public}: {made.public}")


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `app`."""
    app.add_typer(keys_app, name="keys")
