"""Steady-state latencies of many models, in rounds, so that drift meets all of them."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.latency.models import PRECISIONS, model_file
from benchmarks.latency.shapes import Case
from mdp.files import Record
from mdp.formats.profile import NonNegativeFloat, PositiveFloat, PositiveInt, Precision
from mdp.runtimes.onnxruntime import open_session

THREADS = (1, 2)
#: One burst: runs that are not counted, then as many as fit, but not fewer than `_LEAST_RUNS`.
_WARM_UP_RUNS, _LEAST_RUNS, _MOST_RUNS = 2, 5, 200


class Row(Record, frozen=True):
    """One model run one way: the median over rounds of each round's median, and their spread."""

    case: Case
    precision: Precision
    threads: PositiveInt
    latency_ms: PositiveFloat
    #: 10th and 90th percentile of all runs.
    p10_ms: PositiveFloat
    p90_ms: PositiveFloat
    rounds: PositiveInt
    runs: PositiveInt
    #: Processor cores that everybody else kept busy meanwhile, the median over rounds.
    others_cores: NonNegativeFloat


class Rows(Record, frozen=True):
    """The content of benchmarks/results/latency-*.json."""

    machine: dict[str, Any]
    #: Random shapes that no fit sees.
    unseen: list[Row]
    #: Shapes that no fit sees and a plan may hold.
    plannable: list[Row]
    #: Whether threads waited for each other awake.
    spin: bool = False


class _Bursts:
    def __init__(
        self, path: Path, case: Case, precision: Precision, threads: int, spin: bool
    ) -> None:
        self.case, self.precision, self.threads, self.spin = case, precision, threads, spin
        self._path = path
        self._session: Any = None
        shape = (1, case.spec.image_size, case.spec.image_size, 3)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self._feed = {"images": pixels}
        self.medians_ms: list[float] = []
        self.times_ms: list[float] = []
        self.others_cores: list[float] = []

    def burst(self, seconds: float) -> None:
        if self._session is None:
            self._session = open_session(self._path, threads=self.threads, spin=self.spin)
        session = self._session
        for _ in range(_WARM_UP_RUNS):
            session.run(None, self._feed)
        times_ms: list[float] = []
        others_s, begin = others_cpu_s(), time.perf_counter()
        while len(times_ms) < _LEAST_RUNS or (
            time.perf_counter() - begin < seconds and len(times_ms) < _MOST_RUNS
        ):
            start = time.perf_counter()
            session.run(None, self._feed)
            times_ms.append((time.perf_counter() - start) * 1e3)
        others_s = others_cpu_s() - others_s
        # Clock ticks are coarse: over a short burst the difference can be slightly negative.
        self.others_cores.append(max(0.0, others_s / (time.perf_counter() - begin)))
        self.medians_ms.append(statistics.median(times_ms))
        self.times_ms += times_ms

    def row(self) -> Row:
        low, high = np.percentile(self.times_ms, (10, 90))
        return Row(
            case=self.case,
            precision=self.precision,
            threads=self.threads,
            latency_ms=round(statistics.median(self.medians_ms), 4),
            p10_ms=round(float(low), 4),
            p90_ms=round(float(high), 4),
            rounds=len(self.medians_ms),
            runs=len(self.times_ms),
            others_cores=round(statistics.median(self.others_cores), 2),
        )


def measure(
    folder: Path,
    cases: Sequence[Case],
    precisions: Sequence[Precision] = PRECISIONS,
    *,
    rounds: int,
    seconds: float,
    spin: bool = False,
    note: Callable[[str], None],
) -> list[Row]:
    """Run every case in each precision with every number of threads, `rounds` bursts each.

    Every round takes all of them, in an order of its own.
    """
    bursts = [
        _Bursts(model_file(folder, case, precision), case, precision, threads, spin)
        for case in cases
        for precision in precisions
        for threads in THREADS
    ]
    rng = np.random.default_rng(0)
    for number in range(rounds):
        note(f"round {number + 1} of {rounds}: {len(bursts)} models")
        for index in rng.permutation(len(bursts)):
            bursts[index].burst(seconds)
    return [burst.row() for burst in bursts]


def others_cpu_s() -> float:
    """CPU seconds that everything but this process has used since the machine started (Linux)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[:8])
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy_s - own.user - own.system
