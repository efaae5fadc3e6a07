"""Predicted against measured latency of sub-models that no fit saw.

    mdp-agent probe --out benchmarks/results/this-machine.toml
    python -m benchmarks.latency

Random sub-models are exported as agents serve them, in fp32 and dynamic int8, and timed with one
and two threads, in rounds; `python -m benchmarks latency` compares them with the predictions of the
profile. `--work` keeps exported models. Each row holds how busy other processes kept the machine.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.turns import in_turns
from benchmarks.latency.page import PAGE
from benchmarks.latency.rows import ROWS, Row, Rows
from benchmarks.latency.shapes import Case, file_stem, plannable, unseen
from mdp import console
from mdp.files import write_bytes, write_json
from mdp.formats.profile import Precision
from mdp.runtimes.onnxruntime import open_session

THREADS = (1, 2)
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
ROUNDS, SECONDS = 8, 0.12


def model_file(folder: Path, case: Case, precision: Precision) -> Path:
    return folder / f"{file_stem(case)}-{precision}.onnx"


def export_all(folder: Path, cases: Sequence[Case]) -> None:
    """Export every case in each precision to `folder`, except those that are there."""
    from partitioner.export.quantize import quantized
    from partitioner.export.write import ServedMember, to_onnx
    from partitioner.networks.submodel import SubModel

    for number, case in enumerate(cases, start=1):
        missing = [p for p in PRECISIONS if not model_file(folder, case, p).is_file()]
        if missing:
            print(f"exporting {number} of {len(cases)}: {file_stem(case)}", file=sys.stderr)
            module = ServedMember(SubModel(case.spec, case.num_classes, boosting=True))
            content = to_onnx(module, case.spec.image_size, ["boost", "bag"], {})
            for precision in missing:
                write_bytes(model_file(folder, case, precision), quantized(content, precision))


def measure(folder: Path, cases: Sequence[Case], rounds: int) -> list[Row]:
    """Every case in each precision with every number of threads, a burst in each round."""
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
    busy_s, at_s = _others_busy_s()
    blocks = in_turns(runs, rounds, least=5, seconds=SECONDS, warm_up=2)
    busy_then_s, then_s = _others_busy_s()
    others_cores = round(max(0.0, busy_then_s - busy_s) / (then_s - at_s), 2)
    rows = []
    for (case, precision, threads), found in blocks.items():
        times_ms = [ms for block in found for ms in block]
        low, high = np.percentile(times_ms, (10, 90)).round(4).tolist()
        rows.append(
            Row(
                case=case, precision=precision, threads=threads,
                latency_ms=round(median(map(median, found)), 4), p10_ms=low, p90_ms=high,
                rounds=rounds, runs=len(times_ms), others_cores=others_cores,
            )
        )  # fmt: skip
    return rows


def _noise(side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)


def _others_busy_s() -> tuple[float, float]:
    """Processor time of all other processes so far, and the time, in seconds (Linux)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy_s - own.user - own.system, own.elapsed


def main() -> None:
    asked = arguments(__doc__, "quick", work=Path("/tmp/mdp-latency"), out=ROWS)
    machine, few = describe_machine(), 1 if asked.quick else None
    random, planned = unseen()[:few], plannable()[:few]
    export_all(asked.work, [*random, *planned])
    rows = measure(asked.work, [*random, *planned], few or ROUNDS)
    first, rest = ([row for row in rows if row.case in some] for some in (random, planned))
    write_json(asked.out, Rows(machine=machine, unseen=first, plannable=rest))
    if asked.out == ROWS:
        PAGE.write()


if __name__ == "__main__":
    console.run(main, "benchmarks.latency")
