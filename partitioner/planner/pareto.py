"""Plans of every latency, and the quickest plan that is accurate enough. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdp.errors import InputError, PlanRefused
from mdp.formats.plan import Plan, PredictedAccuracy
from partitioner.estimates.latency_quantiles import Pace
from partitioner.estimates.network import waits_ms
from partitioner.planner.local_search import LEAST_GAIN
from partitioner.planner.placement import Limits, Seats
from partitioner.planner.problem import Problem, latency_ms, predicted_accuracy
from partitioner.planner.search import make_of_seats, nothing_fits, rounded_up, seats_within

#: How many latency targets a Pareto list is made of, at most.
PARETO_TARGETS = 16
#: In how many steps targets go from the slowest candidate alone to the same after all other crops.
WAIT_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """No plan is predicted to be as accurate in less time."""

    latency_ms: float
    accuracy: PredictedAccuracy
    members: int
    replicas: int
    energy_j: float | None


def plan_with_accuracy(problem: Problem, floor: float, limit_ms: float | None = None) -> Plan:
    """The quickest plan whose expected accuracy is at least `floor`.

    Raises InputError for a floor that is no share, and PlanRefused, naming the most accurate plan,
    where none reaches it.
    """
    if not 0 < floor < 1:
        raise InputError(f"expected an accuracy floor above 0 and below 1, got {floor:g}")
    targets = _targets(problem, limit_ms)
    if not targets:
        raise PlanRefused(nothing_fits(problem, limit_ms or 1.0))
    known: dict[int, tuple[Seats, Limits, float]] = {}

    def reaches(index: int) -> bool:
        if index not in known:
            seats, limits = seats_within(problem, targets[index])
            expected = predicted_accuracy(problem, seats).expected if seats else 0.0
            known[index] = (seats, limits, expected)
        return known[index][2] >= floor

    low, high = 0, len(targets) - 1
    if not reaches(high):
        raise PlanRefused(
            f"no plan reaches an expected accuracy of {floor:.2%}; the most accurate one within "
            f"{rounded_up(targets[high]):g} ms is predicted to reach {known[high][2]:.2%}"
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    seats, limits, _ = known[high]
    slowest = latency_ms(problem, seats, limits.pace)
    kept = replace(limits, target_ms=rounded_up(slowest))
    return make_of_seats(problem, seats, kept, floor)


def pareto(problem: Problem, limit_ms: float | None = None) -> list[ParetoPoint]:
    """Plans of rising latency and expected accuracy, up to a limit; the quickest first."""
    points: list[ParetoPoint] = []
    start: Seats = ()
    for target_ms in _spread(_targets(problem, limit_ms)):
        start, limits = seats_within(problem, target_ms, start)
        if not start:
            continue
        point = _point(problem, start, limits.pace)
        if not points or point.accuracy.expected > points[-1].accuracy.expected + LEAST_GAIN:
            points.append(point)
    return points


def _targets(problem: Problem, limit_ms: float | None) -> list[float]:
    """Every latency at which one more candidate becomes possible, ascending.

    Where crops wait for each other plans take longer than any candidate alone: up to the longest
    wait, so targets go on beyond the slowest candidate in even steps.
    """
    limits = problem.limits(math.inf if limit_ms is None else limit_ms)
    able = [
        c
        for device in problem.devices
        for c in device.within(limits.target_ms, limits.max_energy_j, pace=limits.pace)
    ]
    if not able:
        return []
    alone = {c.by_ms(limits.pace) for c in able}
    longest = [max(c.request_bytes for c in able)] * problem.most_members
    wait_ms = waits_ms(longest, problem.client_bps)[0]
    slowest = max(alone)
    steps = {round(slowest + wait_ms * i / WAIT_STEPS, 3) for i in range(1, WAIT_STEPS + 1)}
    return sorted(alone | {target_ms for target_ms in steps if target_ms <= limits.target_ms})


def _spread(targets: Sequence[float]) -> list[float]:
    """Some of the targets, about evenly in their logarithm; always the first and the last."""
    if len(targets) <= PARETO_TARGETS:
        return list(targets)
    wanted = np.geomspace(max(targets[0], 1e-3), targets[-1], PARETO_TARGETS)
    indices = np.searchsorted(np.array(targets), wanted * (1 - 1e-9))
    return [targets[i] for i in sorted(set(np.minimum(indices, len(targets) - 1).tolist()))]


def _point(problem: Problem, seats: Seats, pace: Pace) -> ParetoPoint:
    energies = [seat.candidate.energy_j for seat in seats]
    known = [energy for energy in energies if energy is not None]
    return ParetoPoint(
        latency_ms=latency_ms(problem, seats, pace),
        accuracy=predicted_accuracy(problem, seats),
        members=len(seats),
        replicas=sum(len(seat.replicas) for seat in seats),
        energy_j=round(sum(known), 6) if len(known) == len(energies) else None,
    )
