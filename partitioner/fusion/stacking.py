"""Fit the fusion weights and temperatures of every arrival subset on calibration logits.

For a subset S the fused logits z = sum over k in S of (a_k f_k + b_k c_k) are linear in the 2|S|
scalars (|S| where members have the bag head alone), so their cross-entropy is convex in them and
Newton's method finds the best ones. Scalars and not matrices: with a calibration split of ordinary
size a full matrix per subset overfits.
Where a size has too many subsets to list, one pair of scalars per member is fitted to a balanced
sample of them at once, which is as convex.

Members with bag heads alone may have logits of unlike sizes, as of imported models. Stacking of
these starts as a sum of the members' calibrated logits: each is divided by a temperature of its
own, and counts the less, the more its cross-entropy exceeds the others'. Both are shrunk to their
means by as much as they are uncertain (empirical Bayes), so that the weights are nearly equal where
there are few pictures. Members with boost heads were trained alike: stacking
starts as the better plain rule (boosted or bagged, with its temperature), or as the mean of both
where neither is surely better. It moves away from the start only as far as that surely helps: the
pull toward the start is loosened step by step, and each step has to lower the cross-entropy with
one group of pictures left out. Surely means by some standard errors of the difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.fusion.fuse import (
    MAX_WEIGHT,
    Contribution,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    Temperatures,
    list_subsets,
    sizes_not_listed,
)

#: Ridge penalties toward the start, relative to each scalar's curvature there, descending. The last
#: keeps the scalars finite where the calibration split is separable.
RIDGES = (3.0, 1.0, 0.3, 0.1, 0.03)
#: Standard errors by which a significant difference exceeds 0. Measured on the logits of ten
#: trained ensembles of four, 6 draws of 1,250 calibration pictures each, 15 subsets: 0.6 % of the
#: subsets are more than 0.2 points below the better plain rule on the 10,000 other pictures (at
#: most 0.28). Without the mean as a start 1.1 % are (at most 0.57); with the lowest penalty at once
#: and the better rule as a start 3.3 % are, on three of the ensembles.
STANDARD_ERRORS = 1.5
#: Pictures that the start counts for, at least, as if they had said so: with few the fit stays
#: near. A jackknife of eight scenes and four weights is no guide.
START_PICTURES = 30
#: How fast a member's weight falls with its cross-entropy: by this many times the excess in nats,
#: as exponent, where pictures are many; by half of that with `START_PICTURES`. The sum of
#: calibrated logits is best where each member knows something else. In truth all err on the same
#: hard pictures, so that a much worse one adds its errors alone (docs/lab-log.md).
EXCESS = 4.0
#: Ratio of the spread of members' cross-entropies to its uncertainty that chance exceeds in 5 % of
#: cases for three members (F distribution of 2 degrees of freedom), and in 8 % for two.
CHANCE = 3.0
#: Most subsets in the sample of a size.
SAMPLED = 48
_MAX_STEPS = 50
_CONVERGED = 1e-7
#: Numbers of a slice of the logits: some MB, which fit into a cache.
_AT_ONCE = 2**18
#: A spread of the logits below this is none.
_FLAT = 1e-5
#: Members that are all alike have no variance at all.
_LEAST_VARIANCE = 1e-30

Values = NDArray[np.float64]
Targets = NDArray[np.int64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Term:
    """One fused vector of logits: `parts[rows]` times `theta[scalars]`, summed."""

    rows: Indices
    scalars: Indices


@dataclass(frozen=True, slots=True)
class StackingTask:
    """Find theta `[P]` with the least cross-entropy of `targets` `[N]`, the mean over `terms`.

    `parts` `[R, C, N]` have a mean of 0 over the classes; all terms have equally many rows.
    Pictures are last, since sums over a short last axis are slow.
    """

    parts: NDArray[np.float32]
    targets: Targets
    terms: Sequence[Term]


@dataclass(frozen=True, slots=True)
class StackingStart:
    """Initial scalars, times their best factor, one over the temperature."""

    theta: Values
    factor: float
    #: Cross-entropy of every picture `[N]`, left out of the fit.
    left_out: Values


@dataclass(frozen=True, slots=True)
class Calibration:
    """The factor of a member's logits with the least cross-entropy alone, and its variance."""

    factor: float
    variance: float
    #: Cross-entropy of every picture `[N]`, left out of the fit.
    left_out: Values


