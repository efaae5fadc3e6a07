"""Measures one encoder: start-up, first run, warm-up, steady state and memory.

It runs in the runtime that would serve it. Clock, system and runtime are arguments.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import default_rng

from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec, one_spec
from mdp.formats.profile import ProviderName, RuntimeName
from mdp.fusion.fuse import Contribution
from mdp.load import OtherLoad
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import CPU, Execution, Runtime

#: Providers that compute on the processor, with its threads and energy counters.
ON_PROCESSOR = {
    CPU,
    "XnnpackExecutionProvider",
    "OpenVINOExecutionProvider",
    "DnnlExecutionProvider",
}
#: Runs in the steady state at least, and before it: the first ones allocate and choose kernels.
MIN_RUNS, MIN_WARM_UP_RUNS = 7, 2
#: Share of a point's time for warming up.
WARM_UP_SHARE = 0.3
#: A run is as fast as in the steady state within this factor of the median.
AS_FAST = 1.1
#: Seconds between two readings of the sensors under sustained load.
READ_EVERY_S = 2.0


class EncoderRun(Record, frozen=True):
    """One point to measure: an encoder and how it is run."""

    runtime: RuntimeName
    provider: ProviderName
    threads: int
    batch: int
    num_classes: int
    #: One of the two: a plain ViT's shape, or a network of another family.
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None
    #: Whether threads spin while they wait for each other.
    spin: bool = False

    @property
    def spec(self) -> Spec:
        """Whichever of the two it is."""
        return one_spec(self.submodel, self.network)


class MeasuredPoint(Record, frozen=True, tag=True):
    """The measurements of one point."""

    latency_ms: float
    p10_ms: float
    p90_ms: float
    start_up_ms: float
    first_run_ms: float
    warm_up_ms: float
    memory_bytes: int | None
    others_cores: float | None


class SustainedLoad(Record, frozen=True, tag=True):
    """One encoder under sustained load."""

    seconds: float
    first_ms: float
    last_ms: float
    temperature_c: float | None
    power_w: float | None


class System(Protocol):
    """Readings of the machine that a measurement needs; `devices.machine.Machine` does."""

    def busy_cpu_s(self) -> float | None:
        """CPU seconds used by all processes."""

    def resident_bytes(self) -> int | None:
        """Memory that this process has in use."""

    def temperature_c(self) -> float | None:
        """Degrees Celsius of the warmest sensor."""

    def energy_j(self) -> float | None:
        """Joules used so far."""

    def power_w(self) -> float | None:
        """Watts at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """Clocks in seconds, and the system."""

    system: System
    clock: Callable[[], float] = time.perf_counter
    own_cpu_s: Callable[[], float] = time.process_time


def execution_of(run: EncoderRun) -> Execution:
    """As the encoder would be served."""
    return Execution(
        runtime=run.runtime,
        provider=run.provider,
        precision=run.spec.precision,
        image_size=run.spec.image_size,
        threads=run.threads,
        spin=run.spin,
    )


def measure(
    run: EncoderRun, open_runtime: Callable[[], Runtime], seconds: float, around: Instruments
) -> MeasuredPoint:
    """Measure for about `seconds`; raises what the runtime raises, and ValueError without logits.

    Loading is timed as an agent does it, from opening the file. `memory_bytes` is the growth of
    this process, and valid only for its first measurement.
    """
    clock, system = around.clock, around.system
    pixels = _pixels(run)
    resident = system.resident_bytes()
    start_s = clock()
    runtime = open_runtime()
    start_up_s = clock() - start_s
    before_s, first = _times(runtime, pixels, clock, seconds * WARM_UP_SHARE, MIN_WARM_UP_RUNS)
    if not np.isfinite(first.heads).all():
        raise ValueError("the logits are not finite")
    others = OtherLoad(around.system.busy_cpu_s, around.own_cpu_s, around.clock)
    steady_s, _ = _times(runtime, pixels, clock, seconds * (1 - WARM_UP_SHARE), MIN_RUNS)
    others_cores = others.cores()
    grown = system.resident_bytes()
    median_s = statistics.median(steady_s)
    tenths = statistics.quantiles(steady_s, n=10, method="inclusive")
    return MeasuredPoint(
        latency_ms=_ms(median_s),
        p10_ms=_ms(tenths[0]),
        p90_ms=_ms(tenths[-1]),
        start_up_ms=_ms(start_up_s),
        first_run_ms=_ms(before_s[0]),
        warm_up_ms=_ms(warm_up_s(before_s, median_s)),
        memory_bytes=None if grown is None or resident is None else max(0, grown - resident),
        others_cores=others_cores,
    )


