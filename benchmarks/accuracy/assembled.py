"""Accuracy of an assembled bundle, and its members' latency beside a teacher's.

    python -m benchmarks.accuracy.assembled --bundle BUNDLE --teacher vit_tiny_patch16_224

Accuracy is the evaluation in the bundle's manifest. Latency is processor time of one onnxruntime
thread, all in turns, the teacher in fp32 with drawn weights. Writes
benchmarks/results/assembled.json.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.files import write_bytes, write_json
from mdp.formats.bundle import Bundle
from mdp.runtimes.onnxruntime import open_session
from partitioner.export.write import to_onnx
from partitioner.networks.families import Backbone, FamilyMember, ServedFamily

#: Rounds in which the models take turns, and runs of each in a round.
ROUNDS, RUNS = 6, 9
_TEACHER = "teacher"


def measured(bundle: Bundle, teacher: str, image_size: int, scratch: Path) -> dict[str, Any]:
    """What is kept: accuracy of every subset, and milliseconds of every model."""
    assignments, labels = bundle.manifest.plan.assignments, bundle.manifest.labels
    whole = FamilyMember(Backbone(teacher, image_size), len(labels)).eval()
    write_bytes(scratch, to_onnx(ServedFamily(whole), image_size, whole.heads, {}))
    models = {_TEACHER: (scratch, image_size)}
    models |= {a.device: (bundle.model(a.k).path, a.spec.image_size) for a in assignments}
    random, runs = np.random.default_rng(0), {}
    for name, (path, size) in models.items():
        pixels = random.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
        runs[name] = partial(open_session(path).run, None, {"images": pixels})
    blocks = in_turns(runs, ROUNDS, least=RUNS, clock=time.process_time)
    members = range(len(assignments))
    subsets = (s for n in members for s in itertools.combinations(members, n + 1))
    return {
        "machine": describe_machine(),
        "ms": {name: min(float(np.median(one)) for one in own) for name, own in blocks.items()},
        "members": {a.device: f"{a.spec.outline} at {a.spec.image_size} px" for a in assignments},
        "accuracy": [
            {"members": [assignments[k].device for k in subset],
             "share": bundle.expected_accuracy(subset, "stacked")}
            for subset in subsets
        ],
    }  # fmt: skip


def figures() -> str:
    """The table of the page."""
    found = kept("assembled")
    teacher_ms, shown = found["ms"][_TEACHER], found["members"]
    rows = [{"name": "the teacher, fp32", "ms": teacher_ms, "share": None}]
    for subset in found["accuracy"]:
        names = subset["members"]
        whole = len(names) == len(shown)
        name = "all" if whole else " + ".join(shown[name] for name in names)
        ms = max(found["ms"][name] for name in names)
        rows.append({"name": name, "ms": ms, "share": subset["share"]})
    return table(
        rows,
        ("answered", "{name}"),
        ("ms of the slowest", "{ms:.2f}"),
        ("of the teacher's", lambda row: f"{row['ms'] / teacher_ms:.2f}"),
        ("accuracy", lambda row: "" if row["share"] is None else f"{row['share']:.1%}"),
    )


PAGE = Page("benchmarks.accuracy.assembled", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.assembled")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--scratch", type=Path, default=Path("teacher.onnx"))
    asked = parser.parse_args()
    bundle = Bundle.open(asked.bundle)
    found = measured(bundle, asked.teacher, asked.image_size, asked.scratch)
    write_json(RESULTS / "assembled.json", found)
    PAGE.write()


if __name__ == "__main__":
    main()
