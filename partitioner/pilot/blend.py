"""Blends of a fitted classifier and the rows of the network's own, which needed no pictures. Pure.

With few pictures a network's own rows are better than what is fitted to them, far from its recipe's
picture size worse, and both together often better than either (docs/lab-log.md).
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from partitioner.pilot.linear import Array, Classifier, HeldOutPredictions, Index, log_softmax

#: Factors that are tried. Own rows are too sure at picture sizes other than their recipe's.
_OWN, _FITTED = (0.25, 0.5, 1.0), (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Blend:
    """Rows of a network's own classifier, and factors of their logits and of the fitted ones."""

    #: It reads the first part of the feature.
    own: Classifier
    own_factor: float
    fitted_factor: float

    def with_fitted(self, fitted: Classifier) -> Classifier:
        """The one linear classifier that gives the blend's answers."""
        weight = self.fitted_factor * fitted.weight
        weight[:, : self.own.weight.shape[1]] += self.own_factor * self.own.weight
        return Classifier(
            weight=weight, bias=self.own_factor * self.own.bias + self.fitted_factor * fitted.bias
        )


def find_blend(
    left_out: HeldOutPredictions, own: Classifier, features: NDArray[np.floating], targets: Index
) -> tuple[HeldOutPredictions, Blend | None]:
    """The predictions with the least cross-entropy of blends with `own`, and that blend.

    None, and `left_out` itself, where the fitted classifier alone is best. `features` are `[N, D]`,
    `targets` `[N]`.
    """
    read = features[:, : own.weight.shape[1]]
    own_answers = log_softmax(own.logits(np.asarray(read, dtype=np.float64)))
    best, found = _loss(left_out.answers, targets), None
    predictions = left_out
    for own_factor, fitted_factor in product(_OWN, _FITTED):
        blend = Blend(own, own_factor, fitted_factor)
        answers = log_softmax(
            blend.own_factor * own_answers + blend.fitted_factor * left_out.answers
        )
        if (loss := _loss(answers, targets)) < best:
            best, found = loss, blend
            predictions = replace(left_out, answers=answers)
    return predictions, found


def _loss(log_probabilities: Array, targets: Index) -> float:
    return -float(log_probabilities[np.arange(len(targets)), targets].mean())
