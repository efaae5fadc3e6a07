"""Plans: which device runs which sub-model, and whether that beats one device. Pure.

Every shape is costed on every device (`partitioner.candidates`), the most accurate combination
within the limits is looked for (`partitioner.choose`), and what comes out is held against the best
that one device could do alone.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mdp.errors import InputError, PlanRefused
from mdp.plan import (
    Assignment,
    Plan,
    PredictedAccuracy,
    Replica,
    SingleDevice,
    TeacherSpec,
)
from mdp.profile import DeviceProfile, Precision
from partitioner.accuracy_law import Member, capability_of, together
from partitioner.candidates import Candidate, Device, evaluate_device, fitted_ways
from partitioner.choose import LEAST_GAIN, Limits, Seat, Seats, choose
from partitioner.expectation import Objective, exact_arrivals
from partitioner.grid import make_choices
from partitioner.predictor import Predictor, predictor_for, shipped_law

#: Availabilities closer than one step count as equal when the boosting order is made.
AVAILABILITY_STEP = 0.05
#: A plan has to be predicted to be more accurate than one device by more than this share of the
#: pictures, half of what tables show.
LEAST_LEAD = 5e-4
FP32: tuple[Precision, ...] = ("fp32",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a search needs, counted and fitted once for all its targets."""

    teacher: TeacherSpec
    predictor: Predictor
    devices: tuple[Device, ...]
    #: Each device with the teacher itself as its only choice, so far as its memory allows.
    with_teacher: tuple[Device, ...]
    max_energy_j: float | None

    def limits(self, target_ms: float) -> Limits:
        """The limits of a plan for this target."""
        return Limits(target_ms=target_ms, max_energy_j=self.max_energy_j)


def make_plan(
    teacher: TeacherSpec,
    profiles: Sequence[DeviceProfile],
    *,
    target_ms: float,
    num_classes: int = 1000,
    predictor: Predictor | None = None,
    precisions: Sequence[Precision] = FP32,
    max_energy_j: float | None = None,
) -> Plan:
    """Assign sub-models to devices so that expected accuracy within `target_ms` is highest.

    The plan is marked as refused where one device alone is predicted to be as accurate in that
    time, runs the teacher itself, or is the only one that can take part. Raises InputError for
    unusable arguments and PlanRefused, naming the nearest target that could be met, when no device
    can take part.
    """
    problem = make_problem(
        teacher,
        profiles,
        num_classes=num_classes,
        predictor=predictor,
        precisions=precisions,
        max_energy_j=max_energy_j,
    )
    return plan_within(problem, target_ms)


def make_problem(
    teacher: TeacherSpec,
    profiles: Sequence[DeviceProfile],
    *,
    num_classes: int = 1000,
    predictor: Predictor | None = None,
    precisions: Sequence[Precision] = FP32,
    max_energy_j: float | None = None,
) -> Problem:
    """Cost every choice on every device; raises InputError for unusable arguments."""
    _check(profiles, num_classes, max_energy_j)
    if predictor is None:
        predictor = predictor_for(shipped_law(), teacher.shape, num_classes=num_classes)
    choices = make_choices(teacher.shape, predictor, precisions)
    whole = make_choices(teacher.shape, predictor, precisions, shapes=[teacher.shape])
    # The order in which profiles are named must not matter.
    ordered = sorted(profiles, key=lambda profile: profile.name)
    fitted = [(profile, fitted_ways(profile, precisions)) for profile in ordered]
    return Problem(
        teacher=teacher,
        predictor=predictor,
        devices=tuple(evaluate_device(*device, choices) for device in fitted),
        with_teacher=tuple(evaluate_device(*device, whole) for device in fitted),
        max_energy_j=max_energy_j,
    )


def plan_within(problem: Problem, target_ms: float, start: Seats = ()) -> Plan:
    """The plan for one target; raises InputError and PlanRefused as `make_plan` does."""
    if not (math.isfinite(target_ms) and target_ms > 0):
        raise InputError(f"expected a latency target above 0 ms, got {target_ms}")
    limits = problem.limits(target_ms)
    seats, _ = choose(problem.devices, problem.predictor, limits, start)
    if not seats:
        raise PlanRefused(nothing_fits(problem, limits))
    return make_of_seats(problem, seats, limits)


