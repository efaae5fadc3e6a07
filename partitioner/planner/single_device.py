"""What the best single device can do, and when that is the better plan. Pure."""

import math
from collections.abc import Sequence

from mdp.formats.plan import NetworkSpec, PredictedAccuracy, SingleDevice, SubModelSpec
from partitioner.planner.candidates import Candidate, Device
from partitioner.planner.placement import Limits, Seat
from partitioner.planner.problem import Problem, Rival, exact_objective

#: A plan has to be predicted to be more accurate than one device by more than this share of the
#: pictures, half of what tables show.
LEAST_LEAD = 5e-4


def single_device(problem: Problem, limits: Limits) -> SingleDevice | None:
    """Who would be right most often alone, as often as it is there; of equals the quickest.

    Every device that runs the teacher in time counts with it, the others with the best plain ViT or
    public network, which has to be predicted to lead the teacher by more than such predictions are
    off.
    """
    alone = problem.limits(limits.target_ms, 1)
    unsure = problem.predictor.typical_error
    runs: list[tuple[float, float, str, Candidate | Rival, bool]] = []
    for index, device in enumerate(problem.devices):
        there = device.profile.availability
        itself = _within(problem.with_teacher[index], alone)
        able: list[Candidate | Rival] = [*(itself or _within(device, alone, per_view=1))]
        able += _network_within(problem.rivals[index], alone)
        for c in able:
            is_teacher = bool(itself) and isinstance(c, Candidate)
            right = there * problem.predictor.accuracy(c.capability) + is_teacher * unsure
            runs.append((-right, c.predicted_ms.total, device.name, c, is_teacher))
    if not runs:
        return None
    _, _, name, best, is_teacher = min(runs, key=lambda run: run[:3])
    return SingleDevice(
        device=name,
        submodel=best.spec if isinstance(best.spec, SubModelSpec) else None,
        network=best.spec if isinstance(best.spec, NetworkSpec) else None,
        predicted_ms=best.predicted_ms,
        is_teacher=is_teacher,
        accuracy=problem.predictor.accuracy(best.capability),
    )


def _network_within(rivals: Sequence[Rival], limits: Limits) -> list[Rival]:
    """The most capable network that meets the limits, if there is one."""
    most_j = math.inf if limits.max_energy_j is None else limits.max_energy_j
    return [
        r
        for r in rivals
        if r.by_ms(limits.pace) <= limits.target_ms and (r.energy_j or 0) <= most_j
    ][:1]


def _within(device: Device, limits: Limits, per_view: int | None = None) -> list[Candidate]:
    return device.within(limits.target_ms, limits.max_energy_j, pace=limits.pace, per_view=per_view)


def reason_to_refuse(
    problem: Problem,
    seats: Sequence[Seat],
    accuracy: PredictedAccuracy,
    single: SingleDevice | None,
    limits: Limits,
    floor: float,
) -> str:
    """Why one device does at least as well, or an empty text."""
    if single is None or single.accuracy is None or len(problem.devices) == 1:
        # A fleet of one device was asked for, and a plan of one member is what can be served.
        return ""
    there = next(d for d in problem.devices if d.name == single.device).profile.availability
    alone = there * single.accuracy
    if single.is_teacher and alone >= floor:
        lead = _expected_at_most(problem, seats) - alone
        if lead <= accuracy.typical_error:
            return _teacher_instead(single, there, alone + lead, accuracy.expected, limits)
    able = [
        d
        for d in problem.devices
        if len(d.places(limits.target_ms, limits.max_energy_j, limits.pace))
    ]
    if len(able) == 1:
        return f"only {able[0].name} can take part, so there is nothing to run in parallel"
    # That networks come trained, and members not, has to be made up for by more than errors.
    lead = LEAST_LEAD if single.network is None else accuracy.typical_error
    if (
        not single.is_teacher
        and accuracy.all_in <= single.accuracy + LEAST_LEAD
        and accuracy.expected <= alone + lead
    ):
        several = f"all {len(seats)} members together" if seats[1:] else "the plan's only member"
        return (
            f"{single.device} alone, with {single.spec.words}, is predicted to be right on "
            f"{single.accuracy:.2%} in {single.predicted_ms.total:.1f} ms, and {several} on "
            f"{accuracy.all_in:.2%}"
        )
    return ""


def _teacher_instead(
    single: SingleDevice, there: float, counted: float, expected: float, limits: Limits
) -> str:
    """That one device runs the teacher, and what speaks for the plan where anything does.

    The plan's expected accuracy is `expected`; no answer counted for more than the teacher's, it is
    `counted`.
    """
    quantised = "" if single.spec.precision == "fp32" else f" in {single.spec.precision}"
    text = (
        f"{single.device} runs the teacher itself{quantised} in "
        f"{single.predicted_ms.total:.1f} ms, within the target of {limits.target_ms:g} ms"
    )
    alone = there * (single.accuracy or 0.0)
    if counted <= alone:
        return text
    members = f"{counted:.1%}"
    if f"{expected:.1%}" != members:
        members += f" ({expected:.1%} predicted, but no answer counts for more than the teacher's)"
    return (
        f"{text}; as it is there {there:.0%} of the time it is right on {alone:.1%}, the members "
        f"on {members} as devices come and go, and such a prediction is not that sure"
    )


def _expected_at_most(problem: Problem, seats: Sequence[Seat]) -> float:
    """Expected accuracy where no answer counts for more than the teacher's.

    That members together outdo what they learned from is nothing to give the teacher up for.
    """
    objective, sums = exact_objective(problem, seats)
    return objective.value(sums, most=1.0)
