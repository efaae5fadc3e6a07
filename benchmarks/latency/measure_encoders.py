"""Steady-state batch-1 latency of untrained ViT encoders under onnxruntime, one row per shape.

    python -m benchmarks.latency.measure_encoders --name zen4-2-vcpu

Writes `benchmarks/results/encoders-<name>.json`. Encoders are exported as MDP serves them and timed
in rounds, as `python -m benchmarks.latency measure` does. Weights are random: they cost no time.
"""

import argparse
import tempfile
from pathlib import Path

import msgspec

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.models import vit
from benchmarks.harness.results import RESULTS
from benchmarks.latency.measure import measure
from benchmarks.latency.models import export_all
from benchmarks.latency.shapes import Case
from mdp.files import write_json

NUM_CLASSES, ROUNDS, BURST_S = 10, 8, 0.25
#: image_size, patch_size, embed_dim, depth, num_heads.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="goes into the result file's name")
    name = parser.parse_args().name
    cases = [Case(spec=vit(*sizes), num_classes=NUM_CLASSES) for sizes in GRID]
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        export_all(Path(folder), cases, print, ("fp32",))
        rows = measure(Path(folder), cases, ("fp32",), rounds=ROUNDS, seconds=BURST_S, note=print)
    measured = [msgspec.to_builtins(row) for row in rows]
    value = {
        "provider": "CPUExecutionProvider",
        "num_classes": NUM_CLASSES,
        "spinning": False,
        "machine": machine,
        "rows": [row.pop("case")["spec"] | row for row in measured],
    }
    write_json(RESULTS / f"encoders-{name}.json", value)


if __name__ == "__main__":
    main()
