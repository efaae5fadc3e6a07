"""Checks of a fleet: files, devices, cameras, network."""

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from mdp.client.status import DeviceStatus, camera_faults
from mdp.client.sync import Client
from mdp.errors import ConfigError
from mdp.formats.bundle import FUSION, Bundle
from mdp.formats.fleet import PLAIN_TEXT, exposed
from mdp.requests.capture import DEFAULT_WITHIN_MS

TCP_TIMEOUT_S = 1.0
ROUND_TRIPS = 5
#: What an agent says of a source that works, unless its newest frame is old.
_WORKS = re.compile(r".+?: frame \d+, (\d+) ms old(?:; being recorded|; \d+ could not be read)*")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    ok: bool
    text: str


def examine(client: Client) -> Iterator[Finding]:
    """Check the bundle's files, then every device of the fleet."""
    yield from _bundle_findings(client.bundle)
    for entry in exposed(client.fleet):
        yield Finding(entry.device, False, f"{entry.address} is {PLAIN_TEXT}")
    statuses = client.status()
    faults = camera_faults(statuses, client.fleet, client.bundle)
    for status in statuses:
        yield _device_finding(status, has_fault=status.device in faults)
        if status.source:
            yield camera_finding(status.device, status.source)
    if any(status.usable for status in statuses) and all(s.state != "SILENT" for s in statuses):
        yield _round_trip_finding(client)


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
    text = f"{status.state} on {status.provider or 'no provider yet'}"
    text = f"{text}: {status.reason}" if status.reason else text
    return Finding(status.device, status.usable and not has_fault, text)


def camera_finding(device: str, source: str) -> Finding:
    """Whether a look has a frame of `source`, as a status describes it."""
    works = _WORKS.fullmatch(source)
    ok = works is not None and int(works[1]) <= DEFAULT_WITHIN_MS
    return Finding(f"{device}'s camera", ok, source)


def tcp_diagnosis(address: str) -> str:
    """Why there is no answer at `tcp://HOST:PORT`: no host, no listener, or no MDP agent."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), TCP_TIMEOUT_S):
            return f"{address} accepts connections but does not speak this protocol"
    except TimeoutError:
        return f"{address} does not answer within {TCP_TIMEOUT_S:g} s: device off, or a firewall"
    except ConnectionRefusedError as error:
        return f"{address}: {error.strerror}: no agent listens there"
    except (OSError, UnicodeError) as error:  # UnicodeError: no possible host name
        return f"{address}: {getattr(error, 'strerror', None) or error}"


def _round_trip_finding(client: Client) -> Finding:
    trips_ms = []
    for _ in range(ROUND_TRIPS):
        started_s = time.perf_counter()
        client.status()
        trips_ms.append((time.perf_counter() - started_s) * 1e3)
    text = f"status of all reachable devices in {min(trips_ms):.1f} ms, at best of {ROUND_TRIPS}"
    return Finding("network", True, text)
