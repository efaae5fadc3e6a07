"""One device of a fleet as it describes itself, or as far as a client can see it. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import NamedTuple
from urllib.parse import urlsplit

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.protocol.messages import Status, answers_key
from mdp.requests.reason import SUSPECT, Reason, Suspicion


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device as it describes itself, or as far as it can be seen."""

    device: str
    address: str
    #: The agent's state, or UNREACHABLE, REFUSED or SILENT as the client sees it.
    state: str
    #: Whether this client speaks to it encrypted.
    encrypted: bool = False
    bundle: str | None = None
    provider: str | None = None
    #: What is wrong, in words; empty if nothing is.
    reason: str = ""
    #: Why it cannot serve this client: a code of docs/reference/reasons.md; empty if it can.
    code: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    #: Requests that wait for its computing; None if it has not said.
    queued: int | None = None
    #: Where its own pictures come from and how that does, in words; empty if it has no source.
    source: str = ""
    #: Why its camera is suspected: by the looks of any client in the last minute, which tell the
    #: agent, or by the agent itself; None if it is not.
    suspect: Suspicion | None = None
    #: Degrees Celsius of its warmest sensor; None if it has not said.
    temperature_c: float | None = None

    @property
    def usable(self) -> bool:
        """Tell whether this device takes part in the next answer."""
        return self.state == "READY" and not self.code


def device_status(
    entry: FleetEntry,
    status: Status | None,
    bundle: Bundle | None,
    *,
    silent: bool,
    refused: str | None = None,
) -> DeviceStatus:
    """Read what `status`, or its lack, says of `entry` to a client with `bundle`, or without one.

    `silent` tells a device that is connected, but has not answered; `refused` why one that is
    there cannot be connected to.
    """
    encrypted = entry.key is not None
    if status is None:
        state, reason = "UNREACHABLE", "no connection"
        if silent:
            state, reason = "SILENT", "connected, but does not answer"
        elif refused is not None:
            state, reason = "REFUSED", refused
        return DeviceStatus(
            device=entry.device,
            address=entry.address,
            state=state,
            encrypted=encrypted,
            reason=reason,
        )
    wrong = None if bundle is None else _wrong(status, bundle, entry.k)
    return DeviceStatus(
        device=entry.device,
        address=entry.address,
        state=status.state,
        encrypted=encrypted,
        bundle=status.bundle,
        provider=status.provider,
        reason="; ".join(_notes(entry, status, bundle)) if wrong is None else str(wrong),
        code="" if wrong is None else wrong.code,
        counts=status.counts,
        queued=status.queued,
        source=status.source,
        suspect=status.suspect,
        temperature_c=status.temperature_c,
    )


def unfit(status: Status, bundle: Bundle, k: int) -> Reason | None:
    """The reason that keeps an agent from serving sub-model `k` of `bundle`, or None."""
    if status.state != "READY":
        text = status.state + (f": {status.reason}" if status.reason else "")
        return Reason("not_ready", text)
    return _wrong(status, bundle, k)


def _wrong(status: Status, bundle: Bundle, k: int) -> Reason | None:
    if status.digest != bundle.digest:
        # While an agent changes over, what else it says is about the other bundle.
        if answers_key(bundle.digest) in status.counts:
            return None
        served = f"serves {status.bundle} {status.digest[:12]}"
        if not status.bundle:
            served = status.reason or "serves none"
        expected = f"expected {bundle.manifest.name} {bundle.digest[:12]}"
        return Reason("wrong_bundle", f"{served}, {expected}")
    if status.k != k:
        served = f"serves {status.k} ({status.device}), expected {k}"
        return Reason("wrong_submodel", served)
    return None


def _notes(entry: FleetEntry, status: Status, bundle: Bundle | None) -> Iterator[str]:
    if status.reason:
        yield status.reason
    if status.suspect is not None:
        yield f"camera: {SUSPECT[status.suspect]}"
    if bundle is not None and status.digest != bundle.digest:
        yield (
            f"serves {status.bundle} {status.digest[:12]} by now, and this client's bundle until "
            "nobody asks for it: reload this client"
        )
    if status.fallback:
        yield f"runs on {status.provider}, not as planned"
    if entry.is_exposed:
        yield "plain text over the network"


#: A status's source, before what it says of the newest frame.
_SOURCE = re.compile(r"(.+?): (?:no frame yet|frame \d+, )")


class _Claim(NamedTuple):
    """A device that plays a camera of a scene."""

    device: str
    camera: str
    source: str
    #: The stream's or, of a local source, the agent's.
    host: str | None
    is_stream: bool

    def conflict(self, other: "_Claim") -> str:
        """Reason why these two cannot both be right, for the status of the first; or empty."""
        same = (self.host, self.source) == (other.host, other.source)
        theirs = f"of {other.device}"
        if self.camera != other.camera and same:
            claimed = f"{self.source} is camera {self.camera}, and camera {other.camera} {theirs}"
            return f"{claimed}: expected a source for each"
        # A network camera has several streams.
        same |= self.is_stream and other.is_stream and self.host == other.host
        if self.camera == other.camera and not same:
            claimed = f"camera {self.camera} is {self.source}, and {other.source} {theirs}"
            return f"{claimed}: expected one source"
        return ""


def camera_faults(
    told: Sequence[DeviceStatus], fleet: Fleet, bundle: Bundle
) -> dict[str, list[str]]:
    """By device: which others claim its camera of a scene or its source, or that it has none.

    Where no agent has a source, the cameras' pictures are sent.
    """
    cameras = {a.k: a.camera for a in bundle.manifest.plan.assignments}
    claims = []
    for entry, status in zip(fleet.devices, told, strict=True):
        found, camera = _SOURCE.match(status.source), cameras[entry.k]
        if found is not None and camera is not None:
            is_stream = found[1].startswith(("rtsp://", "rtsps://"))
            host = urlsplit(found[1] if is_stream else entry.address).hostname
            claims.append(_Claim(entry.device, camera, found[1], host, is_stream))
    faults: dict[str, list[str]] = {}
    for one, other in permutations(claims, 2):
        if text := one.conflict(other):
            faults.setdefault(one.device, []).append(text)
    for entry, status in zip(fleet.devices, told, strict=True):
        camera = cameras[entry.k]
        if claims and camera is not None and status.usable and not status.source:
            faults[entry.device] = [f"camera {camera}: this agent has no source (--source)"]
    return faults


def with_camera_faults(
    told: Sequence[DeviceStatus], fleet: Fleet, bundle: Bundle
) -> list[DeviceStatus]:
    """`told`, with the faults of their cameras as reasons."""
    faults = camera_faults(told, fleet, bundle)
    return [
        replace(each, reason="; ".join([*filter(None, [each.reason]), *faults[each.device]]))
        if each.device in faults
        else each
        for each in told
    ]
