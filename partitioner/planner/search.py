"""Plans: which device runs which sub-model, and whether that beats one device. Pure.

Every shape is costed on every device (`partitioner.planner.candidates`), the most accurate
combination within the limits is looked for (`partitioner.planner.local_search`), and what comes out
is held against the best that one device could do alone.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from mdp.errors import InputError, PlanRefused
from mdp.formats.plan import (
    Assignment,
    NetworkSpec,
    Plan,
    Replica,
    SubModelSpec,
    TeacherSpec,
)
from mdp.formats.profile import DeviceProfile, Precision
from partitioner.estimates.accuracy import Predictor
from partitioner.estimates.network import waits_ms
from partitioner.planner.candidates import Candidate, Device
from partitioner.planner.explain import limit_broken, why, why_replica
from partitioner.planner.local_search import LEAST_GAIN, choose
from partitioner.planner.placement import Limits, Seat, Seats, bytes_of, settled
from partitioner.planner.problem import (
    FP32,
    Problem,
    availability,
    make_problem,
    predicted_accuracy,
    share_complete,
)
from partitioner.planner.single_device import reason_to_refuse, single_device

#: Availabilities closer than one step count as equal when the boosting order is made.
AVAILABILITY_STEP = 0.05


def make_plan(
    teacher: TeacherSpec,
    profiles: Sequence[DeviceProfile],
    *,
    target_ms: float,
    num_classes: int = 1000,
    predictor: Predictor | None = None,
    precisions: Sequence[Precision] = FP32,
    max_energy_j: float | None = None,
    percentile: float | None = None,
    client_bps: float | None = None,
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
        percentile=percentile,
        client_bps=client_bps,
    )
    return plan_within(problem, target_ms)


def plan_within(problem: Problem, target_ms: float, start: Seats = ()) -> Plan:
    """The plan for one target; raises InputError and PlanRefused as `make_plan` does."""
    if not (math.isfinite(target_ms) and target_ms > 0):
        raise InputError(f"expected a latency target above 0 ms, got {target_ms}")
    seats, limits = seats_within(problem, target_ms, start)
    if not seats:
        raise PlanRefused(nothing_fits(problem, target_ms))
    return make_of_seats(problem, seats, limits)


def seats_within(problem: Problem, target_ms: float, start: Seats = ()) -> tuple[Seats, Limits]:
    """The best seats found for one target, and the limits that they keep.

    With a percentile, the fewer members there are the later may each of them be.
    """
    seats: Seats = ()
    value, limits = 0.0, problem.limits(target_ms)
    for members in _member_counts(problem):
        tried = problem.limits(target_ms, members)
        # A start was found at the pace of as many members as there can be.
        begin = start if tried.pace.typical else ()
        found, worth = choose(problem.devices, problem.predictor, tried, begin)
        if found and worth > value:
            seats, value, limits = found, worth, tried
    if problem.percentile is not None and 0 < len(seats) < limits.most_members:
        limits = problem.limits(target_ms, len(seats))
        seats, _ = choose(problem.devices, problem.predictor, limits, seats)
    return seats, limits


def _member_counts(problem: Problem) -> list[int]:
    """How many members to plan for at most: as many as can be, then always half as many."""
    counts = [problem.most_members]
    while problem.percentile is not None and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def make_of_seats(problem: Problem, seats: Seats, limits: Limits, floor: float = 0.0) -> Plan:
    """The plan that seats describe, marked as refused where one device does as well.

    What their crops wait for each other at the client's port is part of the predicted network.

    A device that runs the teacher does as well if its expected accuracy is at least `floor`.
    """
    ordered = sorted(
        settled(seats, problem.client_bps), key=lambda seat: _boosting_order(problem, seat)
    )
    accuracy = predicted_accuracy(problem, ordered)
    single = single_device(problem, limits)
    reason = reason_to_refuse(problem, ordered, accuracy, single, limits, floor)
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
        percentile=problem.percentile,
        on_time=None
        if problem.percentile is None
        else round(share_complete(problem, ordered, limits.target_ms), 4),
        client_bps=problem.client_bps if math.isfinite(problem.client_bps) else None,
        num_classes=problem.predictor.num_classes,
    )


def rounded_up(value_ms: float) -> float:
    """To a tenth of a millisecond, never less."""
    return math.ceil(round(value_ms * 10, 6)) / 10


def _boosting_order(problem: Problem, seat: Seat) -> tuple[float, float, str]:
    """f_0 carries most: the most dependable member first, then the most capable."""
    dependable = round(availability(problem, seat) / AVAILABILITY_STEP)
    name = problem.devices[seat.device].name
    return (-dependable, -seat.candidate.capability, name)


def _assignment(problem: Problem, k: int, seat: Seat, why: str) -> Assignment:
    c = seat.candidate
    return Assignment(
        k=k,
        device=problem.devices[seat.device].name,
        submodel=c.spec if isinstance(c.spec, SubModelSpec) else None,
        network=c.spec if isinstance(c.spec, NetworkSpec) else None,
        predicted_ms=c.predicted_ms,
        memory_bytes=c.memory_bytes,
        provider=c.way.provider,
        threads=c.way.threads,
        why=why,
        encoding=c.encoding,
        runtime=c.way.runtime,
        energy_j=c.energy_j,
        accuracy=problem.predictor.accuracy(c.capability),
        spin=problem.devices[seat.device].profile.spin,
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
        spin=problem.devices[device].profile.spin,
    )


def _left_out(problem: Problem, seats: Sequence[Seat], limits: Limits) -> dict[str, str]:
    """Devices without a part, each with the reason."""
    busy = {device for seat in seats for device in seat.devices}
    taken = {seat.candidate.identity for seat in seats}
    reasons = {}
    for index, device in enumerate(problem.devices):
        if index in busy:
            continue
        places = device.places(limits.target_ms, limits.max_energy_j, limits.pace)
        identities = set(device.choices.identity[device.rows[places]].tolist())
        if not identities:
            reasons[device.name] = why_left_out(device, limits)
        elif identities <= taken:
            reasons[device.name] = "another member already has every sub-model it could run"
        elif not _joins(device, seats, limits):
            reasons[device.name] = (
                "with its crop at the client's port too, the answers would be too late"
            )
        else:
            reasons[device.name] = (
                f"it would add less than {100 * LEAST_GAIN:g} points to the expected accuracy"
            )
    return reasons


def _joins(device: Device, seats: Sequence[Seat], limits: Limits) -> bool:
    """Whether there is time for one more crop at the client's port, as the members are."""
    if limits.client_bps == math.inf:
        return True
    latest_ms = max(run.by_ms(limits.pace) for seat in seats for run in seat.runs)
    places = device.places(limits.target_ms, limits.max_energy_j, limits.pace)
    own_ms = device.times.request_bytes[places] * 8e3 / limits.client_bps
    theirs_ms = bytes_of(tuple(seats)) * 8e3 / limits.client_bps
    alone_ms = device.times.by_ms(limits.pace)[places]
    last_ms = np.maximum(alone_ms + theirs_ms, latest_ms + own_ms)
    return bool(np.any(last_ms <= limits.target_ms))


