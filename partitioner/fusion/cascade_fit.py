"""Fit a cascade: which members are asked first, and how sure they have to be. Numpy.

The first stage's answer is final where its probability is above a threshold: the lowest with which
at most `MAX_LOSS` of the calibration pictures get a wrong final answer where all members together
are right. What the first stage has right and all together wrong is not set off against that, so the
accuracy on these pictures is at most so much lower, and the count only grows as the threshold
falls: no lucky dip of it is picked.
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
#: With fewer calibration pictures none or one of them might be lost, which says too little.
MIN_PICTURES = 500
#: Members of a first stage at most.
MOST_FIRST = 2
#: Probabilities are rounded up to so many digits: a batch's last bits differ from one picture's.
_DIGITS = 6


def fit_cascade(
    plan: Plan,
    contributions: Mapping[int, Contribution],
    targets: Targets,
    fusion: FusionWeights,
) -> Cascade | None:
    """The cascade of least energy, or least computing where the plan does not tell energy.

    From calibration logits `[N, C]` and their labels `[N]`. First stages with which both stages fit
    into the plan's deadline go before others. None for too few pictures, one member, or if no first
    stage is ever sure enough.
    """
    count = len(contributions)
    if len(targets) < MIN_PICTURES:
        return None

    def fitted(first: Members, wanted: Fusion) -> tuple[float, NDArray[np.bool_]]:
        """The threshold of one first stage under one rule, and the pictures `[N]` it is sure of."""
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
            _, sure = fitted(first, "stacked")
            if sure.any():
                spent = cost(plan, first, float((~sure).mean()))
                found.append((not in_time(plan, first), spent, first))
    if not found:
        return None
    first = min(found)[-1]
    _, sure = fitted(first, "stacked")
    return Cascade(
        first=first,
        pictures=len(targets),
        escalated=float((~sure).mean()),
        **{rule: fitted(first, rule)[0] for rule in fusion.rules},
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
    """What a cascade does to logits `[N, C]` with their labels `[N]`, all members there."""
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