def warm_up_s(times_s: list[float], median_s: float) -> float:
    """Seconds of running before the first run that was as fast as in the steady state."""
    passed_s = 0.0
    for time_s in times_s:
        if time_s <= AS_FAST * median_s:
            break
        passed_s += time_s
    return passed_s


def sustain(
    run: EncoderRun,
    open_runtime: Callable[[], Runtime],
    seconds: float,
    around: Instruments,
    report: Callable[[float], None] = lambda passed_s: None,
) -> SustainedLoad:
    """Run without a pause for `seconds`; compares the first minute with the last.

    In less than three minutes each is a third of the time. `report` gets the seconds passed.
    """
    clock, runtime, pixels = around.clock, open_runtime(), _pixels(run)
    _times(runtime, pixels, clock, 0.0, MIN_WARM_UP_RUNS)
    window_s = min(60.0, seconds / 3)
    first: list[float] = []
    last: list[float] = []
    sensors = _Sensors(around, counters=run.provider in ON_PROCESSOR)
    start_s = clock()
    while (passed_s := clock() - start_s) < seconds or not last:
        begun_s = clock()
        runtime.run(pixels)
        took_s = clock() - begun_s
        if passed_s < window_s:
            first.append(took_s)
        elif passed_s >= seconds - window_s:
            last.append(took_s)
        if sensors.read():
            report(passed_s)
    return SustainedLoad(
        seconds=round(clock() - start_s, 1),
        first_ms=_ms(statistics.median(first)),
        last_ms=_ms(statistics.median(last)),
        temperature_c=sensors.temperature_c,
        power_w=sensors.average_w(),
    )


class _Sensors:
    """The highest temperature and the average power from now on."""

    def __init__(self, around: Instruments, *, counters: bool) -> None:
        """`counters`: whether the processor's energy counters measure the load."""
        self._around, self._counters = around, counters
        self.temperature_c = around.system.temperature_c()
        self._watts: list[float] = []
        self._read_s = around.clock()
        self._joules = self._energy_j()

    def read(self) -> bool:
        """Read them if that is due; whether it was."""
        now_s = self._around.clock()
        passed_s = now_s - self._read_s
        if passed_s < READ_EVERY_S:
            return False
        self._read_s = now_s
        system = self._around.system
        values = [t for t in (self.temperature_c, system.temperature_c()) if t is not None]
        self.temperature_c = max(values, default=None)
        before, self._joules = self._joules, self._energy_j()
        if before is not None and self._joules is not None and self._joules >= before:
            self._watts.append((self._joules - before) / passed_s)
        elif before is None and (watts := system.power_w()) is not None:
            self._watts.append(watts)
        return True

    def _energy_j(self) -> float | None:
        return self._around.system.energy_j() if self._counters else None

    def average_w(self) -> float | None:
        """Average watts; None where no meter is readable."""
        return round(statistics.fmean(self._watts), 1) if self._watts else None


def _pixels(run: EncoderRun) -> Pixels:
    shape = (run.batch, run.spec.image_size, run.spec.image_size, 3)
    return default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _times(
    runtime: Runtime, pixels: Pixels, clock: Callable[[], float], seconds: float, at_least: int
) -> tuple[list[float], Contribution]:
    """Seconds of each run, and the last one's logits."""
    times_s: list[float] = []
    start_s = now_s = clock()
    while now_s - start_s < seconds or len(times_s) < at_least:
        contribution = runtime.run(pixels)
        then_s, now_s = now_s, clock()
        times_s.append(now_s - then_s)
    return times_s, contribution


def _ms(seconds: float) -> float:
    """Milliseconds to four digits."""
    return float(f"{seconds * 1e3:.4g}")
