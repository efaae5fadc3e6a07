"""A clock that runs only when something computes, a system that shows what is written in it, and
encoders that were never exported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from devices.probe.child import (
    Capabilities,
    ChildFailed,
    ListCapabilities,
    MeasureRun,
    Reply,
    Request,
    SustainRun,
)
from devices.probe.encoders import Encoder
from devices.probe.measure import EncoderRun, MeasuredPoint, SustainedLoad
from mdp.formats.plan import SubModelSpec
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from tests.support.clock import Clock

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


def spec(
    image_size: int = 32, embed_dim: int = 64, depth: int = 2, precision: str = "fp32"
) -> SubModelSpec:
    """A shape with patches of 4 pixels."""
    return SubModelSpec(
        image_size=image_size,
        patch_size=4,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=2,
        mlp_ratio=4.0,
        precision=precision,  # type: ignore[arg-type]
    )


def a_run(threads: int = 1, batch: int = 1, provider: str = CPU, **shape: int) -> EncoderRun:
    """A point to measure."""
    return EncoderRun(
        submodel=spec(**shape),  # type: ignore[arg-type]
        runtime="onnxruntime",
        provider=provider,
        threads=threads,
        batch=batch,
        num_classes=3,
    )


def make_point(latency_ms: float = 10.0, others_cores: float | None = 0.0) -> MeasuredPoint:
    """A point with a spread of a tenth."""
    return MeasuredPoint(
        latency_ms=latency_ms,
        p10_ms=latency_ms * 0.9,
        p90_ms=latency_ms * 1.1,
        start_up_ms=50.0,
        first_run_ms=latency_ms * 2,
        warm_up_ms=latency_ms * 2,
        memory_bytes=20_000_000,
        others_cores=others_cores,
    )


def encoder(tier: str = "quick", model_bytes: int = 1000, **shape: object) -> Encoder:
    """An entry of an index."""
    shaped = spec(**shape)  # type: ignore[arg-type]
    name = f"e{shaped.image_size}-{shaped.embed_dim}x{shaped.depth}-{shaped.precision}.onnx"
    return Encoder(
        submodel=shaped,
        tier=tier,  # type: ignore[arg-type]
        file=name,
        operators={"MatMul": 1},
        model_bytes=model_bytes,
    )


ENCODERS = [
    encoder(tier, image_size=image_size, embed_dim=width, precision=precision)
    for tier, image_size, width in (
        ("quick", 8, 16),
        ("quick", 16, 32),
        ("quick", 32, 64),
        ("core", 48, 64),
        ("full", 64, 128),
    )
    for precision in ("fp32", "int8")
]


@dataclass
class FakeSystem:
    """Shows what it was told to, over `clock`."""

    clock: Clock
    others_cores: float | None = 0.0
    resident: int | None = 1_000_000
    temperatures_c: Iterator[float | None] = field(default_factory=lambda: iter(lambda: None, 0))
    watts: float | None = None
    meter_w: float | None = None

    def busy_cpu_s(self) -> float | None:
        return None if self.others_cores is None else self.clock() * self.others_cores

    def resident_bytes(self) -> int | None:
        return self.resident

    def temperature_c(self) -> float | None:
        return next(self.temperatures_c)

    def energy_j(self) -> float | None:
        return None if self.watts is None else self.clock() * self.watts

    def power_w(self) -> float | None:
        return self.meter_w


class FakeRuntime:
    """Takes as long for each run as `times_s` says, and makes its process grow as it loads."""

    provider = CPU
    fallback = False

    def __init__(self, clock: Clock, times_s: Callable[[int, float], float]) -> None:
        self.runs = 0
        self.logits = np.zeros((1, 3), dtype=np.float32)
        self.seen: list[Pixels] = []
        self._clock, self._times_s = clock, times_s

    def warm_up(self) -> None:
        raise AssertionError("a probe warms up itself, and counts the time")

    def run(self, pixels: Pixels) -> Contribution:
        self._clock.now_s += self._times_s(self.runs, self._clock.now_s)
        self.runs += 1
        self.seen = [pixels]
        return Contribution(self.logits, self.logits)


class FakeDevice:
    """Answers a probe's requests: every model takes a millisecond per MAC-like unit."""

    def __init__(
        self, providers: Sequence[str] = (CPU,), openvino: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.here: Capabilities | ChildFailed = Capabilities(
            providers=list(providers),
            openvino=None if openvino is None else {d: list(a) for d, a in openvino.items()},
            versions={"onnxruntime": "1.0"},
        )
        self.asked: list[Request] = []
        self.others_cores: Callable[[int], float] = lambda asked: 0.0
        #: What a run fails with, or None.
        self.failing: Callable[[EncoderRun, int], str | None] = lambda run, asked: None
        self.start_up_ms: Callable[[EncoderRun], float] = lambda run: 50.0
        self.latency_ms: Callable[[EncoderRun], float] = latency_of
        #: After how many requests somebody presses Ctrl-C.
        self.patience = 10**9

    def ask(self, request: Request, limit_s: float) -> Reply:
        self.asked.append(request)
        if len(self.asked) > self.patience:
            raise KeyboardInterrupt
        match request:
            case ListCapabilities():
                return self.here
            case SustainRun(seconds=seconds):
                return SustainedLoad(
                    seconds=seconds, first_ms=10.0, last_ms=13.0, temperature_c=70.0, power_w=5.0
                )
            case MeasureRun(run=run):
                reason = self.failing(run, len(self.asked))
                if reason is not None:
                    return ChildFailed(reason=reason)
                found = make_point(self.latency_ms(run), self.others_cores(len(self.asked)))
                return replace(found, start_up_ms=self.start_up_ms(run))

    @property
    def runs(self) -> list[EncoderRun]:
        """The points asked for, in order."""
        return [request.run for request in self.asked if isinstance(request, MeasureRun)]


def latency_of(run: EncoderRun) -> float:
    """A larger encoder takes longer, more threads and int8 less."""
    assert run.submodel is not None
    size = run.submodel.image_size * run.submodel.embed_dim * run.submodel.depth * run.batch
    slower: float = run.threads**0.5
    return size / 1000 / slower / (2 if run.spec.precision == "int8" else 1)


class FakeModels:
    """Files that nobody opens."""

    def path(self, encoder: Encoder) -> str:
        return encoder.file
