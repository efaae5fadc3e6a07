"""Every precision in every runtime: milliseconds of one picture, and what the gate makes of it.

    python -m benchmarks.fusion.quantisation --bundle FOLDER [--data cifar10/]

Writes `results/quantisation.json`, and the figures of its page: the members of a bundle of plain
ViTs in fp32 and untrained ViT-S of 128 and 224 px, in each way that this machine has, with one and
two threads; and with `--data` the accuracies that `mdp-partition quantize` finds with this machine
standing for every device. Each way of a model gets its turn in every round, so that drift of the
machine meets all of them.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.models import vit
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept, measured_on
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.errors import AgentError
from mdp.files import write_json
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import SubModelSpec
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import CPU, Execution, Runtime
from mdp.runtimes.select import open_runtime
from partitioner.data.datasets import open_dataset
from partitioner.export.quantize import WAYS, quantised
from partitioner.export.quantize_bundle import quantise
from partitioner.export.quantize_trials import Asked
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.submodel import SubModel
from partitioner.run.progress import Progress

#: ViT-S, the smaller of timm's two common ones, at two picture sizes.
UNTRAINED = {f"ViT-S at {size} px": size for size in (128, 224)}
ROUNDS, WARM_UP, MIN_RUNS = 9, 3, 5
#: Measuring time of each way, in all rounds.
SECONDS = 3.0
#: Percentage points, as `mdp-partition quantize` has it.
MAX_LOSS = 0.005


def models(folder: Path) -> dict[str, tuple[bytes, SubModelSpec, int]]:
    """Name -> exported fp32 model, its shape and classes."""
    bundle = Bundle.open(folder)
    found = {
        f"cifar10 {a.k}": (
            bundle.verified(model_path(a.k)).read_bytes(),
            a.vit,
            len(bundle.manifest.labels),
        )
        for a in bundle.manifest.plan.assignments
    }
    for name, size in UNTRAINED.items():
        spec = vit(size, 16, 384, 12, 6)
        torch.manual_seed(0)
        model = to_onnx(ServedMember(SubModel(spec, 100)), size, ["boost", "bag"], {})
        found[name] = (model, spec, 100)
    return found


def noise(spec: SubModelSpec, count: int) -> Pixels:
    """Pictures of nothing `[N, S, S, 3]`."""
    shape = (count, spec.image_size, spec.image_size, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def rows_of(
    name: str, model: bytes, spec: SubModelSpec, num_classes: int, threads: int
) -> list[dict[str, Any]]:
    """One row per way of running `model`."""
    runtimes: dict[tuple[str, str], Runtime] = {}
    refused: dict[tuple[str, str], str] = {}
    bytes_of: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            path = Path(folder) / f"{way[0]}.onnx"
            path.write_bytes(quantised(model, way[0], noise(spec, 64)))
            bytes_of[way] = path.stat().st_size
            execution = Execution(
                runtime=way[1],
                provider=CPU,
                precision=way[0],
                image_size=spec.image_size,
                threads=threads,
            )
            try:
                runtimes[way] = open_runtime(
                    ModelFile.read(path), execution, num_classes=num_classes
                )
            except AgentError as error:
                refused[way] = str(error)
    runs = {way: partial(runtime.run, noise(spec, 1)) for way, runtime in runtimes.items()}
    blocks = in_turns(runs, ROUNDS, least=MIN_RUNS, seconds=SECONDS / ROUNDS, warm_up=WARM_UP)
    times = {way: spread(found) for way, found in blocks.items()}
    plain_ms = times["fp32", "onnxruntime"]["latency_ms"]
    common = {"model": name, "spec": msgspec.to_builtins(spec), "threads": threads}
    return [
        {
            **common,
            "precision": way[0],
            "runtime": way[1],
            "file_bytes": bytes_of[way],
            **(
                {"refused": refused[way]}
                if way in refused
                else {**times[way], "of_fp32": round(times[way]["latency_ms"] / plain_ms, 3)}
            ),
        }
        for way in WAYS
    ]


def spread(rounds: list[list[float]]) -> dict[str, float]:
    """The median round's median, and the fastest and the slowest round's."""
    medians = sorted(float(np.median(block)) for block in rounds)
    return {
        "latency_ms": round(medians[len(medians) // 2], 4),
        "fastest_round_ms": round(medians[0], 4),
        "slowest_round_ms": round(medians[-1], 4),
    }


def gated(data: str, served: Path) -> dict[str, Any]:
    """What the gate keeps of the bundle, if this machine stands for each of its devices."""
    bundle = Bundle.open(served)
    devices = [a.device for a in bundle.manifest.plan.assignments]
    asked = Asked(max_loss=MAX_LOSS, profiles=[], here=devices)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bundle"
        quantise(bundle, open_dataset(data), None, asked, out, Path(folder), Progress())
        manifest = Bundle.open(out).manifest
    assert manifest.evaluation is not None
    return {
        "threads": [a.threads for a in bundle.manifest.plan.assignments],
        "kept": [
            {"k": a.k, "precision": a.spec.precision, "runtime": a.runtime}
            for a in manifest.plan.assignments
        ],
        "quantisation": msgspec.to_builtins(manifest.quantisation),
        "subsets": msgspec.to_builtins(manifest.evaluation.subsets),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True, help="of plain ViTs, in fp32")
    parser.add_argument("--data", help="CIFAR-10 with train/ and test/, for the accuracies")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": describe_machine(), "rows": []}
    for name, (model, spec, classes) in models(arguments.bundle).items():
        for threads in (1, 2):
            rows = rows_of(name, model, spec, classes, threads)
            result["rows"] += rows
            for row in rows:
                print(line(row), flush=True)
    if arguments.data:
        result["gate"] = gated(arguments.data, arguments.bundle)
    write_json(RESULTS / "quantisation.json", result)
    PAGE.write()


def line(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['threads']} threads, {row['precision']} in {row['runtime']}"
    if "refused" in row:
        return f"{what}: {row['refused']}"
    return f"{what}: {row['latency_ms']:.3g} ms, {row['of_fp32']:.0%}"


def figures(result: dict[str, Any]) -> str:
    by_model: dict[tuple[str, int], list[str]] = {}
    for row in result["rows"]:
        cell = "-" if "refused" in row else f"{row['latency_ms']:.3g} ({row['of_fp32']:.0%})"
        by_model.setdefault((row["model"], row["threads"]), []).append(cell)
    rows = [(*model, *cells) for model, cells in by_model.items()]
    heads = ("model", "threads", *(" ".join(way) for way in WAYS))
    text = (
        f"{measured_on(result['machine'])}. Milliseconds of one picture, and the share of fp32 in "
        "onnxruntime.\n\n" + table(rows, *((head, f"{{0[{i}]}}") for i, head in enumerate(heads)))
    )
    cores = result["machine"]["cores"]
    return f"{text}\n\n{_gate_figures(result['gate'], cores)}" if "gate" in result else text


def _gate_figures(gate: dict[str, Any], cores: int) -> str:
    record = gate["quantisation"]
    all_in, worst = record["test"], record["worst"]
    tried = table(
        [{"k": member["k"]} | one for member in record["members"] for one in member["tried"]],
        ("sub-model", "{k}"),
        ("precision", "{precision}"),
        ("runtime", "{runtime}"),
        ("share of fp32's time",
         lambda one: f"{one['compute_ms'] / one['fp32_ms']:.0%}" if one["fp32_ms"] else ""),
        ("lost, alone", lambda one: "" if one["loss"] is None else f"{one['loss'] * 100:.2f}"),
        ("", lambda one: "kept" if one["kept"] else ""),
    )  # fmt: skip
    return (
        "The gate on the bundle of plain ViTs that [real-pictures.md]"
        f"({PAGE.link('real-pictures.md')}) makes, this machine standing for every device "
        f"with its planned threads ({', '.join(map(str, gate['threads']))} on {cores} cores), loss "
        f"in points on {record['calibration_pictures']:,} calibration pictures:\n\n{tried}\n\n"
        f"On {record['test_pictures']:,} test pictures, stacked: all members in "
        f"{all_in['fp32']:.2%} in fp32 and {all_in['now']:.2%} with what was kept; the arrival "
        f"subset that loses most, {list(worst['members'])}, {worst['fp32']:.2%} and "
        f"{worst['now']:.2%}."
    )


PAGE = Page("benchmarks.fusion.quantisation", lambda: figures(kept("quantisation")))

if __name__ == "__main__":
    main()