def fit_fusion(contributions: Mapping[int, Contribution], targets: Targets) -> FusionWeights:
    """Weights for every arrival subset from contributions `[N, C]` of members 0, 1, ... without
    a gap and targets `[N]`; raises InputError for logits that are not finite.
    """
    for k, part in contributions.items():
        if not np.isfinite(part.heads).all():
            raise InputError(f"sub-model {k}: expected finite calibration logits, found others")
    calibrations = calibrate_members(contributions, targets)
    return FusionWeights(
        num_classes=contributions[0].bag.shape[1],
        subsets=[
            _fit_subset(contributions, members, targets, calibrations)
            for members in list_subsets(contributions)
        ],
        by_size=tuple(
            fit_size(contributions, size, targets) for size in sizes_not_listed(len(contributions))
        ),
    )


def fit_subset(
    contributions: Mapping[int, Contribution], members: Sequence[int], targets: Targets
) -> SubsetWeights:
    """Weights of one subset, and the temperatures of the plain rules."""
    chosen = {k: contributions[k] for k in members}
    calibrations = calibrate_members(chosen, targets)
    return _fit_subset(contributions, members, targets, calibrations)


def _fit_subset(
    contributions: Mapping[int, Contribution],
    members: Sequence[int],
    targets: Targets,
    calibrations: Mapping[int, Calibration],
) -> SubsetWeights:
    parts = _parts(contributions, members)
    every = np.arange(len(parts))
    task = StackingTask(parts, targets, [Term(every, every)])
    a, b, temperatures = _fit(task, len(members), [calibrations[k] for k in members])
    return SubsetWeights(members=tuple(members), a=a, b=b, temperatures=temperatures)


def fit_scales(part: Contribution, weights: SubsetWeights, targets: Targets) -> tuple[float, float]:
    """Factors of a lower rung's boost and bag logits `[N, C]`, with the top's `weights` kept.

    They have the least cross-entropy of the member alone; equal where one head has no weight, and
    moved apart only as far as that surely helps.
    """
    k = weights.members[0]
    own = weights.a + weights.b
    heads = zip(own, part.heads[-len(own) :], strict=True)
    parts = _parts({k: Contribution.of([np.float32(one) * head for one, head in heads])}, (k,))
    every = np.arange(len(parts))
    task = StackingTask(parts, targets, [Term(every, every)])
    theta = _loosen(task, _start(task, np.ones(len(parts)))).tolist()
    return theta[0], theta[-1]


def fit_size(contributions: Mapping[int, Contribution], size: int, targets: Targets) -> SizeWeights:
    """Weights that all subsets of one size share, fitted to a sample of them."""
    count = len(contributions)
    calibrations = calibrate_members(contributions, targets)
    sample = [np.array(members) for members in sample_subsets(count, size, SAMPLED, seed=0)]
    parts = _parts(contributions, range(count))
    rows = [
        np.concatenate([members + at for at in range(0, len(parts), count)]) for members in sample
    ]
    terms = [Term(one, one) for one in rows]
    task = StackingTask(parts, targets, terms)
    a, b, temperatures = _fit(task, size, [calibrations[k] for k in range(count)])
    return SizeWeights(size=size, a=a, b=b, temperatures=temperatures)


def sample_subsets(count: int, size: int, most: int, seed: int) -> list[tuple[int, ...]]:
    """At most `most` different subsets of `size` out of `count` members, each member equally often.

    Windows on shuffled circles of all members; circles that repeat a subset are drawn anew. Needs
    many more subsets than `most`.
    """
    random = np.random.default_rng([seed, count, size])
    chosen: set[tuple[int, ...]] = set()
    while len(chosen) + count <= most:
        circle = np.tile(random.permutation(count), 2)
        windows = {tuple(sorted(circle[at : at + size].tolist())) for at in range(count)}
        if not windows & chosen:
            chosen |= windows
    return sorted(chosen)


def cross_entropy(task: StackingTask, theta: Values) -> float:
    """Mean negative log-likelihood of the targets under theta `[P]`."""
    return float(_losses(task, theta).mean())


def _parts(
    contributions: Mapping[int, Contribution], members: Sequence[int]
) -> NDArray[np.float32]:
    """The boost heads' logits, if all members have them, then the bag heads', `[R, C, N]`.

    Their mean over the classes is 0.
    """
    boosts = {k: c.boost for k, c in contributions.items() if c.boost is not None}
    heads = [contributions[k].bag for k in members]
    if len(boosts) == len(contributions):
        heads = [boosts[k] for k in members] + heads
    return np.stack([(head - head.mean(axis=1, keepdims=True)).T for head in heads]).astype(
        np.float32, order="C"
    )


def calibrate_members(
    contributions: Mapping[int, Contribution], targets: Targets
) -> dict[int, Calibration]:
    """The calibration of every member's bag head, `[N, C]`, as `fit_fusion` takes them."""
    one = [Term(np.zeros(1, int), np.zeros(1, int))]
    return {
        k: _calibrate(StackingTask(_parts({k: Contribution(None, part.bag)}, (k,)), targets, one))
        for k, part in contributions.items()
    }


