"""Latency, computing and energy of a cascade, and of asking all members at once.

By the plan's predictions, without spread.
"""

from collections.abc import Collection, Sequence

from mdp.files import Record
from mdp.formats.plan import Assignment, Plan


class AnswerFigures(Record, frozen=True):
    """Figures of one answer."""

    mean_ms: float
    p99_ms: float
    #: Computing milliseconds of all devices together.
    device_ms: float
    #: Joules; None where the plan does not have every device's.
    energy_j: float | None


class BothWays(Record, frozen=True):
    """All members at once, and a cascade."""

    at_once: AnswerFigures
    cascade: AnswerFigures


def both_ways(plan: Plan, first: Collection[int], escalated: float) -> BothWays:
    """Both ways, where a share `escalated` of the pictures needs the second stage."""
    ahead, behind = _split(plan, first)
    first_ms, later_ms = _slowest_ms(ahead), _slowest_ms(behind)
    all_ms, both_ms = max(first_ms, later_ms), first_ms + later_ms
    return BothWays(
        at_once=AnswerFigures(
            mean_ms=all_ms,
            p99_ms=all_ms,
            device_ms=_device_ms(plan.assignments),
            energy_j=_energy_j(plan.assignments),
        ),
        cascade=AnswerFigures(
            mean_ms=first_ms + escalated * later_ms,
            p99_ms=both_ms if escalated >= 0.01 else first_ms,
            device_ms=_device_ms(ahead) + escalated * _device_ms(behind),
            energy_j=_mix(_energy_j(ahead), _energy_j(behind), escalated),
        ),
    )


def cost(plan: Plan, first: Collection[int], escalated: float) -> float:
    """Joules of an answer of a cascade, else computing milliseconds where energy is unknown."""
    way = both_ways(plan, first, escalated).cascade
    return way.device_ms if way.energy_j is None else way.energy_j


def in_time(plan: Plan, first: Collection[int]) -> bool:
    """Tell whether both stages fit into the plan's deadline, if it has one."""
    return (
        plan.deadline_ms is None or both_ways(plan, first, 1.0).cascade.p99_ms <= plan.deadline_ms
    )


def _split(plan: Plan, first: Collection[int]) -> tuple[list[Assignment], list[Assignment]]:
    ahead = [a for a in plan.assignments if a.k in first]
    return ahead, [a for a in plan.assignments if a.k not in first]


def _slowest_ms(members: Sequence[Assignment]) -> float:
    return max((a.predicted_ms.total for a in members), default=0.0)


def _device_ms(members: Sequence[Assignment]) -> float:
    return sum(a.predicted_ms.compute for a in members)


def _energy_j(members: Sequence[Assignment]) -> float | None:
    known = [a.energy_j for a in members if a.energy_j is not None]
    return sum(known) if len(known) == len(members) else None


def _mix(first: float | None, later: float | None, escalated: float) -> float | None:
    return None if first is None or later is None else first + escalated * later
