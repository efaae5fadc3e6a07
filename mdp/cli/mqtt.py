"""`mdp mqtt`: what a fleet sees and how its devices are, for Home Assistant and others."""

import signal
import sys
import threading
import time
from typing import Annotated

import typer

from mdp import console
from mdp.arguments import seconds
from mdp.cli import answers, brokers
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.errors import InputError
from mdp.extras import MQTT, install, missing
from mdp.formats.fleet import FLEET_NAME_FORM, PLAIN_TEXT, is_fleet_name
from mdp.formats.keys import is_local
from mdp.logs import quiet_libraries
from mdp.requests.deadline import check_deadline_ms

#: No more answers a second than ten.
LEAST_EVERY_S = 0.1


def mqtt(
    fleet: answers.FleetFile,
    broker: Annotated[str, typer.Option(help=brokers.ADDRESS)],
    login: brokers.Login = None,
    ca: brokers.Authority = None,
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

    Exit codes: 0 told to end, 2 bad input, 5 the broker refuses the login, 130 interrupted,
    1 unforeseen.
    """
    quiet_libraries()
    if module := missing(MQTT):
        raise InputError(f"{module} is not installed; mdp mqtt needs it: {install('mqtt')}")
    # Loading paho takes a while, which no other command needs.
    from mdp.mqtt.bridge import Bridge
    from mdp.mqtt.broker import Broker, Place
    from mdp.mqtt.messages import OFFLINE, Topics

    check_deadline_ms(deadline_ms, "--deadline-ms")
    if (every_s := seconds("--every", every)) < LEAST_EVERY_S:
        raise InputError(f"--every: expected at least {LEAST_EVERY_S:g}s, got {every!r}")
    if name is not None and not is_fleet_name(name):
        raise InputError(f"--name {name}: expected {FLEET_NAME_FORM}")
    host, port = brokers.broker_address(broker, brokers.usual_port(ca))
    place = Place(host=host, port=port, login=brokers.read_login(login), ca=ca)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with answers.open_client(fleet, key, insecure, fusion, cascade) as client:
        topics = Topics(name or client.bundle.manifest.name, ())
        if ca is None and not is_local(host):
            print(f"mdp: WARNING: broker {place} is {PLAIN_TEXT}", file=sys.stderr)
        root = f"mdp/{topics.name}"
        fresh = threading.Event()
        kept = Broker(
            place,
            will=(topics.availability, OFFLINE),
            own=topics.discovery_filter,
            former=lambda topic, content: bridge.on_former(topic, content),
            connected=fresh.set,
            report=answers.say,
        )
        bridge = Bridge(client, fleet, topics.name, kept, answers.say)
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