def _calibrate(task: StackingTask) -> Calibration:
    """The calibration of the one part of `task`."""
    start = _start(task, np.ones(1))
    factor = start.factor
    gradients, hessian = _derivatives(task, np.array([factor]))
    curvature = max(float(hessian[0, 0]), _FLAT**2)
    # Of two estimates the larger: where no picture is wrong the gradients have no spread.
    spread = float((gradients[0] ** 2).sum()) / (len(task.targets) * curvature) ** 2
    variance = max(spread, 1 / (len(task.targets) * curvature))
    return Calibration(factor, variance, start.left_out)


def shrink(values: Values, variances: Values, chance: float = 1.0) -> Values:
    """Values `[M]`, each nearer to their mean by as much as it is uncertain (James-Stein).

    Of the spread, `chance` times the mean of `variances` is taken to be uncertainty.
    """
    if len(values) == 1:
        return values
    between = max(0.0, float(values.var(ddof=1) - chance * variances.mean()))
    precision = 1 / np.maximum(between + variances, _LEAST_VARIANCE)
    mean = float((precision * values).sum() / precision.sum())
    found: Values = mean + between * precision * (values - mean)
    return found


def start_weights(calibrations: Sequence[Calibration]) -> Values:
    """Weights `[M]` of members in the sum of logits that stacking starts from, up to a factor."""
    factors = shrink(
        np.array([one.factor for one in calibrations]),
        np.array([one.variance for one in calibrations]),
    )
    losses = np.stack([one.left_out for one in calibrations])
    # Pictures are hard for all members alike: differences vary less than the losses.
    excess = losses - losses.mean(axis=0)
    means = excess.mean(axis=1)
    pictures = losses.shape[1]
    variances = ((excess - means[:, np.newaxis]) ** 2).sum(axis=1) / pictures**2
    if (count := len(losses)) > 1:
        # Centring over the members took a part of the variance, as `shrink` counts it.
        variances *= count / (count - 1)
    counted = pictures / (pictures + START_PICTURES)
    surely = shrink(means, variances, CHANCE)
    weights: Values = factors * np.exp(-EXCESS * counted * surely)
    return weights


def _fit(
    task: StackingTask, size: int, calibrations: Sequence[Calibration]
) -> tuple[tuple[float, ...], tuple[float, ...], Temperatures]:
    """The scalars a and b of `task`, and the temperatures of the plain rules.

    Each term has `size` bag heads; a is empty where the parts are bag heads alone.
    """
    two_heads = len(task.terms[0].rows) == 2 * size
    count = len(task.parts) // (1 + two_heads)
    weights = np.full(count, 1 / size)
    if two_heads:
        none = np.zeros(count)
        start = bagged = _start(task, np.concatenate([none, weights]))
        boosted = _start(task, np.concatenate([np.ones(count), none]))
        temperatures = Temperatures(boosted=1 / boosted.factor, bagged=1 / bagged.factor)
        gains = bagged.left_out - boosted.left_out
        if _is_significant(gains):
            start = boosted
        elif not _is_significant(-gains):
            start = _start(task, boosted.theta + bagged.theta)
    else:
        temperatures = Temperatures(bagged=1 / _start(task, weights).factor)
        start = _start(task, start_weights(calibrations))
    scalars = tuple(_loosen(task, start).tolist())
    return scalars[: len(scalars) - count], scalars[len(scalars) - count :], temperatures


def _loosen(task: StackingTask, start: StackingStart) -> Values:
    """The scalars `[P]`, as far away from `start` as that surely helps."""
    theta, left_out = start.theta, start.left_out
    curvature = np.diag(_derivatives(task, start.theta)[1])
    least = START_PICTURES / len(task.targets)
    for ridge in [ridge for ridge in RIDGES if ridge >= least] or [least]:
        pull = _pull(curvature, ridge)
        looser, loss = _newton(task, theta, start.theta, pull)
        if not _is_significant(left_out - loss) or np.abs(looser).max() > MAX_WEIGHT:
            break
        theta, left_out = looser, loss
    return theta


def _is_significant(gains: Values) -> bool:
    """Tell whether the mean of gains `[N]` is surely above 0, by their spread over pictures."""
    error = float(np.sqrt(((gains - gains.mean()) ** 2).sum())) / len(gains)
    return float(gains.mean()) > STANDARD_ERRORS * error


