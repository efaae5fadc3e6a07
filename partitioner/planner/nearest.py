"""The nearest latency target with a plan that is not refused. Pure."""

import math

from mdp.formats.plan import Plan
from partitioner.planner.problem import Problem
from partitioner.planner.search import placements_within, rounded_up, solution_of, two_by_ms

#: Factors of longer targets, and most targets tried: each costs a search.
_LONGER, _TRIED = (1.25, 1.6, 2.5), 4


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
        tried = [rounded_up(ms) for ms in tried]
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
