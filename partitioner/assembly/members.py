"""Models of an assembled bundle, and their plan. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from mdp.errors import ConfigError, InputError
from mdp.files import MAX_TOML_BYTES, Record, read_regular, read_toml
from mdp.formats import plan
from mdp.formats.profile import DeviceName, DeviceProfile, LatencyPoint, Precision, RuntimeName
from partitioner.data.class_names import ClassNames
from partitioner.estimates.latency import Estimate, Way, own_way, spec_of
from partitioner.estimates.latency_networks import fit_networks
from partitioner.estimates.macs import macs, memory_bytes
from partitioner.estimates.network import choose_encoding, network_ms

Channels = tuple[float, float, float]


class Model(Record, frozen=True):
    """One model of a models.toml: an ONNX file, or a timm name with weights."""

    device: DeviceName
    #: File with the names of the model's classes, one a line, in its order.
    labels: str
    #: File with two columns, separated by a tab: a class of the data, its name in `labels`.
    map: str | None = None
    onnx: str | None = None
    timm: str | None = None
    weights: str | None = None
    image_size: plan.ImageSize | None = None
    #: Transformer blocks kept of a plain vision transformer of timm, from the first on; 0: all.
    depth: Annotated[int, Meta(ge=0, le=64)] = 0
    #: Of a network trained here; `own`: as its recipe pools.
    pooling: Literal["own", "tokens", "stages"] = "own"
    #: Normalisation of pixels 0..1 of an ONNX file; timm knows its own.
    mean: Channels | None = None
    std: Channels | None = None
    #: Its device's part of the picture's centred square; None: chosen on the data.
    region: plan.Region | None = None
    #: Whose pictures of a scene it sees, where `--data` holds scenes.
    camera: plan.CameraName | None = None
    precision: Precision = "fp32"
    runtime: RuntimeName = "onnxruntime"
    #: Licence of the weights, in words, for the bundle's provenance.
    licence: str = "not stated"

    def __post_init__(self) -> None:
        if (self.onnx is None) == (self.timm is None):
            found = "neither" if self.onnx is None else "both"
            raise ValueError(f"expected either `onnx` or `timm`, found {found}")
        if self.timm is not None and self.weights is None:
            raise ValueError(
                "expected `weights` beside `timm`, found none: nothing is fetched or trained here"
            )
        if self.timm is not None and self.image_size is None:
            raise ValueError("expected `image_size` beside `timm`, found none")
        if self.timm is not None and (self.mean or self.std):
            raise ValueError("`mean` and `std` go with `onnx`: timm knows its own")
        if self.onnx is not None and (self.weights or self.depth or self.pooling != "own"):
            raise ValueError("`weights`, `depth` and `pooling` go with `timm`")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"expected `std` above 0, found {min(self.std):g}")

    @property
    def source(self) -> str:
        """The file with the weights."""
        source = self.onnx or self.weights
        assert source is not None
        return source


class Models(Record, frozen=True):
    """The content of models.toml; paths are relative to it."""

    models: Annotated[list[Model], Meta(min_length=1, max_length=plan.MAX_MEMBERS)]
    format_version: Annotated[int, Meta(ge=1, le=1)] = 1

    def __post_init__(self) -> None:
        devices = [model.device for model in self.models]
        if len(set(devices)) != len(devices):
            twice = next(name for name in devices if devices.count(name) > 1)
            raise ValueError(f"expected each device once in `models`, found {twice} twice")
        if len({model.camera is None for model in self.models}) > 1:
            raise ValueError("expected a `camera` for every model or for none")

    @property
    def cameras(self) -> list[str]:
        """Names of all cameras, each once."""
        return list(dict.fromkeys(m.camera for m in self.models if m.camera is not None))


def file_owners(models: Sequence[Model]) -> list[int]:
    """For each model the first one whose served file is its own too: all but devices' are equal.

    Cameras of one network and one region share a file; where the region is chosen nobody does.
    """
    found: dict[Model, int] = {}
    firsts = []
    for k, model in enumerate(models):
        form = replace(model, device=models[0].device, camera=None)
        firsts.append(k if model.region is None else found.setdefault(form, k))
    return firsts


def read_models(path: Path) -> Models:
    """Read a models.toml; raises ConfigError."""
    return read_toml(path, Models)


def read_names(path: Path) -> list[str]:
    """The lines of a labels file; raises ConfigError."""
    names = [line.strip() for line in _text(path).splitlines()]
    while names and not names[-1]:
        names.pop()
    if len(names) < 2 or "" in names:
        found = f"line {names.index('') + 1} empty" if "" in names else f"{len(names)} in all"
        raise ConfigError(
            f"{path}: expected the name of a class on each line, at least 2, found {found}"
        )
    return names


def read_map(path: Path) -> dict[str, str]:
    """Class of the data -> name in the model's labels; raises ConfigError."""
    found: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        left, _, right = (part.strip() for part in line.partition("\t"))
        if not left and not right:
            continue
        if not (left and right and "\t" in line) or "\t" in right or left in found:
            raise ConfigError(
                f"{path}: line {number}: expected a class of the data, a tab, and its name in the "
                f"labels file, each class once, found {line[:40]!r}"
            )
        found[left] = right
    return found


