"""`mdp keys`: make keys of clients and agents."""

from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.cli.answers import Json, show_pair
from mdp.formats.keys import new_keys
from mdp.transport import new_pair

keys_app = console.new_app("Make keys of clients and agents.")


@keys_app.callback()
def _group() -> None:
    """Make keys of clients and agents."""


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


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(keys_app, name="keys")
