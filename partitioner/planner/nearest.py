"""The nearest latency target for which several devices make a plan that is not refused. Pure."""

import math

from mdp.formats.plan import Plan
from partitioner.planner.problem import Problem
from partitioner.planner.search import make_of_seats, rounded_up, seats_within, two_by_ms

#: Each costs a search, so few are tried: by how much longer targets are, and how many in all.
_LONGER, _TRIED = (1.25, 1.6, 2.5), 4


def nearest_target_ms(problem: Problem, refused: Plan) -> float | None:
    """The nearest to the target of a refused plan, or None where none is found."""
    target_ms = refused.target_ms
    one = refused.single_device
    if one is not None and one.is_teacher:
        # While a device has the time to run the teacher it is preferred, so there has to be less.
        tried = [_below(ms) for ms in _teacher_by_ms(problem) if ms <= target_ms * (1 + 1e-9)]
    else:
        both_ms = two_by_ms(problem)
        tried = [target_ms * longer for longer in _LONGER]
        if both_ms is not None and both_ms > target_ms:
            tried.append(both_ms)
        tried = [rounded_up(ms) for ms in tried]
    tried.sort(key=lambda ms: abs(math.log(ms / target_ms)))
    for ms in tried[:_TRIED]:
        seats, limits = seats_within(problem, ms)
        if seats and not make_of_seats(problem, seats, limits).refused:
            return ms
    return None


def _teacher_by_ms(problem: Problem) -> set[float]:
    """When each device that can run the teacher has answered."""
    alone = problem.limits(math.inf, 1)
    return {
        c.by_ms(alone.pace)
        for device in problem.with_teacher
        for c in device.within(math.inf, alone.max_energy_j, pace=alone.pace)
    }


def _below(ms: float) -> float:
    """The next lower number of three digits."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return round((math.ceil(ms / step - 1e-6) - 1) * step, 9)
