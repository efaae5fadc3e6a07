"""`mdp status` and `mdp doctor`: devices, files, cameras and network of a fleet."""

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from mdp import console
from mdp.arguments import seconds
from mdp.cli.answers import FleetFile, Insecure, Json, KeyFile, open_client
from mdp.client.base import Options
from mdp.client.cameras import FleetCameras
from mdp.client.scenes import Suspicions
from mdp.client.status import DeviceStatus, camera_faults
from mdp.client.sync import Client
from mdp.errors import ConfigError, InferenceError
from mdp.formats.bundle import FUSION, Bundle
from mdp.formats.fleet import PLAIN_TEXT, absent_devices, plain_text_entries, read_devices
from mdp.requests.capture import DEFAULT_WITHIN_MS
from mdp.transport.greeting import GREETING_BYTES, NOT_ZMTP, PROBE, mechanism_of

TCP_TIMEOUT_S = 1.0
ROUND_TRIPS = 5
#: Between two statuses of a fleet that is waited for.
_ASK_AGAIN_S = 0.5
#: Columns of a terminal that folds nothing.
_ENDLESS = 100_000
#: What an agent says of a source that works, unless its newest frame is old.
_WORKS = re.compile(
    r".+?: frame \d+, (\d+) ms old(?:; being recorded|; \d+ could not be read|; masked)*"
)


def status(
    fleet: FleetFile,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Exit with 0 if any device can answer.")
    ] = False,
    wait: Annotated[
        str, typer.Option(help="Ask again until the exit code would be 0, at most so long: 60s.")
    ] = "0s",
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Show the status of every device of a fleet.

    Of a fleet without a bundle, which can only be recorded, it shows the cameras.

    Example: mdp status --fleet fleet.toml

    Exit codes: 0 every device of the bundle and the fleet can answer, 2 bad input, 3 one cannot
    (with --allow-partial: none can), 1 unforeseen.
    """
    until_s = time.monotonic() + seconds("--wait", wait)
    known = read_devices(fleet)
    absent: list[str] = []

    def fine(statuses: Sequence[DeviceStatus]) -> bool:
        usable = [status.usable for status in statuses]
        return any(usable) if allow_partial else all(usable) and not absent

    def ask_until_fine(ask: Callable[[], list[DeviceStatus]]) -> list[DeviceStatus]:
        # A device that the fleet file lacks does not come.
        hopeless, said = bool(absent) and not allow_partial, ""
        while not fine(found := ask()) and not hopeless and time.monotonic() < until_s:
            lacking = ", ".join(status.device for status in found if not status.usable)
            if lacking != said:
                print(f"mdp: waiting for {lacking}", file=sys.stderr, flush=True)
                said = lacking
            time.sleep(max(0.0, min(_ASK_AGAIN_S, until_s - time.monotonic())))
        return found

    if known.bundle:
        with open_client(fleet, key, insecure) as client:
            absent = absent_devices(client.bundle, client.fleet)
            statuses = ask_until_fine(client.status)
    else:
        with FleetCameras(known, Options(fleet=fleet, key=key)) as cameras:
            statuses = ask_until_fine(cameras.status)
    if json:
        console.print_json({"devices": statuses, "absent": absent})
    else:
        # No markup: an address or an agent's text may contain square brackets.
        out, table = Console(markup=False), status_table(statuses)
        if out.is_terminal and fits(table, out):
            out.print(table)
        else:
            for status in statuses:
                print(status_line(status))
        for status in statuses:
            if status.source:
                print(f"{status.device} looks at {status.source}")
        if absent:
            print(f"not in {fleet}: {', '.join(absent)}")
    raise typer.Exit(0 if fine(statuses) else InferenceError.exit_code)


def status_table(statuses: Sequence[DeviceStatus]) -> Table:
    """Devices with their states and errors."""
    table = Table()
    warm = any(status.temperature_c is not None for status in statuses)
    columns = ("device", "address", "state", "bundle", "provider", "answered", "reason")
    for column in columns + ("°C",) * warm:
        # Folded, as a truncated address is useless.
        table.add_column(column, overflow="fold")
    for status in statuses:
        table.add_row(
            status.device,
            status.address,
            status.state,
            status.bundle or "",
            _short(status.provider),
            str(status.counts.get("answered", "")),
            status.reason,
            *(["" if status.temperature_c is None else f"{status.temperature_c:.0f}"] * warm),
        )
    return table


def fits(table: Table, out: Console) -> bool:
    """Tell whether a table is shown without folding a text."""
    return out.measure(table, options=out.options.update(width=_ENDLESS)).maximum <= out.width


def status_line(status: DeviceStatus) -> str:
    """A device with its state and errors, for a narrow terminal, a pipe or a file."""
    parts = [f"{status.device}: {status.state} at {status.address}"]
    if status.bundle:
        parts.append(f"{status.bundle} on {_short(status.provider)}")
    if "answered" in status.counts:
        parts.append(f"answered {status.counts['answered']}")
    if status.temperature_c is not None:
        parts.append(f"{status.temperature_c:.0f} °C")
    line = ", ".join(parts)
    return f"{line}: {status.reason}" if status.reason else line


def _short(provider: str | None) -> str:
    return (provider or "").replace("ExecutionProvider", "")


def doctor(
    fleet: FleetFile, key: KeyFile = None, insecure: Insecure = False, json: Json = False
) -> None:
    """Check files, connections, bundles and providers of a fleet.

    Of a fleet without a bundle, which can only be recorded, it takes a picture of every camera.

    Example: mdp doctor --fleet fleet.toml

    Exit codes: 0 all well, 2 bad input, 3 something is wrong, 1 unforeseen.
    """
    known = read_devices(fleet)
    if known.bundle:
        with open_client(fleet, key, insecure) as client:
            findings = list(examine(client))
    else:
        with FleetCameras(known, Options(fleet=fleet, key=key)) as cameras:
            findings = list(examine_cameras(cameras))
    if json:
        console.print_json({"findings": findings})
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.ok else 'PROBLEM'} {finding.subject}: {finding.text}")
    raise typer.Exit(0 if all(finding.ok for finding in findings) else InferenceError.exit_code)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    ok: bool
    text: str


def examine(client: Client) -> Iterator[Finding]:
    """Check the bundle's files, then every device of the fleet."""
    yield from _bundle_findings(client.bundle)
    for entry in plain_text_entries(client.fleet):
        yield Finding(entry.device, False, f"{entry.address} is {PLAIN_TEXT}")
    statuses = client.status()
    faults = camera_faults(statuses, client.fleet, client.bundle)
    for status in statuses:
        yield _device_finding(status, has_fault=status.device in faults)
        if status.source:
            yield camera_finding(status.device, status.source)
    if any(status.usable for status in statuses) and all(s.state != "SILENT" for s in statuses):
        yield _round_trip_finding(client)


