"""The points of a probe, their order, and what is kept of their measurements. Plain functions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import convert, to_builtins
from msgspec.structs import replace

from devices.probe.encoders import Encoder, Tier
from devices.probe.measure import ON_PROCESSOR, EncoderRun, MeasuredPoint
from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import LatencyPoint, NetworkPoint, Precision, RuntimeName, contradictions
from mdp.load import is_busy
from mdp.runtimes.base import CPU
from mdp.runtimes.openvino import precisions, provider_of

#: Batch size of the points that measure batching; every second encoder has one.
BATCH, BATCH_EVERY = 4, 2
#: A model may take this share of the free memory, and its file this share of the free disk.
MEMORY_SHARE, DISK_SHARE = 0.25, 0.5

#: Precisions measured on a provider, by default fp32 only. Providers compute fp16 or dynamic int8
#: that is not listed here in fp32 or on the processor.
_ONNXRUNTIME: dict[str, tuple[Precision, ...]] = {
    CPU: ("fp32", "int8", "int8-static"),
    "CUDAExecutionProvider": ("fp32", "fp16"),
    "ROCMExecutionProvider": ("fp32", "fp16"),
    "MIGraphXExecutionProvider": ("fp32", "fp16"),
    "DmlExecutionProvider": ("fp32", "fp16"),
    "CoreMLExecutionProvider": ("fp32", "fp16"),
    "WebGpuExecutionProvider": ("fp32", "fp16"),
    "TensorrtExecutionProvider": ("fp32", "fp16", "int8-static"),
    "NvTensorRTRTXExecutionProvider": ("fp32", "fp16", "int8-static"),
    "OpenVINOExecutionProvider": ("fp32", "fp16", "int8-static"),
    "QNNExecutionProvider": ("fp32", "int8-static"),
}
#: Providers that onnxruntime lists but that compute elsewhere.
_ELSEWHERE = {"AzureExecutionProvider": "computes in a cloud"}
Point = TypeVar("Point", LatencyPoint, NetworkPoint)


@dataclass(frozen=True, slots=True, order=True)
class Backend:
    """One way of running a model on this device."""

    runtime: RuntimeName
    provider: str
    precision: Precision

    @property
    def label(self) -> str:
        """The backend in messages."""
        where = self.provider.removesuffix("ExecutionProvider")
        return f"{self.runtime} {where} {self.precision}"


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """One planned point."""

    encoder: Encoder
    run: EncoderRun
    backend: Backend


def backends(
    providers: Sequence[str], openvino: Mapping[str, Sequence[str]] | None
) -> tuple[list[Backend], dict[str, str]]:
    """Ways of running models here, and why listed providers are left out.

    `openvino` has the precisions of each of its devices; None where it is not installed.
    """
    found = [
        Backend("onnxruntime", provider, precision)
        for provider in providers
        if provider not in _ELSEWHERE
        for precision in _ONNXRUNTIME.get(provider, ("fp32",))
    ]
    found += [
        Backend("openvino", provider_of(device), precision)
        for device, able in (openvino or {}).items()
        for precision in precisions(device, able)
    ]
    return found, {p: why for p, why in _ELSEWHERE.items() if p in providers}


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all cores."""
    return sorted({1 << n for n in range(cores.bit_length()) if 1 << n < cores} | {cores})


def fitting(
    encoders: Iterable[Encoder], memory_bytes: int | None, disk_bytes: int
) -> tuple[list[Encoder], list[Encoder]]:
    """The encoders that fit into memory and disk, and the others."""
    most = disk_bytes * DISK_SHARE
    if memory_bytes is not None:
        most = min(most, memory_bytes * MEMORY_SHARE)
    listed = list(encoders)
    return (
        [encoder for encoder in listed if encoder.model_bytes <= most],
        [encoder for encoder in listed if encoder.model_bytes > most],
    )


def tasks(
    encoders: Sequence[Encoder],
    ways: Sequence[Backend],
    threads: Sequence[int],
    num_classes: int,
    *,
    quick: bool = False,
    shapes: int | None = None,
    spin: bool = False,
) -> list[PlannedPoint]:
    """Every point, tier by tier, so that each prefix of the list spans all shapes and backends.

    The last tier is for the processor's onnxruntime with its fewest and most threads; `shapes`
    limits the number of shapes of the first one.
    """
    tiers: tuple[Tier, ...] = (
        ("quick",) if quick or shapes is not None else ("quick", "core", "full")
    )
    planned = []
    for tier in tiers:
        names = list(dict.fromkeys(_shape(e) for e in encoders if e.tier == tier))[:shapes]
        for place, name in enumerate(names):
            for encoder in (e for e in encoders if e.tier == tier and _shape(e) == name):
                for way in ways:
                    if file_precision(way.precision) == encoder.spec.precision:
                        batch = (
                            tier == "quick"
                            and encoder.submodel is not None
                            and place % BATCH_EVERY == 0
                        )
                        planned += _runs(encoder, way, threads, num_classes, batch=batch, spin=spin)
    return planned


