"""Measure how hard awaited members pull, for early termination, and what it does. Numpy."""

from collections.abc import Mapping

import numpy as np

from mdp.formats.bundle import EarlyShare
from mdp.fusion.early_exit import EarlyBounds, EarlyRule, Members, Pull, early_pairs, lead, part_of
from mdp.fusion.fuse import Contribution, Fusion, FusionWeights, fuse, rule_for, weights_for

#: With fewer calibration pictures their largest pull says too little.
MIN_PICTURES = 500
#: The logits of so many numbers are worked on at once.
_AT_ONCE = 2**20
#: Room for the last bits of logits, which differ between a batch and a single picture.
_ROUNDING = 1e-3


def measure_bounds(
    contributions: Mapping[int, Contribution], fusion: FusionWeights
) -> EarlyBounds | None:
    """The largest pulls in calibration logits `[N, C]`; None for too few pictures or one member."""
    pictures = len(contributions[0].bag)
    pairs = early_pairs(len(contributions))
    if pictures < MIN_PICTURES or not pairs:
        return None
    pulls = tuple(
        Pull(
            members=members,
            arrived=arrived,
            boosted=_pull(contributions, members, arrived, "boosted", fusion),
            stacked=_pull(contributions, members, arrived, "stacked", fusion),
            bagged=_pull(contributions, members, arrived, "bagged", fusion),
        )
        for members, arrived in pairs
    )
    return EarlyBounds(pictures=pictures, pulls=pulls)


def _pull(
    contributions: Mapping[int, Contribution],
    members: Members,
    arrived: Members,
    wanted: Fusion,
    fusion: FusionWeights,
) -> float:
    """The largest pull of one pair under one rule, rounded up; 0 if none pulled at all."""
    rule = rule_for(members, wanted, fitted=fusion.fitted(members) is not None)
    weights = weights_for(members, rule, fusion)
    awaited = tuple(k for k in members if k not in arrived)
    here, there = part_of(weights, arrived, bias=True), part_of(weights, awaited, bias=False)
    pictures, classes = contributions[0].bag.shape
    step, largest = max(1, _AT_ONCE // classes), 0.0
    for at in range(0, pictures, step):
        part = _rows(contributions, slice(at, at + step))
        leaders, _ = lead(fuse(part, here))
        missing = fuse(part, there)
        against = missing.max(axis=1) - missing[np.arange(len(missing)), leaders]
        largest = max(largest, float(against.max()))
    return round(largest + _ROUNDING, 4) if largest else 0.0


def _rows(contributions: Mapping[int, Contribution], rows: slice) -> dict[int, Contribution]:
    return {k: Contribution(part.boost[rows], part.bag[rows]) for k, part in contributions.items()}


def early_shares(
    contributions: Mapping[int, Contribution], fusion: FusionWeights, bounds: EarlyBounds
) -> tuple[EarlyShare, ...]:
    """What the rule does to logits `[N, C]` it was not measured on, stacked, with all possible."""
    rule = EarlyRule(bounds, fusion, "stacked")
    everyone = tuple(sorted(contributions))
    labels = fuse(contributions, weights_for(everyone, "stacked", fusion)).argmax(axis=1)
    shares = []
    for members, arrived in early_pairs(len(everyone)):
        if members != everyone:
            continue
        awaited = [k for k in everyone if k not in arrived]
        own = fuse(contributions, weights_for(arrived, "stacked", fusion)).argmax(axis=1)
        ended = rule.ends({k: contributions[k] for k in arrived}, awaited)
        shares.append(
            EarlyShare(
                arrived=arrived,
                ended=float(ended.mean()),
                changed=float((ended & (own != labels)).mean()),
            )
        )
    return tuple(shares)
