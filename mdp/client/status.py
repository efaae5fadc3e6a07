"""One device of a fleet as it describes itself, or as far as a client can see it. Pure."""

from dataclasses import dataclass, field

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import FleetEntry
from mdp.protocol.messages import Status, answered_by


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
    counts: dict[str, int] = field(default_factory=dict)
    #: Requests that wait for its computing; None if it has not said.
    queued: int | None = None
    #: Where its own pictures come from and how that does, in words; empty if it has no source.
    source: str = ""

    @property
    def usable(self) -> bool:
        """Whether this device takes part in the next answer."""
        return self.state == "READY" and not self.reason.startswith("wrong ")


def device_status(
    entry: FleetEntry,
    status: Status | None,
    bundle: Bundle,
    *,
    silent: bool,
    refused: str | None = None,
) -> DeviceStatus:
    """What `status`, if there is one, says of `entry` to a client that holds `bundle`.

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
    return DeviceStatus(
        device=entry.device,
        address=entry.address,
        state=status.state,
        encrypted=encrypted,
        bundle=status.bundle,
        provider=status.provider,
        reason=_reason(entry, status, bundle),
        counts=status.counts,
        queued=status.queued,
        source=status.source,
    )


def _reason(entry: FleetEntry, status: Status, bundle: Bundle) -> str:
    changing = status.digest != bundle.digest and serves_too(status, bundle)
    if status.digest != bundle.digest and not changing:
        return (
            f"wrong bundle: serves {status.bundle} {status.digest[:12]}, expected "
            f"{bundle.manifest.name} {bundle.digest[:12]}"
        )
    if status.k != entry.k and not changing:
        return f"wrong sub-model: serves {status.k} ({status.device}), expected {entry.k}"
    wrong = [status.reason] if status.reason else []
    if changing:
        wrong.append(
            f"serves {status.bundle} {status.digest[:12]} by now, and this client's bundle until "
            "nobody asks for it: reload this client"
        )
    if status.fallback:
        wrong.append(f"runs on {status.provider}, not as planned")
    if entry.exposed:
        wrong.append("plain text over the network")
    return "; ".join(wrong)


def serves_too(status: Status, bundle: Bundle) -> bool:
    """Whether an agent counts answers made with `bundle`, as it does while it serves it."""
    return answered_by(bundle.digest) in status.counts
