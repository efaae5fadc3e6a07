"""DeviceProfile: what one device can do, and how each of its numbers was obtained."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, field
from msgspec.structs import replace

from mdp.errors import ConfigError, InputError
from mdp.files import NAME, NAME_FORM, Record, pattern, read_toml

#: A device's name is also its profile's file stem, a TOML key and part of a fleet entry's name.
MAX_NAME = 64
#: Boards of one kind that `NAME*N` may stand for.
MAX_BOARDS = 64
DeviceName = Annotated[str, pattern(NAME, NAME_FORM)]
#: onnxruntime's name of an execution provider, for instance `CPUExecutionProvider`.
ExecutionProvider = Annotated[str, Meta(pattern=r"^[A-Za-z]+ExecutionProvider\Z")]
#: That, or with runtime `openvino` its name of a device other than the processor.
OPENVINO_DEVICE = r"(GPU|NPU)(\.[0-9]+)?"
ProviderName = Annotated[str, Meta(pattern=rf"^([A-Za-z]+ExecutionProvider|{OPENVINO_DEVICE})\Z")]
PositiveInt = Annotated[int, Meta(gt=0, le=2**48)]
#: What `--threads` takes too; runtimes start as many as they are told.
MAX_THREADS = 1024
Threads = Annotated[int, Meta(ge=1, le=MAX_THREADS)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
#: How a sub-model's matrix products are computed. `int8` quantizes activations as they come,
#: `int8-static` by ranges that were seen on calibration pictures; both keep fp32 in between.
Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-static"]
#: The library that executes a sub-model on its device.
RuntimeName = Literal["onnxruntime", "openvino"]


def is_openvino_device(provider: str) -> bool:
    """Tell whether a provider is OpenVINO's name of a GPU or NPU."""
    return re.fullmatch(OPENVINO_DEVICE, provider) is not None


class NetworkLink(Record, frozen=True):
    """The network between client and device."""

    #: Decimal bits per second, in the slower direction.
    bandwidth_bps: PositiveFloat
    #: Seconds for an empty message to go there and back: the median.
    round_trip_s: NonNegativeFloat
    #: The 90th percentile of the same.
    round_trip_p90_s: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        if self.round_trip_p90_s is not None and self.round_trip_p90_s < self.round_trip_s:
            raise ValueError(
                f"contradicts itself: `round_trip_p90_s` {self.round_trip_p90_s:g} is less than "
                f"`round_trip_s` {self.round_trip_s:g}"
            )


class Timing(Record, frozen=True):
    """The way a model was run on the device, and its steady-state latency."""

    threads: Threads
    #: Median milliseconds of one run, of all pictures of the batch together.
    latency_ms: PositiveFloat
    precision: Precision = "fp32"
    runtime: RuntimeName = "onnxruntime"
    #: onnxruntime's execution provider, or OpenVINO's device; None is the profile's.
    provider: ProviderName | None = None
    #: Pictures per run.
    batch: PositiveInt = 1
    #: Spread: the 10th and 90th percentile of the same runs.
    p10_ms: PositiveFloat | None = None
    p90_ms: PositiveFloat | None = None
    #: From reading the model to being able to run it, the first run, and the time spent running,
    #: the first run included, before a run was as fast as in the steady state.
    start_up_ms: PositiveFloat | None = None
    first_run_ms: PositiveFloat | None = None
    warm_up_ms: NonNegativeFloat | None = None
    #: By how much the process grew, from before reading the model to its steady state.
    memory_bytes: NonNegativeFloat | None = None
    #: Cores that everything else on the machine kept busy meanwhile.
    others_cores: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        low, high = self.p10_ms or self.latency_ms, self.p90_ms or self.latency_ms
        if not low <= self.latency_ms <= high:
            raise ValueError(
                f"contradicts itself: `p10_ms` {low:g}, `latency_ms` {self.latency_ms:g} and "
                f"`p90_ms` {high:g} have to ascend"
            )
        if self.runtime != "openvino" and is_openvino_device(self.provider or ""):
            raise ValueError(
                f"contradicts itself: `provider` {self.provider} is a device of OpenVINO's, "
                f"`runtime` is {self.runtime}"
            )


