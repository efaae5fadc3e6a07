"""Trained networks and fleets of them as runs that the accuracy law can be held against.

    python -m benchmarks.accuracy.subsets --networks FOLDER --data FOLDER --weights FOLDER \
        --scratch FOLDER

Arguments as for benchmarks.accuracy. Of networks that the catalogue knows, those that the teacher
alone taught from pretrained weights or from nothing, whole or for a part of the epochs; and fleets
of each budget and seed, and of the seeds of one network, in parts too.
Writes benchmarks/results/network-subsets.json.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.__main__ import open_data, parser
from benchmarks.accuracy.compare import FLEET, FLEETS, SEEDS, Field
from benchmarks.accuracy.networks import TrainingJob, parts_of, read_jobs
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.formats.plan import NetworkSpec, SubModelSpec
from partitioner.estimates.accuracy_law import Start, Training
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    Records,
    record_subsets,
)
from partitioner.estimates.catalogue import catalogue
from partitioner.networks.families import create
from tools.catalogue import cost

RESULT = RESULTS / "network-subsets.json"
KINDS = ("", "short", "scratch")
#: The untouched ViT-Ti/16 of ImageNet-1k on Imagenette, and its picture size.
UNTOUCHED_TEACHER = ("vit-224-untouched", 224)


def member(job: TrainingJob, pictures: int, epochs: float, num_classes: int) -> RecordedMember:
    """A trained network as the accuracy law knows it."""
    name, size, depth = job.backbone.name, job.backbone.image_size, job.backbone.depth
    plain = name.startswith("vit")
    start: Start = ("cut" if plain else "pretrained") if job.weights else "scratch"
    training = Training(pictures=pictures, epochs=round(epochs, 2), start=start)
    if plain:
        return RecordedMember(submodel=tiny(size, depth or 12), training=training)
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


def run_of(
    own: Field,
    jobs: Sequence[TrainingJob],
    name: str,
    pictures: int,
    num_classes: int,
    folder: Path,
) -> RecordedRun:
    """One data set's networks, and fleets of those that have one seed and were trained alike."""
    chosen = [
        job for job in jobs
        if parts_of(job.name)[1] in KINDS
        and (job.backbone.name in catalogue() or job.backbone.name.startswith("vit"))
    ]  # fmt: skip
    fleets = fleets_of(own, name, {job.name: k for k, job in enumerate(chosen)})
    taught_by = next(job.teacher for job in chosen)
    teacher = next((job for job in jobs if job.name == taught_by), None)
    untouched, size = UNTOUCHED_TEACHER
    right = own.right([teacher.name if teacher else untouched])
    epochs = [json.loads((folder / f"{job.name}.json").read_text())["epochs"] for job in chosen]
    return RecordedRun(
        name=f"second recipe: {name}",
        source=f"{name}, vit_tiny_patch16_224, second recipe",
        teacher=tiny(teacher.backbone.image_size if teacher else size),
        teacher_accuracy=round(float(right.mean()), 5),
        members=[
            member(job, pictures, done, num_classes)
            for job, done in zip(chosen, epochs, strict=True)
        ],
        subsets=record_subsets(
            (fleet, round(float(own.right([chosen[k].name for k in fleet]).mean()), 5))
            for fleet in [*((k,) for k in range(len(chosen))), *fleets]
        ),
        pictures=len(own.test),
        num_classes=num_classes,
    )


def fleets_of(own: Field, name: str, known: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The fleets of each budget and seed, whole and in parts, and the seeds of one network."""
    alike: list[list[str | None]] = []
    for bodies in FLEETS[name]:
        alike += [[own.one(body, "", seed) for body in bodies] for seed in SEEDS]
        alike += [list(own.seeds(body)) for body in bodies]
    numbers = [[known[one] for one in fleet if one is not None and one in known] for fleet in alike]
    found = {
        tuple(sorted(some))
        for fleet in numbers
        for count in range(2, FLEET + 1)
        for some in itertools.combinations(fleet, count)
    }
    return sorted(found, key=lambda fleet: (len(fleet), fleet))


def main() -> None:
    """Measure and write."""
    asked = parser("python -m benchmarks.accuracy.subsets").parse_args()
    runs = []
    for name in dict.fromkeys(job.data for job in read_jobs(asked.jobs)):
        store, jobs, own = open_data(asked, name)
        if jobs:
            data = store.data
            runs.append(run_of(own, jobs, name, len(data.train), len(data.labels), asked.networks))
    write_json(RESULT, Records(about="made by benchmarks/accuracy/subsets.py", runs=runs))


if __name__ == "__main__":
    main()
