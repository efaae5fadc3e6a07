"""Steady-state batch-1 latency of untrained ViT encoders under onnxruntime, one row per shape.

    python -m benchmarks.latency.measure_encoders --name zen4-2-vcpu

Writes `benchmarks/results/encoders-<name>.json`. Each encoder is exported as MDP serves it: uint8
pixels `[N, H, W, 3]` in, normalisation in the graph, two linear heads, dynamic batch. Weights are
random: an encoder's time does not depend on them. Every row says how much CPU time others used
meanwhile; on a second run under the same name the quieter of two rows of a shape is kept.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import torch

from benchmarks.harness.machine import describe_machine
from mdp.files import write_json
from mdp.formats.plan import SubModelSpec
from partitioner.networks.submodel import SubModel

NUM_CLASSES = 10
WARM_UP_S = 0.4
MIN_RUNS = 25

#: image_size, patch_size, embed_dim, depth, num_heads; mlp_ratio is 4 throughout.
GRID = (
    (12, 4, 48, 2, 3),
    (16, 4, 64, 2, 2),
    (16, 4, 96, 4, 3),
    (24, 4, 64, 4, 2),
    (24, 4, 96, 6, 3),
    (32, 4, 96, 4, 3),
    (32, 4, 192, 6, 3),
    (48, 8, 96, 4, 3),
    (48, 8, 192, 6, 3),
    (64, 8, 96, 9, 3),
    (64, 8, 192, 4, 3),
    (64, 8, 192, 12, 3),
    (112, 16, 192, 6, 3),
    (128, 16, 384, 4, 6),
    (128, 16, 384, 12, 6),
    (160, 16, 384, 6, 6),
    (224, 16, 192, 12, 3),
    (224, 16, 384, 6, 6),
    (224, 16, 768, 12, 12),
)


class Encoder(torch.nn.Module):
    """uint8 pixels `[N, H, W, 3]` -> two heads' logits `[N, num_classes]`."""

    def __init__(self, spec: SubModelSpec) -> None:
        super().__init__()
        self.submodel = SubModel(spec, NUM_CLASSES)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        boost, bag, _ = self.submodel((pixels.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
        return boost, bag


def export(spec: SubModelSpec, path: Path) -> None:
    """Write an untrained encoder of this shape as ONNX."""
    pixels = torch.zeros(2, spec.image_size, spec.image_size, 3, dtype=torch.uint8)
    torch.onnx.export(
        Encoder(spec).eval(),
        (pixels,),
        path,
        input_names=["pixels"],
        output_names=["boost", "bag"],
        dynamic_shapes={"pixels": {0: torch.export.Dim("batch", min=1, max=64)}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def measure(path: Path, spec: SubModelSpec, threads: int, seconds: float) -> dict[str, object]:
    """Milliseconds of one picture: median, 10th and 90th percentile, and how quiet it was."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shape = (1, spec.image_size, spec.image_size, 3)
    feed = {"pixels": np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)}
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        session.run(None, feed)
    times_ms: list[float] = []
    others_before, begin = others_cpu_s(), time.perf_counter()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_ms) < MIN_RUNS:
        start = time.perf_counter()
        session.run(None, feed)
        times_ms.append((time.perf_counter() - start) * 1e3)
    others_s = others_cpu_s() - others_before
    tenths = statistics.quantiles(times_ms, n=10)
    return {
        "latency_ms": round(statistics.median(times_ms), 4),
        "p10_ms": round(tenths[0], 4),
        "p90_ms": round(tenths[-1], 4),
        "runs": len(times_ms),
        # Rounding of clock ticks can make the difference slightly negative.
        "others_cores": max(0.0, round(others_s / (time.perf_counter() - begin), 2)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def others_cpu_s() -> float:
    """CPU seconds that everything but this process has used since the machine started (Linux)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[:8])
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy_s - own.user - own.system


def _virtual() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "hypervisor" in info.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="goes into the result file's name")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time per row")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    result = Path(__file__).parents[1] / "results" / f"encoders-{arguments.name}.json"
    rows = msgspec.json.decode(result.read_bytes())["rows"] if result.exists() else []
    best = {_shape(row): row for row in rows}
    for image_size, patch_size, embed_dim, depth, num_heads in GRID:
        spec = SubModelSpec(
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=4.0,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "encoder.onnx"
            export(spec, path)
            for threads in arguments.threads:
                row = measure(path, spec, threads, arguments.seconds)
                row = {**msgspec.to_builtins(spec), "threads": threads, **row}
                print(row, flush=True)
                if row["others_cores"] <= best.get(_shape(row), row)["others_cores"]:
                    best[_shape(row)] = row
        write_json(
            result,
            {
                "provider": "CPUExecutionProvider",
                "num_classes": NUM_CLASSES,
                "spinning": False,
                "machine": {"virtual": _virtual(), **describe_machine()},
                "rows": list(best.values()),
            },
        )
    print(result)


def _shape(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[key] for key in ("image_size", "patch_size", "embed_dim", "depth", "threads"))


if __name__ == "__main__":
    main()