def _start(task: StackingTask, plain: Values) -> StackingStart:
    """Scalars `plain` `[P]` times the best positive factor."""
    fused = np.stack(
        [
            np.tensordot(plain[term.scalars].astype(np.float32), task.parts[term.rows], axes=1)
            for term in task.terms
        ]
    )
    terms = [Term(np.array([row]), np.zeros(1, int)) for row in range(len(fused))]
    scaled = replace(task, parts=fused, terms=terms)
    # Start near logits of unit size: elsewhere the softmax is flat and Newton's method slow.
    spread = float(fused.std(dtype=np.float64))
    first = 1 / spread if spread > _FLAT else 1.0
    center = np.array([first])
    pull = _pull(np.diag(_derivatives(scaled, center)[1]), RIDGES[-1])
    found, left_out = _newton(scaled, center, center, pull)
    most = MAX_WEIGHT / max(1.0, float(np.abs(plain).max()))
    factor = min(max(float(found[0]), 1e-3 * first, 1 / MAX_WEIGHT), most)
    if factor != float(found[0]):
        left_out = _losses(scaled, np.array([factor]))
    return StackingStart(plain * factor, factor, left_out)


def _pull(curvature: Values, ridge: float) -> Values:
    """Ridge penalty `[P]` of each scalar."""
    pull: Values = ridge * curvature + 1e-12
    return pull


def _newton(
    task: StackingTask, theta: Values, center: Values, pull: Values
) -> tuple[Values, Values]:
    """Minimise cross-entropy plus a ridge toward `center` from `theta`, by damped Newton steps.

    Returns the minimum `[P]` and the cross-entropy there of every picture, left out of the fit
    `[N]`. Leaving picture i out moves the minimum by H^-1 g_i / N to first order (the infinitesimal
    jackknife), with its gradient g_i, which adds g_i' H^-1 g_i / N to its loss; the mean of that is
    Takeuchi's criterion.
    """

    def objective(point: Values) -> float:
        return cross_entropy(task, point) + float(pull @ (point - center) ** 2) / 2

    value = objective(theta)
    for _ in range(_MAX_STEPS):
        gradients, hessian = _derivatives(task, theta)
        gradient = gradients.mean(axis=1) + pull * (theta - center)
        step = np.linalg.solve(hessian + np.diag(pull), gradient)
        share = 1.0
        while (lower := objective(theta - share * step)) > value and share > 1e-6:
            share /= 2
        gained = value - lower
        if gained > 0:
            theta, value = theta - share * step, lower
        if gained < _CONVERGED:
            break
    # The derivatives are those before the last step, which is negligible.
    moved = np.linalg.solve(hessian + np.diag(pull), gradients) / len(task.targets)
    return theta, _losses(task, theta) + (gradients * moved).sum(axis=0)


def _slices(task: StackingTask) -> list[slice]:
    """Slices of the pictures of at most `_AT_ONCE` logits."""
    _, classes, pictures = task.parts.shape
    step = max(1, _AT_ONCE // (len(task.terms[0].rows) * classes))
    return [slice(at, at + step) for at in range(0, pictures, step)]


def _losses(task: StackingTask, theta: Values) -> Values:
    """Negative log-likelihood of every picture's target `[N]`, the mean over the terms."""
    losses = np.zeros(len(task.targets))
    for cut in _slices(task):
        targets = task.targets[cut]
        for term in task.terms:
            z = np.tensordot(theta[term.scalars], task.parts[term.rows, :, cut], axes=1)
            losses[cut] += _log_sum_exp(z) - z[targets, np.arange(len(targets))]
    return losses / len(task.terms)


def _derivatives(task: StackingTask, theta: Values) -> tuple[Values, Values]:
    """Every picture's gradient `[P, N]`, and the mean Hessian `[P, P]`, of the cross-entropy.

    In single precision; `_losses` checks every step in double precision.
    """
    gradients = np.zeros((len(theta), len(task.targets)))
    hessian = np.zeros((len(theta), len(theta)))
    for cut in _slices(task):
        targets = task.targets[cut]
        for term in task.terms:
            part = task.parts[term.rows, :, cut]
            z = np.tensordot(theta[term.scalars].astype(np.float32), part, axes=1)
            weighted = part * np.exp(z - _log_sum_exp(z))
            mean = weighted.sum(axis=1)
            gradients[term.scalars, cut] += mean - part[:, targets, np.arange(len(targets))]
            second = np.tensordot(weighted, part, axes=([1, 2], [1, 2])) - mean @ mean.T
            hessian[np.ix_(term.scalars, term.scalars)] += second
    return gradients / len(task.terms), hessian / (len(task.terms) * len(task.targets))


def _log_sum_exp(z: NDArray[Any]) -> NDArray[Any]:
    """Over the classes, of logits `[C, N]`."""
    top = z.max(axis=0)
    total: NDArray[Any] = top + np.log(np.exp(z - top).sum(axis=0))
    return total
