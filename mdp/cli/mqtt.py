"""`mdp mqtt`: what a fleet sees and how its devices are, for Home Assistant and others."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.arguments import seconds
from mdp.cli import answers
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.errors import ConfigError, InputError
from mdp.extras import MQTT, install, missing
from mdp.files import read_secret
from mdp.formats.fleet import FLEET_NAME_FORM, PLAIN_TEXT, is_fleet_name
from mdp.formats.keys import host_and_port, is_local
from mdp.logs import quiet_libraries
from mdp.requests.deadline import checked_deadline_ms

#: Brokers' usual ports, without and with TLS.
PORT, TLS_PORT = 1883, 8883
#: The environment's names of user and password.
USER, PASSWORD = "MDP_MQTT_USER", "MDP_MQTT_PASSWORD"
#: No more answers a second than ten.
LEAST_EVERY_S = 0.1
_MAX_LOGIN_BYTES = 4096


def mqtt(
    fleet: answers.FleetFile,
    broker: Annotated[
        str, typer.Option(help=f"HOST or HOST:PORT; port {PORT}, with --ca {TLS_PORT}.")
    ],
    login: Annotated[
        Path | None,
        typer.Option(
            help="File with the user in its first line and the password in its second; else "
            f"{USER} and {PASSWORD} of the environment."
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the broker's certificate authority, for TLS.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The fleet's name in topics; by default its bundle's.")
    ] = None,
    every: Annotated[str, typer.Option(help="From one look to the next: 1s, 200ms.")] = "1s",
    deadline_ms: answers.DeadlineMs = DEFAULT_DEADLINE_MS,
    fusion: answers.FusionChoice = "stacked",
    cascade: answers.Cascade = False,
    key: answers.KeyFile = None,
    insecure: answers.Insecure = False,
    json: answers.Json = False,
) -> None:
    """Publish what the devices' own cameras see, and every device's health, to an MQTT broker.

    Home Assistant finds all of it by itself. A broker that is away is awaited.

    Example: mdp mqtt --fleet fleet.toml --broker homeassistant.local --login login.txt

    Exit codes: 0 told to end, 2 bad input or a wrong password, 130 interrupted, 1 unforeseen.
    """
    quiet_libraries()
    if module := missing(MQTT):
        raise InputError(f"{module} is not installed; mdp mqtt needs it: {install('mqtt')}")
    # Loading paho takes a while, which no other command needs.
    from mdp.mqtt.bridge import Bridge
    from mdp.mqtt.broker import Broker, Place
    from mdp.mqtt.messages import OFFLINE, Topics

    checked_deadline_ms(deadline_ms)
    if (every_s := seconds("every", every)) < LEAST_EVERY_S:
        raise InputError(f"every: expected at least {LEAST_EVERY_S:g}s, got {every!r}")
    if name is not None and not is_fleet_name(name):
        raise InputError(f"--name {name}: expected {FLEET_NAME_FORM}")
    host, port = broker_address(broker, TLS_PORT if ca is not None else PORT)
    place = Place(host=host, port=port, login=read_login(login), ca=ca)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with answers.connected(fleet, key, insecure, fusion, cascade) as client:
        topics = Topics(name or client.bundle.manifest.name, ())
        if ca is None and not is_local(host):
            print(f"mdp: WARNING: broker {place} is {PLAIN_TEXT}", file=sys.stderr)
        root = f"mdp/{topics.name}"
        fresh = threading.Event()
        kept = Broker(
            place,
            will=(topics.availability, OFFLINE),
            own=topics.announced,
            connected=fresh.set,
            report=lambda text: print(f"mdp: {text}", file=sys.stderr, flush=True),
        )
        bridge = Bridge(client, fleet, topics.name, kept)
        with kept:
            due_s = time.monotonic()
            while not over.wait(max(0.0, due_s - time.monotonic())):
                due_s = max(due_s + every_s, time.monotonic())
                kept.check()
                if fresh.is_set():
                    fresh.clear()
                    if json:
                        event = {"event": "publishing", "broker": str(place), "topics": root}
                        console.print_json(event)
                    else:
                        print(f"publishing to {place} as {root}; Ctrl-C ends it", flush=True)
                    bridge.again()
                bridge.step(deadline_ms=deadline_ms, now=answers.utc_now)
        kept.check()


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
