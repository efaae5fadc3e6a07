"""What a method is worth: each member alone, and every arrival subset under its own rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mdp.files import Record
from mdp.formats.plan import SubModelSpec
from mdp.fusion.fuse import Contribution, Logits, fuse, weights_for
from partitioner.export.evaluate import accuracy, expected_calibration_error, subset_accuracies
from partitioner.fusion.stacking import fit_fusion

Targets = NDArray[np.int64]


class Subset(Record, frozen=True):
    """Accuracy and expected calibration error, as fractions, of one subset under each rule."""

    members: tuple[int, ...]
    accuracy: dict[str, float]
    ece: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trained method on the test split; `alone[k]` is member k without the others."""

    shapes: Sequence[SubModelSpec]
    alone: list[float]
    subsets: list[Subset]
    #: The rule that the method is known for; the table shows it first.
    headline: str
    #: All in, under the headline rule, on the calibration split: what choices are made by.
    calibration: float
    #: What else a reader has to know, in words.
    notes: dict[str, str] = field(default_factory=dict)


def measured(members: Sequence[int], scores: Mapping[str, Logits], targets: Targets) -> Subset:
    """A subset from probabilities `[N, C]` per rule."""
    return Subset(
        members=tuple(members),
        accuracy={rule: accuracy(values, targets) for rule, values in scores.items()},
        ece={rule: expected_calibration_error(v, targets) for rule, v in scores.items()},
    )


def stacked_subsets(
    calibration: Mapping[int, Contribution],
    calibration_targets: Targets,
    test: Mapping[int, Contribution],
    test_targets: Targets,
) -> tuple[list[Subset], float]:
    """Every subset under the product's three rules, and the calibration accuracy, all in, stacked.

    Fitted and measured by the product's own code.
    """
    fusion = fit_fusion(calibration, calibration_targets)
    subsets = [
        Subset(
            members=found.members,
            accuracy={
                "stacked": found.stacked,
                "boosted": found.boosted,
                "bagged": found.bagged,
            },
            ece={
                rule: getattr(found.ece, rule)
                for rule in ("stacked", "boosted", "bagged")
                if found.ece is not None
            },
        )
        for found in subset_accuracies(test, fusion, test_targets)
    ]
    everyone = weights_for(tuple(calibration), "stacked", fusion)
    return subsets, accuracy(fuse(calibration, everyone), calibration_targets)
