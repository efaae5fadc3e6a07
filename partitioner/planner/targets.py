"""Searches over latency targets: Pareto front, accuracy floor, nearest target. Pure."""

import math
from dataclasses import dataclass, replace

from mdp.errors import InputError, PlanRefused
from mdp.formats.plan import Plan, PredictedAccuracy
from partitioner.estimates.latency_quantiles import LatencyQuantile
from partitioner.estimates.network import waits_ms
from partitioner.planner.limits import PlanLimits
from partitioner.planner.local_search import LEAST_GAIN, evenly_spread
from partitioner.planner.placement import Placements
from partitioner.planner.problem import (
    Problem,
    Solution,
    expected_accuracy,
    latency_ms,
    predict_accuracy,
)
from partitioner.planner.search import (
    nothing_fits,
    placements_within,
    round_up,
    solution_of,
    two_by_ms,
)

#: Most latency targets of a Pareto front.
PARETO_TARGETS = 16
#: Targets between the slowest candidate alone and the same after all other crops.
WAIT_STEPS = 16
#: Factors of longer targets, and most targets tried: each costs a search.
_LONGER, _TRIED = (1.25, 1.6, 2.5), 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A plan; none is predicted to be as accurate in less time."""

    latency_ms: float
    accuracy: PredictedAccuracy
    members: int
    replicas: int
    energy_j: float | None


def plan_with_accuracy(problem: Problem, floor: float, limit_ms: float | None = None) -> Solution:
    """The fastest plan whose expected accuracy is at least `floor`, a share below 1.

    Raises PlanRefused, naming the most accurate plan, where none reaches it, and InputError where
    nothing supports an accuracy.
    """
    check_known(problem.predictor.unknown_of([]))
    targets = _targets(problem, limit_ms)
    if not targets:
        raise PlanRefused(nothing_fits(problem, limit_ms or 1.0))
    known: dict[int, tuple[Placements, PlanLimits, float]] = {}

    def reaches(index: int) -> bool:
        if index not in known:
            placements, limits = placements_within(problem, targets[index])
            expected = expected_accuracy(problem, placements) if placements else 0.0
            known[index] = (placements, limits, expected)
        return known[index][2] >= floor

    low, high = 0, len(targets) - 1
    highest = reaches(high)
    check_known(predict_accuracy(problem, known[high][0]).unknown)
    if not highest:
        raise PlanRefused(
            f"no plan reaches an expected accuracy of {floor:.2%}; the most accurate one within "
            f"{round_up(targets[high]):g} ms is predicted to reach {known[high][2]:.2%}"
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    placements, limits, _ = known[high]
    slowest = latency_ms(problem, placements, limits.quantile)
    kept = replace(limits, target_ms=round_up(slowest))
    solution = solution_of(problem, placements, kept, floor)
    if solution.plan.accuracy is not None:
        check_known(solution.plan.accuracy.unknown)
    return solution


def check_known(unknown: str) -> None:
    """Raise InputError where there is a reason that accuracy is not predicted."""
    if unknown:
        raise InputError(
            f"plan.min_accuracy: expected a prediction to hold it against, got none: {unknown}; "
            "give a latency target alone"
        )


def pareto(problem: Problem, limit_ms: float | None = None) -> list[ParetoPoint]:
    """Plans of rising latency and expected accuracy, up to a limit; the quickest first.

    By the law's order where nothing supports its accuracies, which the points then lack.
    """
    points: list[ParetoPoint] = []
    start: Placements = ()
    best = -math.inf
    for target_ms in evenly_spread(_targets(problem, limit_ms), PARETO_TARGETS):
        start, limits = placements_within(problem, target_ms, start)
        if not start:
            continue
        if (expected := expected_accuracy(problem, start)) > best + LEAST_GAIN:
            points.append(_point(problem, start, limits.quantile))
            best = expected
    return points


def _targets(problem: Problem, limit_ms: float | None) -> list[float]:
    """Every latency at which one more candidate becomes possible, ascending.

    Beyond the slowest candidate even steps follow up to the longest wait for other crops.
    """
    limits = problem.limits(math.inf if limit_ms is None else limit_ms)
    able = [c for device in problem.devices for c in device.within(limits)]
    if not able:
        return []
    alone = {c.latency_ms(limits.quantile) for c in able}
    longest = [max(c.request_bytes for c in able)] * problem.max_members
    wait_ms = waits_ms(longest, problem.client_bps)[0]
    slowest = max(alone)
    steps = {round(slowest + wait_ms * i / WAIT_STEPS, 3) for i in range(1, WAIT_STEPS + 1)}
    return sorted(alone | {target_ms for target_ms in steps if target_ms <= limits.target_ms})


def _point(problem: Problem, placements: Placements, quantile: LatencyQuantile) -> ParetoPoint:
    energies = [placement.candidate.energy_j for placement in placements]
    known = [energy for energy in energies if energy is not None]
    return ParetoPoint(
        latency_ms=latency_ms(problem, placements, quantile),
        accuracy=predict_accuracy(problem, placements),
        members=len(placements),
        replicas=sum(len(placement.replicas) for placement in placements),
        energy_j=round(sum(known), 6) if len(known) == len(energies) else None,
    )


def nearest_target_ms(problem: Problem, refused: Plan) -> float | None:
    """The nearest target to that of a refused plan; None where none is found."""
    target_ms = refused.target_ms
    one = refused.single_device
    if one is not None and one.is_teacher:
        # A device that runs the teacher in time is preferred, so the target has to be shorter.
        tried = [_below(ms) for ms in _teacher_by_ms(problem) if ms <= target_ms * (1 + 1e-9)]
    else:
        both_ms = two_by_ms(problem)
        tried = [target_ms * longer for longer in _LONGER]
        if both_ms is not None and both_ms > target_ms:
            tried.append(both_ms)
        tried = [round_up(ms) for ms in tried]
    tried.sort(key=lambda ms: abs(math.log(ms / target_ms)))
    for ms in tried[:_TRIED]:
        placements, limits = placements_within(problem, ms)
        if placements and not solution_of(problem, placements, limits).plan.refused:
            return ms
    return None


def _teacher_by_ms(problem: Problem) -> set[float]:
    """Latencies of the devices that can run the teacher."""
    alone = problem.limits(math.inf, 1)
    devices = problem.with_teacher
    return {c.latency_ms(alone.quantile) for device in devices for c in device.within(alone)}


def _below(ms: float) -> float:
    """The next lower number with three digits."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return round((math.ceil(ms / step - 1e-6) - 1) * step, 9)
