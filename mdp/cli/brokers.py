"""Options of commands that speak to an MQTT broker."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mdp.errors import ConfigError, InputError
from mdp.files import read_secret
from mdp.formats.keys import host_and_port

#: Brokers' usual ports, without and with TLS.
PORT, TLS_PORT = 1883, 8883
#: The environment's names of user and password.
USER, PASSWORD = "MDP_MQTT_USER", "MDP_MQTT_PASSWORD"
_MAX_LOGIN_BYTES = 4096
ADDRESS = f"HOST or HOST:PORT; port {PORT}, with --ca {TLS_PORT}."
Login = Annotated[
    Path | None,
    typer.Option(
        help="File with the user in its first line and the password in its second; else "
        f"{USER} and {PASSWORD} of the environment."
    ),
]
Authority = Annotated[
    Path | None, typer.Option(help="PEM file of the broker's certificate authority, for TLS.")
]


def usual_port(ca: Path | None) -> int:
    """The port of a broker that is asked with TLS, where there is a `ca`, or without."""
    return PORT if ca is None else TLS_PORT


def broker_address(text: str, port: int) -> tuple[str, int]:
    """Host and port of `HOST` or `HOST:PORT`; raises InputError."""
    named = f"{text}:{port}" if text.endswith("]") or ":" not in text else text
    try:
        host, found = host_and_port(named)
    except InputError:
        found = 0
    if not found:
        raise InputError(f"--broker {text}: expected HOST, HOST:PORT or [IPV6]:PORT")
    return host, found


def read_login(path: Path | None) -> tuple[str, str] | None:
    """User and password from a file that only its owner can read, or from the environment.

    None if neither names a user. Raises ConfigError.
    """
    if path is None:
        user = os.environ.get(USER, "")
        return (user, os.environ.get(PASSWORD, "")) if user else None
    try:
        lines = read_secret(path, _MAX_LOGIN_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8") from error
    if len(lines) != 2 or not lines[0]:
        raise ConfigError(f"{path}: expected two lines, the user and the password")
    return lines[0], lines[1]
