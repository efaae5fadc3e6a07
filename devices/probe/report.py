"""A probed profile as tables, sentences and warnings. Pure."""

from collections.abc import Iterator

from mdp.formats.profile import DeviceProfile, LatencyPoint, NetworkPoint, Sustained, Timing
from mdp.load import is_busy

#: The device throttles if the last minute is slower than the first by more than this factor.
THROTTLED = 1.1
#: The probe is doubtful if a larger share of its points was disturbed.
MANY_BUSY = 0.1


def report(profile: DeviceProfile) -> Iterator[str]:
    """The table of medians and the conditions, line by line."""
    yield from _medians(profile)
    yield ""
    if profile.spin:
        yield "- threads spin while they wait: fast as long as nothing else uses its cores"
    record = profile.probe
    if record is not None and record.sustained is not None:
        yield f"- {throttling(record.sustained)}"
    if record is not None and record.load_temperature_c is not None:
        idle = record.idle_temperature_c
        before = "" if idle is None else f", {idle:g} before"
        yield f"- under load it is {record.load_temperature_c:g} degrees Celsius warm{before}"
    if profile.power_w is not None:
        yield f"- under load it takes {profile.power_w:g} W"


def _medians(profile: DeviceProfile) -> Iterator[str]:
    """A row for each encoder and network, a column for each way of running it."""
    cells: dict[str, dict[str, str]] = {}
    points: list[LatencyPoint | NetworkPoint] = [*profile.latency, *profile.networks]
    for point in points:
        busy = "*" if is_busy(point.others_cores) else ""
        cells.setdefault(_model(point), {})[_way(point, profile)] = f"{point.latency_ms:.3g}{busy}"
    ways = list(dict.fromkeys(_way(point, profile) for point in points))
    yield "Milliseconds of one run, median; * while other processes kept the machine busy."
    for number, way in enumerate(ways, start=1):
        yield f"  ({number}) {way}"
    numbers = [f"({number})" for number in range(1, len(ways) + 1)]
    yield _row("encoder: px/patch, width x depth", numbers)
    for encoder, row in cells.items():
        yield _row(encoder, [row.get(way, "") for way in ways])


def _encoder(point: LatencyPoint) -> str:
    return (
        f"{point.image_size}/{point.patch_size}, {point.embed_dim} x {point.depth}, "
        f"{point.num_heads} heads, MLP x {point.mlp_ratio:g}"
    )


def _model(point: LatencyPoint | NetworkPoint) -> str:
    if isinstance(point, NetworkPoint):
        return f"{point.name}, {point.image_size}"
    return _encoder(point)


def _way(point: Timing, profile: DeviceProfile) -> str:
    batch = f", {point.batch} pictures" if point.batch > 1 else ""
    return f"{_how(point)} on {point.provider or profile.provider}{batch}"


def _row(first: str, cells: list[str]) -> str:
    return f"{first:<40}" + "".join(f"{cell:>8}" for cell in cells)


def throttling(sustained: Sustained) -> str:
    """The result of the sustained load as a sentence."""
    ratio = sustained.last_minute_ms / sustained.first_minute_ms
    change = (
        f"{sustained.first_minute_ms:g} ms in the first minute, "
        f"{sustained.last_minute_ms:g} in the last of {sustained.minutes:g}"
    )
    if ratio > THROTTLED:
        return f"it throttles: {change}, {100 * (ratio - 1):.0f} % slower; plan with the slower"
    return f"it keeps its speed: {change}"


def _how(point: Timing) -> str:
    plural = "s" if point.threads > 1 else ""
    return f"{point.precision}, {point.runtime}, {point.threads} thread{plural}"


def warnings(profile: DeviceProfile) -> list[str]:
    """Limits of this profile's validity."""
    record = profile.probe
    if record is None:
        return []
    lines: list[str] = []
    points = len(profile.latency) + len(profile.networks)
    if not record.complete:
        lines.append(f"incomplete: {points} of {record.planned_points} points were measured")
    if record.busy_points > MANY_BUSY * points:
        lines.append(
            "the machine was not idle: other processes kept it busy during "
            f"{record.busy_points} of {points} points ({record.others_cores:g} cores in the "
            "median), which may be too slow: repeat the probe when nothing else runs"
        )
    lines += [f"left out: {what}: {why}" for what, why in record.dropped.items()]
    if profile.provenance["link"].method == "estimated":
        lines.append(
            "the link was not measured: --peer tcp://HOST:PORT of a running agent measures it"
        )
    return lines
