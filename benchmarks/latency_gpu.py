"""Do predictions come true on a GPU: latency of sub-models that no fit saw, in fp32 and fp16.

    mdp-agent probe --threads 1 --out gpu.toml
    python -m benchmarks.latency_gpu measure          # on the machine with the GPU, 4 minutes
    python -m benchmarks.latency_gpu report --profile gpu.toml

As `benchmarks.latency` on processors, with the sub-models that a plan may hold, run as an agent
runs them with CUDA. Writes results/latency-gpu.json, and the figures into docs/latency.md.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from benchmarks.accuracy_table import as_markdown, as_rich
from benchmarks.latency_measure import Row, measure
from benchmarks.latency_models import export_all
from benchmarks.latency_numbers import compare, error_sheet
from benchmarks.latency_shapes import Case, plannable
from benchmarks.machine import describe_machine
from benchmarks.page import write_figures
from devices.cuda import CUDA
from devices.probe_point import Run, assignment_of
from devices.runtimes import open_runtime
from mdp.crop import Pixels
from mdp.files import Record, read_json, write_json
from mdp.profile import Precision, read_profile

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
RESULTS = Path(__file__).parent / "results" / "latency-gpu.json"
PAGE = Path(__file__).parents[1] / "docs" / "latency.md"


class GpuRows(Record, frozen=True):
    """The content of benchmarks/results/latency-gpu.json."""

    machine: dict[str, Any]
    gpu: str
    rows: list[Row]


def on_gpu(
    path: Path, case: Case, precision: Precision, threads: int
) -> Callable[[Pixels], object]:
    """Open a model as an agent does whose plan says CUDA."""
    run = Run(
        spec=replace(case.spec, precision=precision),
        runtime="onnxruntime",
        provider=CUDA,
        threads=threads,
        batch=1,
        num_classes=case.num_classes,
    )
    return open_runtime(path, assignment_of(run), num_classes=case.num_classes).run


def gpu_name() -> str:
    """The GPU and its driver."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def run_measure(options: argparse.Namespace) -> None:
    """Export and time."""
    machine, cases = describe_machine(), plannable()
    export_all(options.work, cases, _note, PRECISIONS)
    rows = measure(
        options.work, cases, rounds=options.rounds, seconds=options.seconds, note=_note,
        precisions=PRECISIONS, threads=(1,), opening=on_gpu,
    )  # fmt: skip
    write_json(options.out, GpuRows(machine=machine, gpu=gpu_name(), rows=rows))


def run_report(options: argparse.Namespace) -> None:
    """Compare, print, and put the table into docs/."""
    kept = read_json(options.out, GpuRows)
    compared = compare(read_profile(str(options.profile)), kept.rows, CUDA)
    table = error_sheet("Sub-models on a GPU, none of them fitted to", compared)
    Console().print(as_rich(table))
    said = f"{kept.gpu}, {kept.machine['date']}, {PRECISIONS[0]} without TF32."
    write_figures(options.page, "benchmarks.latency_gpu", f"{as_markdown(table).strip()}\n\n{said}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description="Predicted against measured latency on a GPU.")
    steps = parser.add_subparsers(required=True)
    for name, run in (("measure", run_measure), ("report", run_report)):
        step = steps.add_parser(name, help=run.__doc__)
        step.set_defaults(run=run)
        step.add_argument("--out", type=Path, default=RESULTS)
        step.add_argument("--work", type=Path, default=Path("/tmp/mdp-latency"))
        step.add_argument("--rounds", type=int, default=8)
        step.add_argument("--seconds", type=float, default=0.12, help="of one burst")
        step.add_argument("--profile", type=Path, help="what the probe wrote")
        step.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
