"""DeviceProfile: what one device can do, and how each of its numbers was obtained."""

import math
import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from mdp.errors import ConfigError
from mdp.files import Record, read_toml

#: A device's name is also its profile's file stem, a TOML key and part of a fleet entry's name.
DeviceName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
#: onnxruntime's name of an execution provider, for instance `CPUExecutionProvider`.
ProviderName = Annotated[str, Meta(pattern=r"^[A-Za-z]+ExecutionProvider$")]
PositiveInt = Annotated[int, Meta(gt=0, le=2**48)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e15)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
#: How a sub-model's matrix products are computed. `int8` quantises activations as they come,
#: `int8-static` by ranges that were seen on calibration pictures; both keep fp32 in between.
Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-static"]
#: The library that executes a sub-model on its device.
RuntimeName = Literal["onnxruntime", "openvino"]


class Link(Record, frozen=True):
    """The network between client and device."""

    #: Decimal bits per second, in the slower direction.
    bandwidth_bps: PositiveFloat
    #: Seconds for an empty message to go there and back.
    round_trip_s: NonNegativeFloat


class LatencyPoint(Record, frozen=True):
    """One measured ViT encoder: its shape, how it was run, and its steady-state latency."""

    image_size: PositiveInt
    patch_size: PositiveInt
    embed_dim: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_ratio: PositiveFloat
    threads: PositiveInt
    #: Median milliseconds of one run, of all pictures of the batch together.
    latency_ms: PositiveFloat
    precision: Precision = "fp32"
    runtime: RuntimeName = "onnxruntime"
    #: onnxruntime's execution provider; None is the profile's.
    provider: ProviderName | None = None
    #: Pictures per run.
    batch: PositiveInt = 1
    #: Spread: the 10th and 90th percentile of the same runs.
    p10_ms: PositiveFloat | None = None
    p90_ms: PositiveFloat | None = None
    #: From reading the model to being able to run it, and the first run.
    start_up_ms: PositiveFloat | None = None
    first_run_ms: PositiveFloat | None = None
    #: By how much the process grew, from before reading the model to its steady state.
    memory_bytes: NonNegativeFloat | None = None


class Provenance(Record, frozen=True):
    """Where a number comes from: a measurement on the device, or an estimate."""

    method: Literal["measured", "estimated"]
    #: For `measured` the tool, its versions and the date; for `estimated` what it was derived from.
    source: Annotated[str, Meta(min_length=8)]


class DeviceProfile(Record, frozen=True):
    """What one device can do. Every number has an entry in `provenance` under its own name."""

    name: DeviceName
    kind: Literal["cpu", "gpu", "arm"]
    provider: ProviderName
    #: Threads one inference may use.
    threads: PositiveInt
    #: Memory a sub-model may take, in bytes.
    memory_bytes: PositiveInt
    link: Link
    latency: Annotated[list[LatencyPoint], Meta(min_length=3)]
    provenance: dict[str, Provenance]
    #: Watts while computing.
    power_w: PositiveFloat | None = None
    #: Share of the time in which the device answers.
    availability: Fraction = 1.0

    def __post_init__(self) -> None:
        numbers = {"threads", "memory_bytes", "link", "latency", "availability"}
        if self.power_w is not None:
            numbers.add("power_w")
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


def shipped_profiles() -> dict[str, Path]:
    """Name -> file of the profiles that come with MDP."""
    installed = Path(str(resources.files("mdp"))) / "profiles"
    checkout = Path(__file__).resolve().parent.parent / "profiles"
    folder = installed if installed.is_dir() else checkout
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def read_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile from a file, or a shipped one by its bare name; raises ConfigError."""
    path = Path(path)
    if not path.suffix and not path.exists():
        shipped = shipped_profiles()
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