def why_left_out(device: Device, limits: Limits) -> str:
    """Why a device has no part: its quickest choice, and the limit which that breaks."""
    c = device.quickest
    return (
        f"even {c} {limit_broken(device, c, limits)} ({c.predicted_ms.compute:.2f} ms compute, "
        f"{c.predicted_ms.network:.2f} ms network)"
    )


def nothing_fits(problem: Problem, target_ms: float) -> str:
    """One line that names the nearest targets which could be met."""
    alone = problem.limits(target_ms, 1)
    able = [
        (min(c.by_ms(alone.pace) for c in options), device.name, options)
        for device in problem.devices
        if (options := device.within(math.inf, alone.max_energy_j))
    ]
    if not able:
        reasons = "; ".join(f"{d.name}: {why_left_out(d, alone)}" for d in problem.devices)
        if alone.max_energy_j is not None and any(len(d.rows) for d in problem.devices):
            return f"no device can answer with {alone.max_energy_j:g} J ({reasons})"
        return f"no device has the memory for a sub-model ({reasons})"
    able.sort(key=lambda entry: entry[:2])
    both_ms = two_by_ms(problem)
    text = (
        f"no device can answer within {target_ms:g} ms; the nearest target that could be "
        f"met is {rounded_up(able[0][0]):g} ms, by {able[0][1]}"
    )
    if both_ms is not None:
        text += f", and two devices can take part from {rounded_up(both_ms):g} ms on"
    return text


def two_by_ms(problem: Problem) -> float | None:
    """When two devices can both have answered, each crop waiting for the other one.

    None where fewer than two can answer at all.
    """
    limits = problem.limits(math.inf, 2)
    every = [device.within(math.inf, limits.max_energy_j) for device in problem.devices]
    able = [options for options in every if options]
    if len(able) < 2:
        return None
    by_size: dict[float, dict[int, Candidate]] = {}
    for index, options in enumerate(able):
        for c in options:
            quickest = by_size.setdefault(c.request_bytes, {})
            if index not in quickest or c.by_ms(limits.pace) < quickest[index].by_ms(limits.pace):
                quickest[index] = c
    few = [
        entry
        for quickest in by_size.values()
        for entry in sorted(quickest.items(), key=lambda entry: entry[1].by_ms(limits.pace))[:2]
    ]
    together = []
    for (first, a), (second, b) in combinations(few, 2):
        if first != second:
            waits = waits_ms([a.request_bytes, b.request_bytes], limits.client_bps)
            pair = zip((a, b), waits, strict=True)
            together.append(max(c.waiting(wait).by_ms(limits.pace) for c, wait in pair))
    return min(together)
