"""Fit a cascade: the members of the first stage, and the threshold of its answers.

The first stage's answer is final where its probability is above the lowest threshold with which at
most `MAX_LOSS` of the calibration pictures get a wrong final answer that all members together have
right. Pictures that only the first stage has right do not offset these: so the count grows
monotonically as the threshold falls.
"""

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mdp.formats.bundle import CascadeAccuracy, PerRule
from mdp.formats.plan import Plan
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import (
    Contribution,
    Fusion,
    FusionWeights,
    Logits,
    fuse,
    probabilities,
    rule_for,
    weights_for,
)
from partitioner.fusion.cascade_cost import cost, in_time

Targets = NDArray[np.int64]
Members = tuple[int, ...]
#: Right answers that the first stage may lose, as a share of the calibration pictures.
MAX_LOSS = 0.003
#: Least calibration pictures: `MAX_LOSS` of fewer is less than two.
MIN_PICTURES = 500
#: Members of a first stage at most.
MOST_FIRST = 2
#: Digits to which thresholds are rounded up: the last bits differ between batch sizes.
_DIGITS = 6


def fit_cascade(
    plan: Plan, contributions: Mapping[int, Contribution], targets: Targets, fusion: FusionWeights
) -> Cascade | None:
    """The cascade of least energy, or of least computing where the plan has no energy.

    From calibration logits `[N, C]` and their labels `[N]`. First stages with which both stages fit
    into the plan's deadline are preferred. None for too few pictures, for one member, or if no
    first stage passes a threshold.
    """
    count = len(contributions)
    if len(targets) < MIN_PICTURES:
        return None

    def fit_threshold(first: Members, wanted: Fusion) -> tuple[float, NDArray[np.bool_]]:
        """The threshold of a first stage under one rule, and the pictures `[N]` above it."""
        scores = _scores(contributions, first, wanted, fusion)
        confidence, right = scores.max(axis=1), scores.argmax(axis=1) == targets
        found = threshold(confidence, together[wanted] & ~right)
        return found, confidence > found

    everyone = tuple(range(count))
    together = {
        rule: _scores(contributions, everyone, rule, fusion).argmax(axis=1) == targets
        for rule in fusion.rules
    }
    found: list[tuple[bool, float, Members]] = []
    for size in range(1, min(MOST_FIRST, count - 1) + 1):
        for first in combinations(everyone, size):
            _, sure = fit_threshold(first, "stacked")
            if sure.any():
                spent = cost(plan, first, float((~sure).mean()))
                found.append((not in_time(plan, first), spent, first))
    if not found:
        return None
    first = min(found)[-1]
    _, sure = fit_threshold(first, "stacked")
    return Cascade(
        first=first,
        pictures=len(targets),
        escalated=float((~sure).mean()),
        **{rule: fit_threshold(first, rule)[0] for rule in fusion.rules},
    )


def threshold(confidence: Logits, lost: NDArray[np.bool_]) -> float:
    """The lowest threshold above which at most `MAX_LOSS` of all pictures `[N]` are `lost`."""
    order = np.argsort(-confidence, kind="stable")
    too_many = np.flatnonzero(np.cumsum(lost[order]) > MAX_LOSS * len(lost))
    if not len(too_many):
        return 0.0
    scale = 10.0**_DIGITS
    return min(1.0, math.ceil(float(confidence[order[too_many[0]]]) * scale) / scale)


def measure_cascade(
    contributions: Mapping[int, Contribution],
    targets: Targets,
    fusion: FusionWeights,
    cascade: Cascade,
) -> CascadeAccuracy:
    """Accuracy and escalations of a cascade on logits `[N, C]` and labels `[N]`, all members in."""
    everyone = tuple(sorted(contributions))

    def under(wanted: Fusion) -> tuple[float, float]:
        scores = _scores(contributions, cascade.first, wanted, fusion)
        sure = scores.max(axis=1) > cascade.threshold(wanted)
        whole = _scores(contributions, everyone, wanted, fusion).argmax(axis=1)
        labels = np.where(sure, scores.argmax(axis=1), whole)
        return float((~sure).mean()), float((labels == targets).mean())

    found = {rule: under(rule) for rule in fusion.rules}
    return CascadeAccuracy(
        first=cascade.first,
        escalated=PerRule(**{rule: share for rule, (share, _) in found.items()}),
        accuracy=PerRule(**{rule: right for rule, (_, right) in found.items()}),
    )


def _scores(
    contributions: Mapping[int, Contribution],
    members: Members,
    wanted: Fusion,
    fusion: FusionWeights,
) -> Logits:
    """Probabilities `[N, C]` of ascending `members`, as a client has them with `wanted`."""
    rule = rule_for(members, wanted, fusion)
    return probabilities(fuse(contributions, weights_for(members, rule, fusion)))
