"""Fit by which scores an item differs from the good ones: tails, fusion and thresholds. Pure.

Good items decide alone how rare a score is and which threshold rejects which share of them. Members
share what one has too few good items for: the shape of the tail, and of its scale as much as they
are alike (docs/adr/0027-inspection-in-the-model.md).
Defective ones, or without any pictures with a planted patch, choose the power by which the cameras'
surprises are fused: the largest area under the ROC curve, of every second one; the others measure
the share that every arrival subset finds.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.fusion.anomaly import fuse_surprises, surprises_of
from mdp.fusion.anomaly_table import KNOTS, MAXIMUM, MEAN, Anomaly, ScoreTail, SubsetAnomaly
from mdp.fusion.fuse import list_subsets, sizes_not_listed
from partitioner.fusion.novelty_fit import area_under_curve, threshold_places
from partitioner.fusion.stacking import sample_subsets

Values = NDArray[np.float64]
Members = tuple[int, ...]
#: Good items that a tail needs: two beyond the highest knot.
LEAST_GOOD = 20
#: Items whose excesses thresholds are made of: this share of the good ones, and so many at least.
_TAIL_SHARE, _TAIL_LEAST = 0.2, 10
#: Powers that are compared: the maximum, which is taken where none is better, to the mean.
POWERS = (MAXIMUM, 8, 4, 2, MEAN)
#: A good item this many decades rarer than the rarest of as many has a defect, or is another item.
SUSPICIOUS = 5.0
#: Subsets of an unlisted size that its thresholds are the mean of.
_SAMPLED = 12
#: Decimal digits of scores and thresholds.
_DIGITS = 6
_LEAST_DECADE = 1e-6


def fit_tails(good: Mapping[int, Values]) -> list[ScoreTail]:
    """Fit the rates of every member's scores to those of good items `[N]`, by member.

    Scores less their member's median, over its scale, have one distribution. A scale is the spread
    between the median and the last knot, which a few defects among the good items hardly change;
    its logarithm is drawn to the members' mean (Efron and Morris, Journal of the American
    Statistical Association 68, 1973): all the way where the spreads differ by no more than those of
    so few items do, hardly where networks differ. The slope beyond the last knot is that between
    the median and it: of an exponential distribution it is the same everywhere.
    """
    members = sorted(good)
    middles = [float(np.median(good[k])) for k in members]
    scales = _shared_scales([_spread(good[k]) for k in members], len(good[members[0]]))
    pooled = np.concatenate(
        [
            (good[k] - middle) / scale
            for k, middle, scale in zip(members, middles, scales, strict=True)
        ]
    )
    knots = np.quantile(pooled, [1 - share for share in KNOTS])
    decade = _spread(pooled) / np.log10(KNOTS[1] / KNOTS[-1])
    tails = []
    for middle, scale in zip(middles, scales, strict=True):
        first, second, third, last = (middle + scale * float(knot) for knot in knots)
        tails.append(
            ScoreTail(
                scores=(_round(first), _round(second), _round(third), _round(last)),
                decade=max(_round(scale * decade), _LEAST_DECADE),
            )
        )
    return tails


def _spread(scores: Values) -> float:
    """Distance of the last knot from the median; of equal scores a little."""
    middle, last = np.quantile(scores, [1 - KNOTS[1], 1 - KNOTS[-1]])
    return max(float(last - middle), abs(float(last)) * 1e-3, _LEAST_DECADE)


def _shared_scales(spreads: Sequence[float], count: int) -> list[float]:
    """Scales by the spreads of members' scores, of `count` items each."""
    logs = np.log(spreads)
    if len(logs) == 1:
        return list(spreads)
    # Order statistics of exponential numbers: the spread has a variance of (10 - 2) / N.
    by_chance = (1 / KNOTS[-1] - 1 / KNOTS[1]) / count / np.log(KNOTS[1] / KNOTS[-1]) ** 2
    apart = max(float(logs.var(ddof=1)), by_chance)
    own = 1 - by_chance / apart
    scales: list[float] = np.exp(logs.mean() + own * (logs - logs.mean())).tolist()
    return scales


def tail_thresholds(fused: Values, places: Sequence[int]) -> list[float]:
    """The surprises above which `k` of N + 1 good items are, for each k of `places`.

    `fused` are those of N good items. Excesses of the m highest ones over the next are exponential;
    a further item is above it by t with the probability (1 + t / sum of them) ** -m: how little
    is known of their mean is counted (Lawless, Technometrics 13, 1971). Further down, it is the
    k-th largest.
    """
    count, order = len(fused), np.sort(fused)[::-1]
    m = min(max(_TAIL_LEAST, int(_TAIL_SHARE * count)), count - 1)
    excess = float((order[:m] - order[m]).sum())
    found = []
    for k in places:
        beyond = order[m] + excess * (((m + 1) / k) ** (1 / m) - 1)
        found.append(float(beyond if k <= m else order[k - 1]))
    return found


