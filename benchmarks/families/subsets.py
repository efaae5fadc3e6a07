"""How right every pair and triple of trained networks is: what members of unlike families add.

    python -m benchmarks.families.subsets --jobs jobs.json --trained OUT --logits LOGITS --data DATA

Jobs and OUT are those of benchmarks.families.train; LOGITS has NAME.npz for each job, both heads'
on the calibration and the test split, as benchmarks.families.measure keeps them. Fusion is fitted
on the calibration split. Writes benchmarks/results/family-subsets.json, which the accuracy law is
fitted to.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families.train import Job, read_jobs
from mdp.files import write_json
from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.fusion.fuse import Contribution, fuse
from partitioner.data.datasets import open_dataset
from partitioner.estimates.accuracy_law import Start, Training
from partitioner.estimates.accuracy_records import RecordedMember, RecordedRun, Records, recorded
from partitioner.estimates.catalogue import catalogue
from partitioner.export.catalogue import cost
from partitioner.fusion.stacking import fit_subset
from partitioner.networks.families import create

RESULT = Path(__file__).parents[1] / "results" / "family-subsets.json"
MOST = 3


def member(job: Job, pictures: int, epochs: float, num_classes: int) -> RecordedMember:
    """A trained network as the accuracy law knows it."""
    name, size, depth = job.backbone.name, job.backbone.image_size, job.backbone.depth
    plain = name.startswith("vit")
    start: Start = ("cut" if plain else "pretrained") if job.weights else "scratch"
    training = Training(pictures=pictures, epochs=round(epochs, 2), start=start)
    if plain:
        spec = tiny(size, depth or 12)
        return RecordedMember(submodel=spec, training=training)
    known = catalogue()[name]
    counted = cost(create(job.backbone, 0).eval(), size)
    network = NetworkSpec(
        name=name,
        image_size=size,
        parameters=known.parameters + 2 * num_classes * (known.width + 1),
        macs=counted.macs + 2 * num_classes * known.width,
    )
    return RecordedMember(network=network, training=training)


def tiny(size: int, depth: int = 12) -> SubModelSpec:
    """ViT-Ti/16."""
    return SubModelSpec(
        image_size=size, patch_size=16, embed_dim=192, depth=depth, num_heads=3, mlp_ratio=4.0
    )


def measured(jobs: list[Job], asked: Any, data_name: str) -> RecordedRun:
    """One data set."""
    data = open_dataset(str(asked.data / data_name))
    mine = [job for job in jobs if job.data == data_name]
    heads = {}
    for job in mine:
        kept = np.load(asked.logits / f"{job.name}.npz")
        heads[job.name] = (
            Contribution(kept["cb"], kept["cg"]), Contribution(kept["tb"], kept["tg"]),
        )  # fmt: skip
    # Only what was taught is a member; the teacher stands for what it is taught.
    teachers = [job for job in mine if not job.teacher]
    taught = [job for job in mine if job.teacher]
    accuracies = {
        names: right([heads[name] for name in names], data)
        for count in range(1, MOST + 1)
        for names in itertools.combinations([job.name for job in taught], count)
    }
    order = [job.name for job in taught]
    teacher = teachers[0] if teachers else None
    accuracy = right([heads[teacher.name]], data) if teacher else asked.untouched_teacher
    return RecordedRun(
        name=f"families: {data_name}",
        source=f"{data_name}, vit_tiny_patch16_224",
        teacher=tiny(teacher.backbone.image_size if teacher else 224),
        teacher_accuracy=accuracy,
        members=[
            member(job, len(data.train), done(asked.trained, job), len(data.labels))
            for job in taught
        ],
        subsets=recorded(
            (tuple(order.index(name) for name in names), round(accuracy, 5))
            for names, accuracy in accuracies.items()
        ),
        pictures=len(data.test),
        num_classes=len(data.labels),
    )


def done(trained: Path, job: Job) -> float:
    """Epochs that the job came to."""
    return float(json.loads((trained / f"{job.name}.json").read_text())["epochs"])


def right(members: list[tuple[Contribution, Contribution]], data: Any) -> float:
    """Share of the test pictures that these members together are right on."""
    calibration = {k: both[0] for k, both in enumerate(members)}
    weights = fit_subset(calibration, tuple(range(len(members))), data.calibration.targets)
    logits = fuse({k: both[1] for k, both in enumerate(members)}, weights)
    return float((logits.argmax(axis=1) == data.test.targets).mean())


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families.subsets")
    for option in ("--jobs", "--trained", "--logits", "--data"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument(
        "--untouched-teacher", type=float, default=0.987,
        help="accuracy of a teacher that was not trained: ViT-Ti/16 on Imagenette",
    )  # fmt: skip
    asked = parser.parse_args()
    jobs = read_jobs(asked.jobs)
    names = dict.fromkeys(job.data for job in jobs)
    runs = [measured(jobs, asked, name) for name in names]
    write_json(RESULT, Records(about="made by benchmarks/families/subsets.py", runs=runs))


if __name__ == "__main__":
    main()
