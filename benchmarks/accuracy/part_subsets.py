"""Parts of the picture seen by untouched networks, as runs that the accuracy law is fitted to.

    python -m benchmarks.accuracy.part_subsets --data DATA --weights WEIGHTS --scratch SCRATCH

Public weights of ImageNet-1k, rows cut by name, nothing trained: each network in every region, and
pairs and triples of those that take about as long. Calibration pictures of Imagenette; what fuses
several is fitted to one half of them and measured on the other, in turns. Writes
benchmarks/results/part-subsets.json.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.networks import SEEN, Store, public
from benchmarks.accuracy.subsets import tiny
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.formats.plan import NetworkSpec
from mdp.fusion.fuse import Contribution, fuse
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    Records,
    record_subsets,
)
from partitioner.estimates.catalogue import catalogue
from partitioner.fusion.stacking import fit_subset
from partitioner.networks.families import create
from tools.catalogue import cost

RESULT = RESULTS / "part-subsets.json"
#: Networks whose members are put together: alone, and those that take about as long.
FLEETS = (
    ("lite0-96",), ("lite0-152",), ("lite1-128",), ("lite0-192",),
    ("lite0-128", "lite1-112", "lite2-104"),
)  # fmt: skip
#: The untouched ViT-Ti/16 at 224 px on the test pictures (docs/results/accuracy.md).
TEACHER_PX, TEACHER_ACCURACY = 224, 0.98650
#: Of the pairs and triples of several networks every so many is measured.
_EVERY = 7

Member = tuple[str, str]


def member(body: str, seen: str, num_classes: int) -> RecordedMember:
    """A network and what it sees, as the accuracy law knows it."""
    backbone = public(body)
    known = catalogue()[backbone.name]
    counted = cost(create(backbone, 0).eval(), backbone.image_size)
    network = NetworkSpec(
        name=backbone.name,
        image_size=backbone.image_size,
        parameters=known.parameters + num_classes * (known.width + 1),
        macs=counted.macs + num_classes * known.width,
    )
    return RecordedMember(network=network, region=SEEN[seen], training="untouched")


def run_of(store: Store, bodies: Sequence[str]) -> RecordedRun:
    """The networks in every region, alone and together."""
    data, members = store.data, list(itertools.product(bodies, SEEN))
    targets = np.asarray(data.calibration.targets)
    halves = [np.arange(len(targets)) % 2 == half for half in (0, 1)]

    @cache
    def logits(one: Member) -> Contribution:
        return store.of_public(one[0], "calibration", one[1])

    def right(fleet: tuple[int, ...]) -> float:
        parts = {k: logits(members[one]) for k, one in enumerate(fleet)}
        if len(parts) == 1:
            return float((parts[0].bag.argmax(axis=1) == targets).mean())
        found = np.zeros(len(targets), dtype=bool)
        for fitted, measured in (halves, halves[::-1]):
            weights = fit_subset(_rows(parts, fitted), tuple(parts), targets[fitted])
            fused = fuse(_rows(parts, measured), weights)
            found[measured] = fused.argmax(axis=1) == targets[measured]
        return float(found.mean())

    name = " + ".join(bodies)
    return RecordedRun(
        name=f"untouched, in parts: {name}",
        source="imagenette, untouched",
        teacher=tiny(TEACHER_PX),
        teacher_accuracy=TEACHER_ACCURACY,
        members=[member(*one, len(data.labels)) for one in members],
        subsets=record_subsets(
            (fleet, round(right(fleet), 5)) for fleet in fleets_of(len(members), len(bodies))
        ),
        pictures=len(targets),
        num_classes=len(data.labels),
    )


def _rows(parts: dict[int, Contribution], rows: NDArray[np.bool_]) -> dict[int, Contribution]:
    return {k: Contribution.of([head[rows] for head in one.heads]) for k, one in parts.items()}


def fleets_of(members: int, networks: int) -> Iterator[tuple[int, ...]]:
    """Each member alone, and pairs and triples: of one network all pairs, else a sample of both."""
    yield from ((k,) for k in range(members))
    pairs = list(itertools.combinations(range(members), 2))
    yield from pairs if networks == 1 else pairs[::_EVERY]
    yield from list(itertools.combinations(range(members), 3))[::_EVERY]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.part_subsets")
    for option in ("--data", "--weights", "--scratch"):
        parser.add_argument(option, type=Path, required=True)
    asked = parser.parse_args()
    store = Store(asked.scratch, str(asked.data), asked.weights)
    runs = [run_of(store, bodies) for bodies in FLEETS]
    write_json(RESULT, Records(about="made by benchmarks/accuracy/part_subsets.py", runs=runs))


if __name__ == "__main__":
    main()