def _text(path: Path) -> str:
    try:
        # Some editors write a byte order mark.
        return read_regular(path, MAX_TOML_BYTES)[0].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8") from error


def rows_of(
    names: Sequence[str],
    wanted: Sequence[str],
    mapped: Mapping[str, str],
    where: str,
    remedy: str = "give a `map` with their names there",
) -> list[int]:
    """The model's row of every class of the data; raises InputError naming those without one.

    A name that is not there exactly is found with another case, and `_` or `-` for a space.
    """
    return ClassNames([name] for name in names).rows_of(wanted, mapped, where, remedy)


def reference_point(profile: DeviceProfile, network: plan.NetworkSpec) -> LatencyPoint:
    """The encoder of the profile that is most like `network` in multiply-accumulates.

    One picture in fp32 with the profile's own threads and provider, or the nearest to that.
    """
    way = own_way(profile)
    single = [p for p in profile.latency if p.batch == 1 and p.precision == "fp32"]

    def distance(point: LatencyPoint) -> tuple[bool, bool, float]:
        size = macs(spec_of(point), 0) / network.macs
        return (point.threads != way.threads, point.runtime != way.runtime, max(size, 1 / size))

    if not single:
        raise InputError(f"profile {profile.name}: expected latencies of one picture in fp32")
    return min(single, key=distance)


def network_estimate(
    profile: DeviceProfile, network: plan.NetworkSpec, runtime: RuntimeName
) -> Estimate | None:
    """The estimate from networks measured on the device; None without any that are comparable.

    Raises InputError for a profile with a network that is not in the catalogue.
    """
    way = Way(
        precision=network.precision,
        runtime=runtime,
        provider=profile.provider,
        threads=profile.threads,
    )
    fitted = fit_networks(profile, way)
    return None if fitted is None else fitted.estimate(network)


def assign(
    k: int,
    model: Model,
    region: plan.Region,
    spec: plan.Spec,
    profile: DeviceProfile,
    compute_ms: float,
    how: str,
    num_classes: int,
) -> plan.Assignment:
    """The assignment of one device; `how` says why, and where its milliseconds come from."""
    encoding = choose_encoding(profile.link, spec.image_size, num_classes)
    sent_ms = network_ms(profile.link, spec.image_size, num_classes, encoding)
    memory = memory_bytes(spec, num_classes)
    if memory > profile.memory_bytes:
        raise InputError(
            f"{model.source}: takes {memory / 1e6:,.0f} MB, more than the "
            f"{profile.memory_bytes / 1e6:,.0f} MB of {profile.name}"
        )
    return plan.Assignment(
        k=k,
        device=profile.name,
        region=region,
        submodel=spec if isinstance(spec, plan.SubModelSpec) else None,
        network=spec if isinstance(spec, plan.NetworkSpec) else None,
        predicted_ms=plan.PredictedMs(
            compute=round(compute_ms, 3),
            network=round(sent_ms, 3),
            total=round(compute_ms + sent_ms, 3),
        ),
        memory_bytes=memory,
        provider=profile.provider,
        threads=profile.threads,
        why=how,
        encoding=encoding,
        runtime=model.runtime,
        spin=profile.spin,
        camera=model.camera,
    )


def assemble_plan(
    assignments: Sequence[plan.Assignment], num_classes: int, target_ms: float | None = None
) -> plan.Plan:
    """The plan of assembled models; without a target it is the slowest member's estimate."""
    reason = "assembled from models that exist: the target is the slowest member's estimate"
    if target_ms is not None:
        reason = "chosen by what networks with given weights are measured to be worth"
    return plan.Plan(
        target_ms=target_ms or max(a.predicted_ms.total for a in assignments),
        refused=False,
        reason=reason,
        assignments=list(assignments),
        num_classes=num_classes,
    )
