"""The labels of pictures, and how far sums of answers are from them. Pure.

Answers of several networks to one picture add up. Where each picture has one label they are
log-probabilities. Where several labels may hold they are weights of evidence (Good, Weight of
Evidence: A Brief Survey, 1985): the log-odds of each label above those of its share of all
pictures, which count once, however many answers there are.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from partitioner.pilot.linear import Array, Index, log_softmax

Flags = NDArray[np.bool_]


class LabelTruth(Protocol):
    """The labels of pictures."""

    def losses(self, answers: Array) -> Array:
        """Cross-entropy `[S]` of summed answers `[S, C]`."""

    def right(self, answers: Array) -> Flags:
        """Tell whether summed answers `[S, C]` are right `[S]`."""

    def part(self, chosen: Flags | slice) -> "LabelTruth":
        """The labels of some of the pictures."""


@dataclass(frozen=True, slots=True)
class OneLabel:
    """Labels that exclude each other."""

    targets: Index

    def losses(self, answers: Array) -> Array:
        """Cross-entropy `[S]` of unnormalised log-probabilities `[S, C]`."""
        found: Array = -log_softmax(answers)[np.arange(len(self.targets)), self.targets]
        return found

    def right(self, answers: Array) -> Flags:
        """Tell whether the likeliest class is the picture's `[S]`."""
        found: Flags = answers.argmax(axis=1) == self.targets
        return found

    def part(self, chosen: Flags | slice) -> "OneLabel":
        """The labels of some of the pictures."""
        return OneLabel(self.targets[chosen])


@dataclass(frozen=True, slots=True)
class SeveralLabels:
    """Labels that do not exclude each other."""

    #: `[S, L]`.
    held: Flags
    #: Log-odds of each label's share of all pictures `[L]`.
    base: Array

    @classmethod
    def of(cls, held: Flags) -> "SeveralLabels":
        """The labels of pictures that stand for all."""
        return cls(held, base_of(held))

    def losses(self, answers: Array) -> Array:
        """Binary cross-entropy `[S]`, summed over the labels, of weights of evidence `[S, L]`."""
        logits = answers + self.base
        found: Array = np.logaddexp(0, np.where(self.held, -logits, logits)).sum(axis=1)
        return found

    def right(self, answers: Array) -> Flags:
        """Tell whether every label is told as it is `[S]`."""
        found: Flags = ((answers + self.base > 0) == self.held).all(axis=1)
        return found

    def part(self, chosen: Flags | slice) -> "SeveralLabels":
        """The labels of some of the pictures, with the shares of all."""
        return SeveralLabels(self.held[chosen], self.base)


def base_of(held: Flags) -> Array:
    """Log-odds `[L]` of the share of pictures `[S, L]` that have each label, which is never all."""
    count = held.sum(axis=0) + 0.5
    found: Array = np.log(count / (len(held) + 1 - count))
    return found
