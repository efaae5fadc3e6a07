"""The same student on every device: whichever answers first, the answer is the same.

Replication against crashes, after RoCoIn (arXiv 2406.14185); re-implemented from the paper's
description. Deviates from it: RoCoIn groups devices and gives each group its own student; here
there is one group, so that the student has to fit the slowest device.
"""

from itertools import combinations

from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome, measured
from benchmarks.rivals.single import student
from mdp.fusion.fuse import probabilities
from partitioner.export.evaluate import accuracy


def run(ground: Ground) -> Outcome:
    """Train one student; every subset of the plan's devices answers as it does."""
    (spec,) = ground.shapes
    calibration, test = student(ground, "replicated", spec)
    data, devices = ground.work.data, range(len(ground.work.plan.assignments))
    scores = {"any": probabilities(test)}
    subsets = [
        measured(members, scores, data.test.targets)
        for size in range(1, len(devices) + 1)
        for members in combinations(devices, size)
    ]
    return Outcome(
        shapes=[spec] * len(devices),
        alone=[subset.accuracy["any"] for subset in subsets[: len(devices)]],
        subsets=subsets,
        headline="any",
        calibration=accuracy(calibration, data.calibration.targets),
    )