def examine_cameras(cameras: FleetCameras) -> Iterator[Finding]:
    """Check every device of a fleet without a bundle, and that its camera can be recorded."""
    statuses, scene = cameras.status(), cameras.take()
    for status in statuses:
        yield _device_finding(status, has_fault=False)
        if not status.usable:
            continue
        if status.source:
            yield camera_finding(status.device, status.source)
        picture = scene.pictures.get(status.device)
        text = (
            scene.missing.get(status.device, "") if picture is None else f"{len(picture):,} bytes"
        )
        yield Finding(f"{status.device}'s picture", picture is not None, text)
    for text in Suspicions().of(scene.pictures):
        yield Finding("pictures", False, text)


def _bundle_findings(bundle: Bundle) -> Iterator[Finding]:
    for name in bundle.manifest.files:
        # A client needs the fusion weights only; models may be on the devices alone.
        if name != FUSION and not (bundle.path / name).exists():
            continue
        try:
            bundle.verified(name)
            yield Finding(name, True, "hash as in the manifest")
        except ConfigError as error:
            yield Finding(name, False, str(error))
    if bundle.manifest.evaluation is None:
        yield Finding("manifest.json", False, "never evaluated: run mdp-partition evaluate --write")


def _device_finding(status: DeviceStatus, *, has_fault: bool) -> Finding:
    if status.state == "UNREACHABLE":
        return Finding(status.device, False, tcp_diagnosis(status.address))
    if status.state == "REFUSED":
        return Finding(status.device, False, f"{status.address}: {status.reason}")
    text = f"{status.state} on {status.provider}" if status.provider else status.state
    text = f"{text}: {status.reason}" if status.reason else text
    return Finding(status.device, status.usable and not has_fault, text)


def camera_finding(device: str, source: str) -> Finding:
    """Tell whether a look has a frame of `source`, as a status describes it."""
    works = _WORKS.fullmatch(source)
    ok = works is not None and int(works[1]) <= DEFAULT_WITHIN_MS
    return Finding(f"{device}'s camera", ok, source)


def tcp_diagnosis(address: str) -> str:
    """The reason for no connection to `tcp://HOST:PORT`: no host, listener, or MDP agent."""
    parts = urlsplit(address)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or 0), TCP_TIMEOUT_S
        ) as peer:
            return f"{address} {_greeting_diagnosis(peer)}"
    except TimeoutError:
        return f"{address} does not answer within {TCP_TIMEOUT_S:g} s: device off, or a firewall"
    except ConnectionRefusedError as error:
        return f"{address}: {error.strerror}: no agent listens there"
    except (OSError, UnicodeError) as error:  # UnicodeError: no possible host name
        return f"{address}: {getattr(error, 'strerror', None) or error}"


def _greeting_diagnosis(peer: socket.socket) -> str:
    """The kind of a listener that gives no connection, by what it says in reply to a greeting.

    The kernel accepts connections for a process that is frozen.
    """
    try:
        peer.sendall(PROBE)
        said = peer.recv(GREETING_BYTES)
    except TimeoutError:
        return "accepts connections and says nothing: frozen, or no agent"
    except OSError:
        said = b""
    if not said or mechanism_of(said) == NOT_ZMTP:
        return "accepts connections but does not speak this protocol"
    return "speaks this protocol, but let no client in so far: overloaded, or just started"


def _round_trip_finding(client: Client) -> Finding:
    trips_ms = []
    for _ in range(ROUND_TRIPS):
        started_s = time.perf_counter()
        client.status()
        trips_ms.append((time.perf_counter() - started_s) * 1e3)
    text = f"status of all reachable devices in {min(trips_ms):.1f} ms, at best of {ROUND_TRIPS}"
    return Finding("network", True, text)
