"""Accuracy of fleets, rivals and ablations from trained networks: docs/results/accuracy.md.

    python -m benchmarks.accuracy --networks FOLDER --data FOLDER --weights FOLDER --scratch FOLDER

`--networks` has what the trainings of benchmarks/results/trainings.json left, `--data` the data
sets by name, `--weights` lite0.safetensors, lite1.safetensors and vit.safetensors of ImageNet-1k
under timm's tensor names, with the classes' names in imagenet1k.txt. All run in fp32 on one
onnxruntime thread; milliseconds are processor time, measured in turns with random weights. Which
network, part of the picture and fleet a latency gets is decided on the calibration split and
reported on the test split. Writes benchmarks/results/accuracy-networks.json and the page.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.compare import Field, compare
from benchmarks.accuracy.networks import (
    BRIEF,
    PUBLIC,
    TRAININGS,
    Store,
    TrainingJob,
    networks_of,
    public,
    read_jobs,
    times_ms,
    unseen_of,
)
from benchmarks.accuracy.page import PAGE, RESULT
from benchmarks.harness.machine import describe_machine
from mdp.files import write_json
from partitioner.networks.families import Backbone

#: Pictures of ImageNet's own validation set, which pretraining has not seen.
UNSEEN = "ILSVRC2012_val_"


def parser(prog: str) -> argparse.ArgumentParser:
    """The options by which trained networks are found."""
    made = argparse.ArgumentParser(prog=prog)
    made.add_argument("--jobs", type=Path, default=TRAININGS)
    for option in ("--networks", "--data", "--weights", "--scratch"):
        made.add_argument(option, type=Path, required=True)
    return made


def latencies(asked: argparse.Namespace) -> dict[Backbone, float]:
    """Milliseconds of all networks of all data sets, whether they came or not."""
    planned = [job.backbone for job in read_jobs(asked.jobs)]
    return times_ms(asked.scratch / "latency", [*planned, *map(public, PUBLIC)])


def open_data(asked: argparse.Namespace, name: str) -> tuple[Store, list[TrainingJob], Field]:
    """One data set, the jobs whose networks were trained whole, and all networks."""
    planned = [job for job in read_jobs(asked.jobs) if job.data == name]
    store = Store(asked.scratch, str(asked.data / name), asked.weights)
    networks = networks_of(store, planned, asked.networks, latencies(asked))
    there = {network.name for network in networks if network.kind != BRIEF}
    whole = [job for job in planned if job.name in there]
    data = store.data
    return store, whole, Field(
        {network.name: network for network in networks},
        np.asarray(data.calibration.targets),
        np.asarray(data.test.targets),
        unseen_of(data, UNSEEN),
    )  # fmt: skip


def main() -> None:
    """Measure, keep, and write the page."""
    asked = parser("python -m benchmarks.accuracy").parse_args()
    found: dict[str, Any] = {"machine": describe_machine(), "precision": "fp32", "threads": 1}
    sets: dict[str, Any] = {}
    for name in dict.fromkeys(job.data for job in read_jobs(asked.jobs)):
        _, whole, field = open_data(asked, name)
        sets[name] = compare(field, name)
        write_json(RESULT, found | {"sets": sets})
        print(f"{name}: {len(whole)} trained networks", flush=True)
    PAGE.write()


if __name__ == "__main__":
    main()