def file_precision(precision: Precision) -> Precision:
    """The precision of the file's numbers: for bf16, in which a runtime computes, fp32."""
    return "fp32" if precision == "bf16" else precision


def _shape(encoder: Encoder) -> tuple[object, ...]:
    spec = encoder.spec
    if isinstance(spec, NetworkSpec):
        return (spec.name, spec.image_size)
    size = (spec.image_size, spec.patch_size, spec.embed_dim, spec.depth)
    return (*size, spec.num_heads, spec.mlp_ratio)


def _runs(
    encoder: Encoder,
    way: Backend,
    threads: Sequence[int],
    num_classes: int,
    *,
    batch: bool,
    spin: bool,
) -> list[PlannedPoint]:
    counts = list(threads) if way.provider in ON_PROCESSOR else [1]
    main = way.runtime == "onnxruntime" and way.provider == CPU
    if encoder.tier == "full":
        counts = [counts[0], counts[-1]] if main else []
    submodel, network = encoder.submodel, encoder.network
    runs = [(count, 1) for count in dict.fromkeys(counts)]
    # OpenVINO is served one picture at a time.
    if batch and way.runtime == "onnxruntime":
        runs.append((counts[-1], BATCH))
    return [
        PlannedPoint(
            encoder,
            EncoderRun(
                submodel=submodel and replace(submodel, precision=way.precision),
                network=network and replace(network, precision=way.precision),
                runtime=way.runtime,
                provider=way.provider,
                threads=count,
                batch=pictures,
                num_classes=num_classes,
                spin=spin,
            ),
            way,
        )
        for count, pictures in runs
    ]


def describe_run(run: EncoderRun) -> str:
    """The encoder or network in messages."""
    if run.submodel is None:
        return run.spec.words
    spec = run.submodel
    return f"{spec.image_size} px, {spec.embed_dim} wide, {spec.depth} deep"


def quieter(one: MeasuredPoint, other: MeasuredPoint) -> MeasuredPoint:
    """The one of two measurements of a point that was disturbed less."""
    return min(one, other, key=lambda m: (m.others_cores or 0.0, m.latency_ms))


def representative(repetitions: Sequence[MeasuredPoint]) -> MeasuredPoint:
    """The median of a point's measurements, of two middle ones the faster.

    Disturbed ones count only where there are no others.
    """
    quiet = [each for each in repetitions if not is_busy(each.others_cores)] or repetitions
    return sorted(quiet, key=lambda each: each.latency_ms)[(len(quiet) - 1) // 2]


def point_of(run: EncoderRun, measured: MeasuredPoint) -> LatencyPoint:
    """A point of a profile's table of encoders."""
    return convert(_how(run, measured) | to_builtins(run.submodel), LatencyPoint)


def network_point_of(run: EncoderRun, measured: MeasuredPoint) -> NetworkPoint:
    """A point of a profile's table of networks."""
    spec = run.spec
    shape = {"name": spec.outline, "image_size": spec.image_size, "precision": spec.precision}
    return convert(_how(run, measured) | shape, NetworkPoint)


def _how(run: EncoderRun, measured: MeasuredPoint) -> dict[str, object]:
    """The keys of points of both tables."""
    keys: dict[str, object] = to_builtins(measured)
    del keys["type"]
    way = {"runtime": run.runtime, "provider": run.provider}
    return keys | way | {"threads": run.threads, "batch": run.batch}


def consistent(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """The points without those that contradict others, and why they were left out.

    Of two contradicting points the more disturbed one is left out.
    """
    kept, reasons = list(points), []
    while found := contradictions(kept, CPU):
        first, second, text = found[0]
        worse = max((first, second), key=lambda place: kept[place].others_cores or 0.0)
        reasons.append(text)
        del kept[worse]
    return kept, reasons


def best_provider(points: Sequence[LatencyPoint]) -> str:
    """onnxruntime's fastest provider in fp32, one picture at a time, at its best threads.

    By the geometric mean over the encoders that all providers ran. The processor where onnxruntime
    ran nothing.
    """
    best: dict[str, dict[tuple[object, ...], float]] = {}
    for point in points:
        if (point.runtime, point.precision, point.batch) == ("onnxruntime", "fp32", 1):
            shapes = best.setdefault(point.provider or CPU, {})
            key = (point.image_size, point.patch_size, point.embed_dim, point.depth)
            shapes[key] = min(point.latency_ms, shapes.get(key, math.inf))
    if not best:
        return CPU
    shared = set.intersection(*(set(shapes) for shapes in best.values()))
    means = {
        provider: sum(math.log(shapes[key]) for key in shared) for provider, shapes in best.items()
    }
    return min(means, key=means.__getitem__)
