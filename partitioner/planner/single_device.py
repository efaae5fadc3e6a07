"""The best single device, and when it is preferred to a plan. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from mdp.formats.plan import NetworkSpec, PredictedAccuracy, SingleDevice, Spec, SubModelSpec
from partitioner.estimates.accuracy import Predictor
from partitioner.planner.candidates import Candidate, Run, Sight
from partitioner.planner.limits import PlanLimits
from partitioner.planner.placement import Placement
from partitioner.planner.problem import Problem, availability, exact_objective

#: Least lead in accuracy of a plan over one device, as a share of the pictures: half of the digits
#: that tables show.
LEAST_LEAD = 5e-4


def single_device(problem: Problem, limits: PlanLimits) -> SingleDevice | None:
    """The device with the highest expected accuracy alone; the fastest of equals.

    A device that runs the teacher in time counts with it, any other with its best plain ViT or
    public network. The teacher is preferred to a lead within the error of such predictions. The
    accuracy is None where nothing supports one; the order is the law's all the same.
    """
    alone = problem.limits(limits.target_ms, 1)
    unsure = problem.predictor.typical_error
    runs: list[tuple[float, float, str, Run, bool]] = []
    for index, device in enumerate(problem.devices):
        if device.blind or device.computing_neighbour(alone):
            continue
        there = device.profile.availability
        itself = problem.with_teacher[index].within(alone)
        able: list[Run] = [*(itself or device.within(alone, per_view=1))]
        # Networks are sorted by capability.
        able += [
            run
            for run in problem.public_networks[index]
            if run.latency_ms(alone.quantile) <= alone.target_ms
            and _takes_at_most(run, alone.max_energy_j)
        ][:1]
        for run in able:
            is_teacher = bool(itself) and isinstance(run, Candidate)
            right = there * problem.predictor.accuracy(run.capability) + is_teacher * unsure
            runs.append((-right, run.predicted_ms.total, device.name, run, is_teacher))
    if not runs:
        return None
    _, _, name, best, is_teacher = min(runs, key=lambda run: run[:3])
    return SingleDevice(
        device=name,
        submodel=best.spec if isinstance(best.spec, SubModelSpec) else None,
        network=best.spec if isinstance(best.spec, NetworkSpec) else None,
        predicted_ms=best.predicted_ms,
        is_teacher=is_teacher,
        accuracy=None
        if _unknown(problem.predictor, best.spec, is_teacher)
        else problem.predictor.accuracy(best.capability),
    )


def _unknown(predictor: Predictor, spec: Spec, is_teacher: bool) -> bool:
    """Tell that no accuracy of a single device is known: the teacher's own may be alone."""
    if is_teacher:
        return predictor.assumed
    return bool(replace(predictor, pretrained=None).unknown_of([spec]))


def reason_to_refuse(
    problem: Problem,
    placements: Sequence[Placement],
    accuracy: PredictedAccuracy,
    single: SingleDevice | None,
    limits: PlanLimits,
    floor: float,
) -> str:
    """Reason why one device is at least as good, or an empty text.

    Where no accuracy is predicted, by latency and availability alone.
    """
    if single is None or len(problem.devices) == 1:
        # A fleet of one device gets a plan of one member.
        return ""
    device = next(d for d in problem.devices if d.name == single.device)
    there = device.profile.availability
    if single.accuracy is None or accuracy.all_in is None or accuracy.expected is None:
        return _reason_without_accuracy(problem, placements, single, there, limits)
    alone = there * single.accuracy
    error = accuracy.typical_error or 0.0
    if single.is_teacher and alone >= floor:
        lead = _expectation_at_most(problem, placements) - alone
        if lead <= error:
            return _teacher_instead(
                single, there, alone + lead, accuracy.expected, limits, device.sight
            )
    if reason := _only_one(problem, limits):
        return reason
    # Public networks come trained and members do not, so a plan has to lead by more than errors.
    lead = LEAST_LEAD if single.network is None else error
    if (
        not single.is_teacher
        and accuracy.all_in <= single.accuracy + LEAST_LEAD
        and accuracy.expected <= alone + lead
    ):
        several = (
            f"all {len(placements)} members together"
            if placements[1:]
            else "the plan's only member"
        )
        return (
            f"{single.device} alone, with {single.spec.words}{_sight(device.sight)}, is predicted "
            f"to be right on {single.accuracy:.2%} in {single.predicted_ms.total:.1f} ms, and "
            f"{several} on {accuracy.all_in:.2%}"
        )
    return ""


def _only_one(problem: Problem, limits: PlanLimits) -> str:
    """The reason that no other device can take part; empty where any can."""
    able = [device for device in problem.devices if len(device.places(limits))]
    if len(able) == 1:
        return f"only {able[0].name} can take part, so there is nothing to run in parallel"
    return ""


def _reason_without_accuracy(
    problem: Problem,
    placements: Sequence[Placement],
    single: SingleDevice,
    there: float,
    limits: PlanLimits,
) -> str:
    """Reason why one device is at least as good, or an empty text, where no accuracy is known.

    Members do not outdo the model that they learn from by design, so that they lead the teacher
    only where they answer more often.
    """
    if single.is_teacher:
        device = next(d for d in problem.devices if d.name == single.device)
        away = [1 - availability(problem, placement) for placement in placements]
        answering = 1 - math.prod(away)
        if answering - there <= problem.predictor.typical_error:
            return _runs_teacher(single, limits, device.sight)
    if reason := _only_one(problem, limits):
        return reason
    if len(placements) == 1 and not placements[0].replicas:
        name = problem.devices[placements[0].device].name
        return f"the plan's only member is on {name}, so there is nothing to run in parallel"
    return ""


def _sight(sight: Sight | None) -> str:
    return "" if sight is None else f" on the pictures of {sight.camera} alone"


def _teacher_instead(
    single: SingleDevice,
    there: float,
    counted: float,
    expected: float,
    limits: PlanLimits,
    sight: Sight | None,
) -> str:
    """The reason that one device runs the teacher, with the plan's accuracy where that leads.

    `expected` is the plan's expected accuracy, `counted` the same with every answer capped at the
    teacher's.
    """
    text = _runs_teacher(single, limits, sight)
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


def _runs_teacher(single: SingleDevice, limits: PlanLimits, sight: Sight | None) -> str:
    quantised = "" if single.spec.precision == "fp32" else f" in {single.spec.precision}"
    return (
        f"{single.device} runs the teacher itself{quantised}{_sight(sight)} in "
        f"{single.predicted_ms.total:.1f} ms, within the target of {limits.target_ms:g} ms"
    )


def _expectation_at_most(problem: Problem, placements: Sequence[Placement]) -> float:
    """Expected accuracy with every answer capped at the teacher's.

    A prediction that members outdo the model they learned from does not justify giving it up. With
    cameras, the teacher on one device sees the picture of one alone, and answers are not capped so.
    """
    objective, sums = exact_objective(problem, placements)
    seeing = any(device.sight is not None for device in problem.devices)
    return objective.value(sums, most=problem.predictor.beyond if seeing else 1.0)


def _takes_at_most(run: Run, max_energy_j: float | None) -> bool:
    """Tell whether a run keeps a limit of energy, if there is one: unknown energy does not."""
    return max_energy_j is None or (run.energy_j is not None and run.energy_j <= max_energy_j)
