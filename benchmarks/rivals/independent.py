"""K distilled students that know nothing of each other, averaged and stacked.

Deep ensembles (Lakshminarayanan, Pritzel and Blundell, arXiv 1612.01474) of distilled students with
the members' shapes; re-implemented from the paper's description. Deviates from it: shapes differ,
the students learn from the teacher too. `averaged` is the mean of logits or of probabilities,
whichever is better for that subset on the calibration split. `stacked` fits one scalar per student
and subset with the product's own code, as ours are fitted; there is no second head.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome, Subset, measured, stacked_subsets
from benchmarks.rivals.single import student
from mdp.fusion.fuse import Contribution, Logits, probabilities
from partitioner.export.evaluate import accuracy


def run(ground: Ground) -> Outcome:
    """Train and measure the students; `stacked` is the headline, for it is the stronger rival."""
    data = ground.work.data
    students = [student(ground, f"independent-{k}", spec) for k, spec in enumerate(ground.shapes)]
    calibration, test = (dict(enumerate(logits)) for logits in zip(*students, strict=True))
    stacked, right = stacked_subsets(
        _one_headed(calibration), data.calibration.targets, _one_headed(test), data.test.targets
    )
    subsets = []
    for found in stacked:
        mean = _averaged(calibration, test, found.members, data.calibration.targets)
        plain = measured(found.members, {"averaged": mean}, data.test.targets)
        subsets.append(
            Subset(
                members=found.members,
                accuracy={"stacked": found.accuracy["stacked"], **plain.accuracy},
                ece={"stacked": found.ece.get("stacked", float("nan")), **plain.ece},
            )
        )
    return Outcome(
        shapes=ground.shapes,
        alone=[accuracy(logits, data.test.targets) for logits in test.values()],
        subsets=subsets,
        headline="stacked",
        calibration=right,
    )


def _one_headed(logits: Mapping[int, Logits]) -> dict[int, Contribution]:
    """Contributions of students that have a bag head only."""
    return {k: Contribution(np.zeros_like(values), values) for k, values in logits.items()}


def _averaged(
    calibration: Mapping[int, Logits],
    test: Mapping[int, Logits],
    members: Sequence[int],
    targets: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Logits:
    """Probabilities `[N, C]` by the mean that does better on the calibration split."""
    known = [_means(calibration, members), _means(test, members)]
    right = [accuracy(scores, targets) for scores in known[0]]
    return known[1][int(np.argmax(right))]


def _means(logits: Mapping[int, Logits], members: Sequence[int]) -> list[Logits]:
    """Mean of probabilities, and softmax of the mean of logits, `[N, C]` each."""
    chosen = np.stack([logits[k] for k in members])
    return [probabilities(chosen).mean(axis=0), probabilities(chosen.mean(axis=0))]