class LatencyPoint(Timing, frozen=True, kw_only=True):
    """One measured ViT encoder: its shape, how it was run, and its steady-state latency."""

    image_size: PositiveInt
    patch_size: PositiveInt
    embed_dim: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_ratio: PositiveFloat


class NetworkPoint(Timing, frozen=True, kw_only=True):
    """One measured network of a family: its name, how it was run, and its steady-state latency."""

    #: timm's name.
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    image_size: PositiveInt


class Provenance(Record, frozen=True):
    """Source of a number: a measurement on the device, or an estimate."""

    method: Literal["measured", "estimated"]
    #: For `measured` the tool, its versions and the date; for `estimated` what it was derived from.
    source: Annotated[str, Meta(min_length=8)]


class Sustained(Record, frozen=True):
    """One encoder under load for minutes, to detect throttling."""

    shape: str
    minutes: PositiveFloat
    #: Median milliseconds of one run in the first and in the last minute.
    first_minute_ms: PositiveFloat
    last_minute_ms: PositiveFloat


class ProbeRecord(Record, frozen=True):
    """The conditions of an `mdp-agent probe`."""

    #: False if it was interrupted before all planned points were measured.
    complete: bool
    date: str
    processor: str
    cores: PositiveInt
    system: str
    versions: dict[str, str]
    planned_points: PositiveInt
    #: Points disturbed by other processes, which may be too slow.
    busy_points: Annotated[int, Meta(ge=0)]
    #: Median over the points, in cores; None if unknown.
    others_cores: NonNegativeFloat | None = None
    sustained: Sustained | None = None
    #: Degrees Celsius of the warmest sensor before the first point, and at most under load.
    idle_temperature_c: float | None = None
    load_temperature_c: float | None = None
    #: Runtime, provider and precision -> why it is not in the table.
    dropped: dict[str, str] = field(default_factory=dict)


class DeviceProfile(Record, frozen=True):
    """The measurements of one device. Every number has an entry in `provenance` under its name."""

    name: DeviceName
    kind: Literal["cpu", "gpu", "arm"]
    provider: ExecutionProvider
    #: Threads one inference may use.
    threads: Threads
    #: Memory a sub-model may take, in bytes.
    memory_bytes: PositiveInt
    link: NetworkLink
    latency: Annotated[list[LatencyPoint], Meta(min_length=3)]
    provenance: dict[str, Provenance]
    #: Watts while computing.
    power_w: PositiveFloat | None = None
    #: Networks of families other than plain ViT; none in older profiles.
    networks: list[NetworkPoint] = field(default_factory=list)
    #: Share of the time in which the device answers.
    availability: Fraction = 1.0
    #: Whether the cores are the agent's alone, so that its threads spin while they wait for each
    #: other. Points of several threads in onnxruntime were measured so.
    spin: bool = False
    probe: ProbeRecord | None = None

    def __post_init__(self) -> None:
        numbers = {"threads", "memory_bytes", "link", "latency", "availability"}
        if self.power_w is not None:
            numbers.add("power_w")
        if self.networks:
            numbers.add("networks")
        missing, unknown = numbers - self.provenance.keys(), self.provenance.keys() - numbers
        if missing:
            raise ValueError(f"`provenance` lacks {', '.join(sorted(missing))}")
        if unknown:
            raise ValueError(
                f"`provenance` names {', '.join(sorted(unknown))}, no number of this file"
            )
        for value in (self.link.bandwidth_bps, self.link.round_trip_s, self.availability):
            if not math.isfinite(value):
                raise ValueError("numbers have to be finite")
        for points in (self.latency, self.networks):
            if found := contradictions(points, self.provider):
                raise ValueError(found[0].text)


#: Measurements of one model contradict each other beyond this factor, as does a larger model that
#: is faster than a smaller one by more than it.
CONTRADICTION = 2.0


class Contradiction(NamedTuple):
    """Two contradicting points of a latency table, by their indices."""

    first: int
    second: int
    text: str


