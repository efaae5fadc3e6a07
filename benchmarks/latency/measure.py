"""Steady-state latencies of many sub-models, in turns, so that drift meets all of them."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.turns import in_turns
from benchmarks.latency.shapes import Case, file_stem
from mdp.files import Record, write_bytes
from mdp.formats.profile import NonNegativeFloat, PositiveFloat, PositiveInt, Precision
from mdp.runtimes.onnxruntime import open_session

THREADS = (1, 2)
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
Note = Callable[[str], None]


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
    #: Processor cores that everybody else kept busy meanwhile.
    others_cores: NonNegativeFloat


class Rows(Record, frozen=True):
    """The content of benchmarks/results/latency-rows.json."""

    machine: dict[str, Any]
    #: Random shapes that no fit sees.
    unseen: list[Row]
    #: Shapes that no fit sees and a plan may hold.
    plannable: list[Row]


def model_file(folder: Path, case: Case, precision: Precision) -> Path:
    return folder / f"{file_stem(case)}-{precision}.onnx"


def export_all(folder: Path, cases: Sequence[Case], note: Note) -> None:
    """Export every case in each precision into `folder`, leaving out what is there already."""
    from partitioner.export.quantize import quantized
    from partitioner.export.write import ServedMember, to_onnx
    from partitioner.networks.submodel import SubModel

    for number, case in enumerate(cases, start=1):
        missing = [p for p in PRECISIONS if not model_file(folder, case, p).is_file()]
        if missing:
            note(f"exporting {number} of {len(cases)}: {file_stem(case)}")
            module = ServedMember(SubModel(case.spec, case.num_classes))
            content = to_onnx(module, case.spec.image_size, ["boost", "bag"], {})
            for precision in missing:
                write_bytes(model_file(folder, case, precision), quantized(content, precision))


def measure(folder: Path, cases: Sequence[Case], *, rounds: int, seconds: float) -> list[Row]:
    """Every case in each precision with every number of threads, `rounds` bursts each, in turns."""
    runs = {
        (case, precision, threads): partial(
            open_session(model_file(folder, case, precision), threads=threads).run,
            None,
            {"images": _noise(case.spec.image_size)},
        )
        for case in cases
        for precision in PRECISIONS
        for threads in THREADS
    }
    others = Others()
    blocks = in_turns(runs, rounds, least=5, seconds=seconds, warm_up=2)
    others_cores = others.cores()
    rows = []
    for (case, precision, threads), found in blocks.items():
        times_ms = [ms for block in found for ms in block]
        low, high = np.percentile(times_ms, (10, 90))
        rows.append(
            Row(
                case=case, precision=precision, threads=threads,
                latency_ms=round(median(map(median, found)), 4),
                p10_ms=round(float(low), 4), p90_ms=round(float(high), 4),
                rounds=rounds, runs=len(times_ms), others_cores=others_cores,
            )
        )  # fmt: skip
    return rows


def _noise(side: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)


class Others:
    """How many cores everything but this process keeps busy, from now on (Linux)."""

    def __init__(self) -> None:
        self._began = self._busy_s()

    @staticmethod
    def _busy_s() -> tuple[float, float]:
        """What others have computed so far, and the time, in seconds."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return busy_s - own.user - own.system, own.elapsed

    def cores(self, less_s: float = 0.0) -> float:
        """Without what children have computed, `less_s` seconds."""
        (busy_s, at_s), (began_busy_s, began_s) = self._busy_s(), self._began
        return round(max(0.0, busy_s - began_busy_s - less_s) / (at_s - began_s), 2)