def make_of_seats(problem: Problem, seats: Seats, limits: Limits, floor: float = 0.0) -> Plan:
    """The plan that seats describe, marked as refused where one device does as well.

    A device that runs the teacher does as well if its expected accuracy is at least `floor`.
    """
    from partitioner.explain import why, why_replica

    ordered = sorted(seats, key=lambda seat: _boosting_order(problem, seat))
    accuracy = predicted_accuracy(problem, ordered)
    single = _single_device(problem, limits)
    reason = _reason_to_refuse(problem, ordered, accuracy, single, limits, floor)
    return Plan(
        teacher=problem.teacher,
        target_ms=limits.target_ms,
        refused=bool(reason),
        reason=reason,
        assignments=[
            _assignment(problem, k, seat, why(problem, ordered, k, limits))
            for k, seat in enumerate(ordered)
        ],
        single_device=single,
        left_out=_left_out(problem, ordered, limits),
        replicas=[
            _replica(problem, k, device, run, why_replica(problem, ordered, k))
            for k, seat in enumerate(ordered)
            for device, run in seat.replicas
        ],
        accuracy=accuracy,
    )


def latency_ms(seat: Seat) -> float:
    """Milliseconds of a member's answer, by the slowest of those who serve it."""
    return max(c.predicted_ms.total for c in (seat.candidate, *(c for _, c in seat.replicas)))


def rounded_up(value_ms: float) -> float:
    """To a tenth of a millisecond, never less."""
    return math.ceil(round(value_ms * 10, 6)) / 10


def predicted_accuracy(problem: Problem, seats: Sequence[Seat]) -> PredictedAccuracy:
    """With every member in, and expected over which devices are there, counted exactly."""
    predictor = problem.predictor
    members = [
        Member(capability=s.candidate.capability, view=s.candidate.view, model=s.candidate.model)
        for s in seats
    ]
    there = [availability(problem, seat) for seat in seats]
    served = [(seat.candidate, [k]) for k, seat in enumerate(seats)]
    objective = Objective(
        predictor.law, capability_of(predictor.teacher_accuracy), exact_arrivals(there)
    )
    return PredictedAccuracy(
        all_in=predictor.accuracy(together(predictor.law, members)),
        expected=objective.value(objective.sums(served)),
        typical_error=min(predictor.typical_error, 1.0),
    )


def availability(problem: Problem, seat: Seat) -> float:
    """Share of the time in which someone serves this member."""
    away = [1 - problem.devices[device].profile.availability for device in seat.devices]
    return 1 - math.prod(away)


def _check(profiles: Sequence[DeviceProfile], num_classes: int, max_energy_j: float | None) -> None:
    if num_classes < 2:
        raise InputError(f"expected at least 2 classes, got {num_classes}")
    if not profiles:
        raise InputError("expected at least 1 profile, got 0")
    repeated = [name for name, n in Counter(p.name for p in profiles).items() if n > 1]
    if repeated:
        raise InputError(f"expected every profile once, got {', '.join(repeated)} repeatedly")
    if max_energy_j is not None and not (math.isfinite(max_energy_j) and max_energy_j > 0):
        raise InputError(f"expected an energy limit above 0 J, got {max_energy_j:g}")


def _boosting_order(problem: Problem, seat: Seat) -> tuple[float, float, str]:
    """f_0 carries most: the most dependable member first, then the most capable."""
    dependable = round(availability(problem, seat) / AVAILABILITY_STEP)
    name = problem.devices[seat.device].name
    return (-dependable, -seat.candidate.capability, name)


def _single_device(problem: Problem, limits: Limits) -> SingleDevice | None:
    """The fastest device that runs the teacher in time, else the most accurate of any alone."""
    alone = [
        (c.predicted_ms.total, device.name, c)
        for device in problem.with_teacher
        for c in device.within(limits.target_ms, limits.max_energy_j)
    ]
    is_teacher = bool(alone)
    if not alone:
        alone = [
            (-c.capability, device.name, c)
            for device in problem.devices
            for c in device.within(limits.target_ms, limits.max_energy_j, per_view=1)
        ]
    if not alone:
        return None
    _, name, best = min(alone, key=lambda entry: (entry[0], entry[2].predicted_ms.total, entry[1]))
    return SingleDevice(
        device=name,
        submodel=best.spec,
        predicted_ms=best.predicted_ms,
        is_teacher=is_teacher,
        accuracy=problem.predictor.accuracy(best.capability),
    )


