"""Fit the novelty score of every arrival subset, and its thresholds, on calibration logits.

The distance of features takes the place of the members' disagreement where models tell it: it finds
nearly all of the items that resemble none of the classes, alone or together with others.

Without pictures of no class, a score is the plain sum of the signals, each divided by its standard
deviation on known items. With some, a logistic model of the signals is fitted for each size of
subset, and compared with each signal alone and with the plain sum: the largest area under the ROC
curve decides.

Pictures of a class that is taken out of every member's logits do not stand for unknown ones: chosen
by them, the score is the energy, which is the worst at far items, and a model that is fitted to
them learns which of the classes are alike (docs/lab-log.md).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.fusion.fuse import Contribution, FusionWeights, list_subsets, sizes_not_listed
from mdp.fusion.novelty import NoveltyScore
from mdp.fusion.novelty_table import DEFAULT_RATE, Novelty, Signal, SubsetNovelty
from partitioner.fusion.stacking import sample_subsets

Targets = NDArray[np.int64]
Values = NDArray[np.float64]
Members = tuple[int, ...]
#: The signals of a score, and those where models tell the distance of their features.
PLAIN: tuple[Signal, ...] = ("energy", "doubt", "disagreement")
DISTANT: tuple[Signal, ...] = ("energy", "doubt", "distance")
#: Rates that a bundle has thresholds for, at most, and the highest of them.
MOST_RATES, HIGHEST_RATE = 48, 0.5
#: Subsets of a size that its signals are chosen by.
_SAMPLED = 12
#: A signal that varies less than this on known items is none.
_LEAST_SPREAD = 1e-4
#: Penalty of the logistic model's squared weights, against the mean loss of both kinds of items.
_RIDGE = 0.01
_STEPS = 30
#: Of more calibration logits of a member than this, pictures are taken evenly, but not fewer.
_MOST_LOGITS, _FEWEST = 2_000_000, 1000
#: Decimal digits of weights and thresholds.
_DIGITS = 6


def fit_novelty(
    contributions: Mapping[int, Contribution],
    fusion: FusionWeights,
    unknown: Mapping[int, Contribution] | None = None,
    note: Callable[[str], None] = lambda line: None,
    *,
    distance: bool = False,
) -> Novelty:
    """Scores and thresholds from contributions `[N, C]` of known items.

    `unknown` are contributions `[U, C]` of items of no class. With `distance`, all members' models
    tell that of their features in their logits. Where the items are too few for the
    default rate, `note` is told, and the lowest rate that they support is taken.
    """
    items, classes = contributions[0].bag.shape
    if items > (most := max(_FEWEST, _MOST_LOGITS // classes)):
        rows = np.linspace(0, items - 1, most).astype(np.int64)
        contributions = {k: _rows(part, rows) for k, part in contributions.items()}
        items = most
    places = threshold_places(items)
    rates = tuple(_round(place / (items + 1), down=True) for place in places)
    default = max([rate for rate in rates if rate <= DEFAULT_RATE], default=rates[0])
    if default > DEFAULT_RATE:
        note(
            f"unknown items: {items:,} calibration pictures support no rate of rejected known "
            f"items below {default:.2%}, which is taken: {DEFAULT_RATE:.0%} takes "
            f"{round(1 / DEFAULT_RATE) - 1}"
        )
    found, signals = [], DISTANT if distance else PLAIN
    for size in range(1, len(contributions) + 1):
        weights = _size_weights(contributions, fusion, unknown, size, signals)
        for members in _list_of_size(len(contributions), size):
            scores = NoveltyScore(members, fusion).of(contributions, weights)
            found.append(_subset(members, weights, thresholds(scores, places)))
        if size in sizes_not_listed(len(contributions)):
            sample = _sample(len(contributions), size)
            each = [NoveltyScore(one, fusion).of(contributions, weights) for one in sample]
            pooled = [thresholds(scores, places) for scores in each]
            mean = np.mean(pooled, axis=0).tolist()
            found.append(_subset((), weights, mean, size))
    unknown_count = 0 if unknown is None else len(next(iter(unknown.values())).bag)
    return Novelty(
        rates=rates, default=default, pictures=items, subsets=found, unknown=unknown_count
    )


def tells_distance(fusion: FusionWeights) -> bool:
    """Tell whether the models of these members tell the distance of their features."""
    scores = fusion.novelty.subsets if fusion.novelty else ()
    return any("distance" in one.weights for one in scores)


def threshold_places(count: int) -> list[int]:
    """Places k of the k-th largest of `count` scores that are thresholds, of the rates
    k / (count + 1): the lowest, the default one and others in even ratios.
    """
    highest = max(1, int(HIGHEST_RATE * (count + 1)))
    spread = np.geomspace(1, highest, MOST_RATES - 1).round().astype(int).tolist()
    return sorted({1, *spread, max(1, int(DEFAULT_RATE * (count + 1) + 1e-9))})


def thresholds(scores: Values, places: Sequence[int]) -> list[float]:
    """The score above which the `k - 1` strangest known items are, for each k of `places`."""
    found: list[float] = np.sort(scores)[-np.array(places)].tolist()
    return found


def area_under_curve(known: Values, unknown: Values) -> float:
    """Area under the ROC curve: how often an unknown item's score is above a known one's."""
    both = np.concatenate([known, unknown])
    _, place, often = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(often) - (often - 1) / 2)[place]
    above = ranks[len(known) :].sum() - len(unknown) * (len(unknown) + 1) / 2
    return float(above / (len(known) * len(unknown)))


def _rows(part: Contribution, rows: Targets) -> Contribution:
    return Contribution.of([head[rows] for head in part.heads])


def _list_of_size(count: int, size: int) -> list[Members]:
    return [members for members in list_subsets(range(count)) if len(members) == size]


def _sample(count: int, size: int) -> list[Members]:
    """Subsets of one size, all of them where they are few."""
    if size in sizes_not_listed(count):
        return sample_subsets(count, size, max(_SAMPLED, count), seed=0)
    return _list_of_size(count, size)


def _subset(
    members: Members, weights: Mapping[Signal, float], values: Sequence[float], size: int = 0
) -> SubsetNovelty:
    # Rounded up: no more known items are above a threshold than were.
    return SubsetNovelty(
        size=size or len(members),
        weights=dict(weights),
        thresholds=tuple(_round(value) for value in values),
        members=members,
    )


def _round(value: float, *, down: bool = False) -> float:
    scale = 10.0**_DIGITS
    rounded = np.floor(value * scale) if down else np.ceil(value * scale)
    return float(rounded / scale)


def _size_weights(
    contributions: Mapping[int, Contribution],
    fusion: FusionWeights,
    unknown: Mapping[int, Contribution] | None,
    size: int,
    signals: Sequence[Signal],
) -> dict[Signal, float]:
    """The `signals` that count for subsets of one size, by their weights."""
    scored = [
        NoveltyScore(members, fusion) for members in _sample(len(contributions), size)[:_SAMPLED]
    ]
    known = [_values(one, contributions, signals) for one in scored]
    spread = np.concatenate(known).std(axis=0)
    vary = spread > _LEAST_SPREAD
    scale = np.where(vary, 1 / np.maximum(spread, _LEAST_SPREAD), 0.0)
    best = scale
    if unknown is not None:
        strange = [_values(one, unknown, signals) for one in scored]
        model = _logistic(np.concatenate(known) * scale, np.concatenate(strange) * scale)
        compared = [scale, *(np.eye(len(signals))[vary] * scale), model * scale]
        areas = [
            np.mean([
                area_under_curve(one @ weights, other @ weights)
                for one, other in zip(known, strange, strict=True)
            ])
            for weights in compared
        ]  # fmt: skip
        best = compared[int(np.argmax(areas))]
    return {
        signal: float(f"{weight:.{_DIGITS}g}")
        for signal, weight in zip(signals, best.tolist(), strict=True)
        if weight
    } or {"energy": 1.0}


def _values(
    scored: NoveltyScore, contributions: Mapping[int, Contribution], signals: Sequence[Signal]
) -> Values:
    """Values `[N, S]` of signals, of contributions `[N, C]`."""
    found = [scored.of(contributions, {signal: 1.0}) for signal in signals]
    return np.stack(found, axis=-1)


def _logistic(known: Values, unknown: Values) -> Values:
    """Weights `[S]` of a logistic model of unknown `[U, S]` against known items `[N, S]`.

    Both kinds count equally. Newton's method, with a small ridge penalty.
    """
    x = np.concatenate([known, unknown])
    mean = x.mean(axis=0)
    x = np.column_stack([x - mean, np.ones(len(x))])
    y = np.repeat([0.0, 1.0], [len(known), len(unknown)])
    balance = np.repeat([0.5 / len(known), 0.5 / len(unknown)], [len(known), len(unknown)])
    penalty = np.append(np.full(known.shape[1], _RIDGE), 1e-9)
    theta = np.zeros(x.shape[1])
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ theta, -30, 30)))
        gradient = x.T @ (balance * (p - y)) + penalty * theta
        hessian = (x.T * (balance * p * (1 - p))) @ x + np.diag(penalty)
        theta = theta - np.linalg.solve(hessian, gradient)
    found: Values = theta[:-1]
    return found
