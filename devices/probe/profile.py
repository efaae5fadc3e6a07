"""Makes a profile of measurements. Pure."""

import platform
import statistics
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from devices.probe.link import MeasuredLink
from devices.probe.measure import ON_PROCESSOR, EncoderRun
from devices.probe.run import ProbeResult
from devices.probe.schedule import Point, best_provider, consistent, describe_run
from mdp.errors import AgentError
from mdp.formats.profile import DeviceProfile, NetworkLink, ProbeRecord, Provenance, Sustained

#: A link that was not measured: gigabit Ethernet, as in the shipped profiles.
DEFAULT_LINK = NetworkLink(bandwidth_bps=940e6, round_trip_s=0.0005)
DEFAULT_AVAILABILITY = 0.98
#: Share of the free memory that a sub-model may take.
MEMORY_SHARE = 0.5
MIN_POINTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """The system's report of itself."""

    name: str
    date: str
    processor: str
    virtual: bool
    cores: int
    available_bytes: int | None
    idle_temperature_c: float | None


def profile_of(
    result: ProbeResult, device: SystemReport, link: MeasuredLink | None
) -> DeviceProfile:
    """The profile of the measurements so far; raises AgentError for fewer than MIN_POINTS."""
    points, left_out = consistent(result.points)
    networks, networks_left_out = consistent(result.networks)
    left_out += networks_left_out
    if len(points) < MIN_POINTS:
        raise AgentError(
            f"{len(points)} points were measured, a profile needs {MIN_POINTS}: none is written"
        )
    provider = best_provider(points)
    own = [point for point in points if point.provider == provider]
    threads = max(point.threads for point in own)
    dropped = result.dropped | {f"point {n}": text for n, text in enumerate(left_out, start=1)}
    power_w = result.load.power_w if result.load else None
    provenance = _provenance(result, device, link, threads)
    if power_w:
        provenance["power_w"] = Provenance(
            method="measured",
            source=f"{_tool(result, device)}: average while {_shape(result.load_run)} ran",
        )
    if networks:
        provenance["networks"] = provenance["latency"]
    return DeviceProfile(
        name=device.name,
        kind=_kind(provider),
        provider=provider,
        threads=threads,
        memory_bytes=int(MEMORY_SHARE * (device.available_bytes or 1 << 30)),
        link=DEFAULT_LINK
        if link is None
        else NetworkLink(
            bandwidth_bps=_digits(link.bandwidth_bps),
            round_trip_s=_digits(link.round_trip_s),
            round_trip_p90_s=_digits(link.p90_s),
        ),
        latency=[_lean(point, provider) for point in points],
        networks=[_lean(point, provider) for point in networks],
        provenance=provenance,
        power_w=power_w or None,
        availability=DEFAULT_AVAILABILITY,
        spin=result.spin,
        probe=_record(result, device, dropped, len(points) + len(networks)),
    )


def _kind(provider: str) -> Literal["cpu", "gpu", "arm"]:
    if provider not in ON_PROCESSOR:
        return "gpu"
    return "arm" if platform.machine().lower().startswith(("arm", "aarch")) else "cpu"


def _lean(point: Point, provider: str) -> Point:
    """Without the provider where it is the profile's."""
    return replace(point, provider=None) if point.provider == provider else point


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _tool(result: ProbeResult, device: SystemReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"mdp-agent probe with {versions} on {device.processor}, {device.date}"


def _provenance(
    result: ProbeResult, device: SystemReport, link: MeasuredLink | None, threads: int
) -> dict[str, Provenance]:
    free = (
        f"half of the {device.available_bytes / 1e9:.1f} GB that were free when probed"
        if device.available_bytes
        else "512 MiB, as the free memory is not known"
    )
    busy = result.busy
    disturbed = f"; {busy} of them while other processes kept the machine busy" if busy else ""
    if result.shared:
        disturbed = "; beside other processes on the same machine, as it will be used"
    virtual = ", a virtual machine" if device.virtual else ""
    return {
        "threads": _as_estimate(f"the most threads that were measured, of {device.cores} cores"),
        "memory_bytes": _as_estimate(f"a judgement: {free}"),
        "availability": _as_estimate("a judgement, not a statistic: always on, seldom restarted"),
        "link": _link_provenance(link, device),
        "latency": Provenance(
            method="measured",
            source=(
                f"{_tool(result, device)}{virtual}: medians of {len(result.measured)} runs of "
                f"models with random weights, batch 1 unless said{disturbed}"
            ),
        ),
    }


def _as_estimate(source: str) -> Provenance:
    return Provenance(method="estimated", source=source)


def _link_provenance(link: MeasuredLink | None, device: SystemReport) -> Provenance:
    if link is None:
        return _as_estimate(
            "not measured: gigabit Ethernet less framing, 940 Mbit/s, and 0.5 ms for an empty "
            "message there and back; --peer measures it"
        )
    return Provenance(
        method="measured",
        source=(
            f"mdp-agent probe to the agent at {link.peer}, {device.date}: median round trip of an "
            f"empty message (p10 {link.p10_s * 1e3:.3g}, p90 {link.p90_s * 1e3:.3g} ms), and crops "
            f"of {link.request_bytes} bytes sent there; the way back is taken to be as fast"
        ),
    )


def _record(
    result: ProbeResult, device: SystemReport, dropped: dict[str, str], points: int
) -> ProbeRecord:
    others = [m.others_cores for m in result.measured.values() if m.others_cores is not None]
    return ProbeRecord(
        complete=result.complete,
        date=device.date,
        processor=device.processor,
        cores=device.cores,
        system=f"{platform.system()} {platform.machine()}",
        versions=result.versions,
        planned_points=max(result.planned, points),
        busy_points=result.busy,
        others_cores=round(statistics.median(others), 2) if others else None,
        sustained=_long_load(result),
        idle_temperature_c=device.idle_temperature_c,
        load_temperature_c=result.load.temperature_c if result.load else None,
        dropped=dropped,
    )


#: A shorter load shows no throttling, and is not recorded as a test for it.
MIN_SUSTAINED_S = 180.0


def _long_load(result: ProbeResult) -> Sustained | None:
    load = result.load
    if load is None or result.load_run is None or load.seconds < MIN_SUSTAINED_S:
        return None
    return Sustained(
        shape=_shape(result.load_run),
        minutes=round(load.seconds / 60, 1),
        first_minute_ms=load.first_ms,
        last_minute_ms=load.last_ms,
    )


def _shape(run: EncoderRun | None) -> str:
    if run is None:
        return "nothing"
    return f"{describe_run(run)}, {run.spec.precision} in {run.runtime}, {run.threads} threads"