def contradictions(
    points: Sequence[LatencyPoint | NetworkPoint], provider: str
) -> list[Contradiction]:
    """Points that differ at most in size and contradict each other.

    The size of an encoder is its depth, that of a network its picture's. `provider` is the default
    of points.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, point in enumerate(points):
        alike.setdefault(_all_but_size(point, provider), []).append(place)
    found = []
    for places in alike.values():
        ascending = sorted(
            places, key=lambda place: (_size(points[place]), points[place].latency_ms)
        )
        for first, second in pairwise(ascending):
            if text := _contradiction(first, points[first], second, points[second]):
                found.append(Contradiction(first, second, text))
    return found


def _size(point: LatencyPoint | NetworkPoint) -> int:
    return point.depth if isinstance(point, LatencyPoint) else point.image_size


def _all_but_size(point: LatencyPoint | NetworkPoint, provider: str) -> tuple[object, ...]:
    run = (point.precision, point.runtime, point.provider or provider, point.threads, point.batch)
    if isinstance(point, NetworkPoint):
        return (point.name, *run)
    shape = (point.image_size, point.patch_size, point.embed_dim, point.num_heads, point.mlp_ratio)
    return (*shape, *run)


def _contradiction(
    first: int, small: LatencyPoint | NetworkPoint, second: int, large: LatencyPoint | NetworkPoint
) -> str:
    ratio = large.latency_ms / small.latency_ms
    same = _size(small) == _size(large)
    if ratio * CONTRADICTION >= 1 and not (same and ratio > CONTRADICTION):
        return ""
    if isinstance(small, LatencyPoint):
        table, model, sized = "latency", "encoder", "are {} and {} deep"
    else:
        table, model, sized = "networks", "network", f"are {small.name} at {{}} and {{}} px"
    what = f"measure the same {model}" if same else sized.format(_size(small), _size(large))
    return (
        f"contradicts itself: `{table}[{first}]` and `{table}[{second}]` {what} and say "
        f"{small.latency_ms:g} and {large.latency_ms:g} ms"
    )


def profiles_in_package() -> dict[str, Path]:
    """Name -> file of the shipped profiles."""
    installed = Path(str(resources.files("mdp"))) / "profiles"
    checkout = Path(__file__).resolve().parents[2] / "profiles"
    folder = installed if installed.is_dir() else checkout
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def read_profiles(named: Iterable[str]) -> list[DeviceProfile]:
    """Read profiles; `NAME*3` is three boards named NAME-1, NAME-2 and NAME-3.

    Raises ConfigError, and InputError for two devices of one name.
    """
    profiles: list[DeviceProfile] = []
    for name in named:
        path, star, number = name.rpartition("*")
        if not star:
            profiles.append(read_profile(name))
            continue
        if not (number.isdecimal() and 1 <= int(number) <= MAX_BOARDS):
            raise ConfigError(f"{name}: expected a number of boards from 1 to {MAX_BOARDS} after *")
        profile = read_profile(path)
        for board in range(1, int(number) + 1):
            numbered = f"{profile.name}-{board}"
            if len(numbered) > MAX_NAME:
                raise ConfigError(f"{name}: expected a name of at most {MAX_NAME} characters")
            profiles.append(replace(profile, name=numbered))
    check_different(profiles)
    return profiles


def check_different(profiles: Iterable[DeviceProfile]) -> None:
    """Raise InputError for two devices of one name."""
    counts = Counter(profile.name for profile in profiles)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise InputError(
            f"expected every profile once, got {', '.join(repeated)} repeatedly "
            f"({repeated[0]}*{counts[repeated[0]]} for several boards of a kind)"
        )


def read_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile from a file, or a shipped one by its bare name; raises ConfigError."""
    path = Path(path)
    if not path.suffix and not path.exists():
        shipped = profiles_in_package()
        if path.name not in shipped:
            raise ConfigError(
                f"{path}: neither a file nor a shipped profile (these are: {', '.join(shipped)})"
            )
        path = shipped[path.name]
    profile = read_toml(path, DeviceProfile)
    if profile.name != path.stem:
        raise ConfigError(
            f"{path}: key `name`: expected {path.stem!r}, the file's stem, got {profile.name!r}"
        )
    return profile