def fit_anomaly(
    good: Mapping[int, Values],
    strange: Mapping[int, Values],
    *,
    rate: float,
    measured: Mapping[int, Values] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Anomaly:
    """Tails, power and thresholds by scores of good items `[N]` of every member.

    `strange` are scores `[D]` of items that the power is chosen by, `measured` `[E]` those of
    defects that the shares found are measured on. Where the good items are too few for `rate`,
    `note` is told, and the lowest rate that they support is taken. Raises InputError for too few
    good items.
    """
    count = len(good[0])
    check_count(count)
    members = sorted(good)
    tails = fit_tails(good)
    usual, other = surprises_of(good, tails), surprises_of(strange, tails)
    power = max(
        POWERS,
        key=lambda each: area_under_curve(
            fuse_surprises([usual[k] for k in members], each),
            fuse_surprises([other[k] for k in members], each),
        ),
    )
    wanted = max(1, int(rate * (count + 1) + 1e-9))
    places = sorted({*threshold_places(count), wanted})
    rates = tuple(_down(place / (count + 1)) for place in places)
    default = rates[places.index(wanted)]
    if default > rate:
        note(
            f"good scenes: {count:,} support no rate of rejected good items below {default:.2%}, "
            f"which is taken: {rate:.2%} takes {int(np.ceil(1 / rate - 1e-9)) - 1:,}"
        )
    defects = None if measured is None else surprises_of(measured, tails)
    subsets = []
    for members_of in list_subsets(members):
        subsets.append(_subset(members_of, usual, defects, power, places))
    for size in sizes_not_listed(len(members)):
        sample = sample_subsets(len(members), size, _SAMPLED, seed=0)
        each = [_subset(one, usual, defects, power, places) for one in sample]
        mean = np.mean([one.thresholds for one in each], axis=0).tolist()
        found = np.mean([one.found for one in each], axis=0).tolist() if defects else ()
        subsets.append(SubsetAnomaly(size=size, thresholds=tuple(mean), found=tuple(found)))
    return Anomaly(
        tails=tuple(tails),
        power=power,
        rates=rates,
        default=default,
        good=count,
        subsets=subsets,
        defective=0 if measured is None else len(measured[0]),
    )


def check_count(count: int) -> None:
    """Raise InputError for too few good items."""
    if count < LEAST_GOOD:
        raise InputError(
            f"expected at least {LEAST_GOOD} good scenes to learn how they differ, got {count}"
        )


def suspicious(good: Mapping[int, Values]) -> list[int]:
    """Good items that are far too rare to be good, the strangest first."""
    worst = np.max([*surprises_of(good, fit_tails(good)).values()], axis=0)
    limit = np.log10(len(worst)) + SUSPICIOUS
    order = np.argsort(-worst, kind="stable")
    return [int(row) for row in order if worst[row] > limit]


def lone_sides(
    good: Mapping[int, Values], patched: Mapping[int, Values], cameras: Mapping[int, str | None]
) -> dict[int, Values]:
    """Scores of items with a planted patch before one camera each, in turn; the others see good.

    Members of one camera, and of single pictures all (their camera is None), see it together.
    """
    sides = list(dict.fromkeys(cameras[k] for k in sorted(good)))
    count = len(good[min(good)])
    return {
        k: np.where(np.arange(count) % len(sides) == sides.index(cameras[k]), patched[k], good[k])
        for k in sorted(good)
    }


def _subset(
    members: Members,
    usual: Mapping[int, Values],
    defects: Mapping[int, Values] | None,
    power: int,
    places: Sequence[int],
) -> SubsetAnomaly:
    fused = fuse_surprises([usual[k] for k in members], power)
    limits = [_up(one) for one in tail_thresholds(fused, places)]
    found: tuple[float, ...] = ()
    if defects is not None:
        other = fuse_surprises([defects[k] for k in members], power)
        found = tuple(round(float((other > limit).mean()), 4) for limit in limits)
    return SubsetAnomaly(size=len(members), thresholds=tuple(limits), members=members, found=found)


def _round(value: float) -> float:
    return round(float(value), _DIGITS)


def _up(value: float) -> float:
    return float(np.ceil(value * 10.0**_DIGITS) / 10.0**_DIGITS)


def _down(value: float) -> float:
    return float(np.floor(value * 10.0**_DIGITS) / 10.0**_DIGITS)
