"""What views of several cameras add together, fitted to evaluated bundles of scenes.

Members with cameras of their own share neither view nor errors as networks on one picture do: with
capabilities c_k their capability is

    c(S) = (sum over k in S of c_k ** p) ** (1 / p)

for one p, `sharpness`, that fits the measured subsets best: docs/results/scenes.md has its errors.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from mdp.formats.bundle import Bundle
from partitioner.estimates.accuracy import Predictor, shipped_law
from partitioner.estimates.accuracy_law import capability_of
from partitioner.estimates.accuracy_records import RecordedSubset, evaluation_of, recorded

#: Why what views add is not known.
NO_SCENES = "what the views add together is unknown: no scenes measured"
#: Values of p that are tried: members that add almost all they have, to such that add nothing.
_SHARPNESS = np.geomspace(1, 64, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The fitted law."""

    sharpness: float
    #: Mean absolute error of the subsets that it was fitted to, as a fraction of scenes.
    error: float
    subsets: int

    def accuracy(self, capabilities: Sequence[float]) -> float:
        """Share of right answers of members that all arrived."""
        return _accuracy(capabilities, self.sharpness)

    def __str__(self) -> str:
        return (
            f"what the views add together is as in {self.subsets} measured subsets of cameras, "
            f"off by {100 * self.error:.1f} points on average"
        )


def read_scenes(paths: Iterable[Path]) -> list[list[RecordedSubset]]:
    """The measured subsets of each bundle of several cameras among bundles and files of runs.

    Raises ConfigError for such a bundle that was never evaluated.
    """
    found = []
    for path in paths:
        if path.is_dir() and (manifest := Bundle.open(path).manifest).plan.cameras:
            subsets = evaluation_of(path, manifest).subsets
            found.append(recorded((subset.members, subset.stacked) for subset in subsets))
    return found


def fit_views(scenes: Sequence[Sequence[RecordedSubset]]) -> Views | None:
    """The law of all these subsets; None where no subset of several members was measured."""
    measured: list[tuple[list[float], float]] = []
    for subsets in scenes:
        alone = {s.members[0]: s.accuracy for s in subsets if len(s.members) == 1}
        measured += [
            ([capability_of(min(alone[k], 1 - 1e-6)) for k in s.members], s.accuracy)
            for s in subsets
            if len(s.members) > 1 and alone.keys() >= set(s.members)
        ]
    if not measured:
        return None
    errors = np.array(
        [[_accuracy(parts, p) - accuracy for parts, accuracy in measured] for p in _SHARPNESS]
    )
    best = int(np.argmin((errors**2).mean(axis=1)))
    return Views(
        sharpness=float(_SHARPNESS[best]),
        error=float(np.abs(errors[best]).mean()),
        subsets=len(measured),
    )


def _accuracy(capabilities: Sequence[float], sharpness: float) -> float:
    together = float(np.linalg.norm(capabilities, ord=sharpness))
    return -math.expm1(-together)


def seeing(predictor: Predictor, views: Views | None) -> Predictor:
    """`predictor` of members with cameras of their own; without measured scenes it says so."""
    if views is not None:
        law = msgspec.structs.replace(
            predictor.law, sharpness=views.sharpness, same_view=0.0, same_model=0.0
        )
        error = max(predictor.typical_error, views.error)
        # The teacher sees one view.
        return replace(predictor, law=law, beyond=math.inf, typical_error=error, views=str(views))
    errors = shipped_law().errors
    return replace(
        predictor,
        unknown="; ".join(filter(None, (predictor.unknown, NO_SCENES))),
        typical_error=max(predictor.typical_error, errors.unknown_left_out),
        spread=errors.unknown,
    )