def _reason_to_refuse(
    problem: Problem,
    seats: Sequence[Seat],
    accuracy: PredictedAccuracy,
    single: SingleDevice | None,
    limits: Limits,
    floor: float,
) -> str:
    """Why one device does at least as well, or an empty text."""
    if single is None or single.accuracy is None:
        return ""
    there = next(d for d in problem.devices if d.name == single.device).profile.availability
    if single.is_teacher and there * single.accuracy >= floor:
        quantised = (
            "" if single.submodel.precision == "fp32" else f" in {single.submodel.precision}"
        )
        return (
            f"{single.device} runs the teacher itself{quantised} in "
            f"{single.predicted_ms.total:.1f} ms, within the target of {limits.target_ms:g} ms"
        )
    able = [d for d in problem.devices if len(d.places(limits.target_ms, limits.max_energy_j))]
    if len(able) == 1:
        return f"only {able[0].name} can take part, so there is nothing to run in parallel"
    if (
        accuracy.all_in <= single.accuracy + LEAST_LEAD
        and accuracy.expected <= there * single.accuracy + LEAST_LEAD
    ):
        return (
            f"{single.device} alone is predicted to be right on {single.accuracy:.2%} in "
            f"{single.predicted_ms.total:.1f} ms, and all {len(seats)} members together on "
            f"{accuracy.all_in:.2%}"
        )
    return ""


def _assignment(problem: Problem, k: int, seat: Seat, why: str) -> Assignment:
    c = seat.candidate
    return Assignment(
        k=k,
        device=problem.devices[seat.device].name,
        submodel=c.spec,
        predicted_ms=c.predicted_ms,
        memory_bytes=c.memory_bytes,
        provider=c.way.provider,
        threads=c.way.threads,
        why=why,
        region=c.region,
        encoding=c.encoding,
        runtime=c.way.runtime,
        energy_j=c.energy_j,
    )


def _replica(problem: Problem, k: int, device: int, run: Candidate, why: str) -> Replica:
    return Replica(
        k=k,
        device=problem.devices[device].name,
        predicted_ms=run.predicted_ms,
        memory_bytes=run.memory_bytes,
        provider=run.way.provider,
        threads=run.way.threads,
        why=why,
        encoding=run.encoding,
        runtime=run.way.runtime,
        energy_j=run.energy_j,
    )


def _left_out(problem: Problem, seats: Sequence[Seat], limits: Limits) -> dict[str, str]:
    """Devices without a part, each with the reason."""
    busy = {device for seat in seats for device in seat.devices}
    taken = {seat.candidate.identity for seat in seats}
    reasons = {}
    for index, device in enumerate(problem.devices):
        if index in busy:
            continue
        places = device.places(limits.target_ms, limits.max_energy_j)
        identities = set(device.choices.identity[device.rows[places]].tolist())
        if not identities:
            reasons[device.name] = why_left_out(device, limits)
        elif identities <= taken:
            reasons[device.name] = "another member already has every sub-model it could run"
        else:
            reasons[device.name] = (
                f"it would add less than {100 * LEAST_GAIN:g} points to the expected accuracy"
            )
    return reasons


def why_left_out(device: Device, limits: Limits) -> str:
    """Why a device has no part: its quickest choice, and the limit which that breaks."""
    from partitioner.explain import limit_broken

    c = device.quickest
    return (
        f"even {c} {limit_broken(device, c, limits)} ({c.predicted_ms.compute:.2f} ms compute, "
        f"{c.predicted_ms.network:.2f} ms network)"
    )


def nothing_fits(problem: Problem, limits: Limits) -> str:
    """One line that names the nearest targets which could be met."""
    able = [
        (quickest, device.name)
        for device in problem.devices
        if (options := device.within(math.inf, limits.max_energy_j))
        for quickest in [min(c.predicted_ms.total for c in options)]
    ]
    if not able:
        reasons = "; ".join(f"{d.name}: {why_left_out(d, limits)}" for d in problem.devices)
        if limits.max_energy_j is not None and any(len(d.rows) for d in problem.devices):
            return f"no device can answer with {limits.max_energy_j:g} J ({reasons})"
        return f"no device has the memory for a sub-model ({reasons})"
    able.sort()
    text = (
        f"no device can answer within {limits.target_ms:g} ms; the nearest target that could be "
        f"met is {rounded_up(able[0][0]):g} ms, by {able[0][1]}"
    )
    if len(able) > 1:
        text += f", and two devices can take part from {rounded_up(able[1][0]):g} ms on"
    return text
