"""Plans: which device runs which sub-model, compared with the best single device. Pure.

`partitioner.planner.candidates` has the costs of every shape on every device,
`partitioner.planner.local_search` finds the placements.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from mdp.errors import PlanRefused
from mdp.formats.plan import Assignment, NetworkSpec, Plan, Replica, SubModelSpec
from partitioner.estimates.batching import with_batches
from partitioner.estimates.network import waits_ms
from partitioner.planner.candidates import Candidate, DeviceCandidates
from partitioner.planner.deadline import deadline_ms
from partitioner.planner.explain import limit_broken, why, why_replica
from partitioner.planner.limits import PlanLimits
from partitioner.planner.local_search import LEAST_GAIN, choose
from partitioner.planner.placement import Placement, Placements, total_bytes, with_waits
from partitioner.planner.problem import (
    Problem,
    Solution,
    accuracy_unknown,
    availability,
    predict_accuracy,
    share_complete,
)
from partitioner.planner.single_device import reason_to_refuse, single_device

#: Availabilities within one step are equal in the boosting order.
AVAILABILITY_STEP = 0.05


def plan_within(problem: Problem, target_ms: float) -> Solution:
    """The plan with the highest expected accuracy within `target_ms`.

    It is marked as refused where one device alone is predicted to be as accurate in that time, runs
    the teacher, or is the only one that can take part. Raises PlanRefused, naming the nearest
    target that can be met, where no device can take part.
    """
    placements, limits = placements_within(problem, target_ms)
    if not placements:
        raise PlanRefused(nothing_fits(problem, target_ms))
    return solution_of(problem, placements, limits)


def placements_within(
    problem: Problem, target_ms: float, start: Placements = ()
) -> tuple[Placements, PlanLimits]:
    """The best placements found for one target, at least as good as `start`, and their limits.

    With a percentile, each of fewer members may be later.
    """
    placements: Placements = ()
    value, limits = 0.0, problem.limits(target_ms)
    for members in _member_counts(problem):
        tried = problem.limits(target_ms, members)
        # A start keeps another quantile than that of so many members.
        found, worth = choose(
            problem.devices, problem.predictor, tried, start if tried.quantile.median else ()
        )
        if found and worth > value:
            placements, value, limits = found, worth, tried
    if problem.percentile is not None and 0 < len(placements) < limits.max_members:
        limits = problem.limits(target_ms, len(placements))
        placements, _ = choose(problem.devices, problem.predictor, limits, placements)
    return placements, limits


def _member_counts(problem: Problem) -> list[int]:
    """Limits of the number of members: the most, and with a percentile halves of it."""
    counts = [problem.max_members]
    while problem.percentile is not None and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def solution_of(
    problem: Problem, placements: Placements, limits: PlanLimits, floor: float = 0.0
) -> Solution:
    """The plan of some placements, marked as refused where one device is at least as good.

    A device that runs the teacher is so only with an expected accuracy of at least `floor`.
    """
    ordered = tuple(
        sorted(
            with_waits(placements, problem.client_bps), key=lambda p: _boosting_order(problem, p)
        )
    )
    accuracy = predict_accuracy(problem, ordered)
    single = single_device(problem, limits)
    reason = reason_to_refuse(problem, ordered, accuracy, single, limits, floor)
    plan = Plan(
        teacher=problem.teacher,
        target_ms=limits.target_ms,
        refused=bool(reason),
        reason=reason,
        assignments=[_assignment(problem, ordered, k, limits) for k in range(len(ordered))],
        single_device=single,
        left_out=_explain_unused(problem, ordered, limits),
        replicas=[
            Replica(k=k, why=why_replica(problem, ordered, k), **_run_of(problem, device, c))
            for k, placement in enumerate(ordered)
            for device, c in placement.replicas
        ],
        accuracy=accuracy,
        deadline_ms=deadline_ms(problem, ordered, limits.target_ms),
        percentile=problem.percentile,
        on_time=None
        if problem.percentile is None
        else round(share_complete(problem, ordered, limits.target_ms), 4),
        client_bps=problem.client_bps if math.isfinite(problem.client_bps) else None,
        num_classes=problem.predictor.num_classes,
    )
    plan = with_batches(plan, [device.profile for device in problem.devices])
    return Solution(plan=plan, placements=ordered)


def round_up(value_ms: float) -> float:
    """Rounded up to a tenth of a millisecond."""
    return math.ceil(round(value_ms * 10, 6)) / 10


def _boosting_order(problem: Problem, placement: Placement) -> tuple[float, float, str]:
    """Sort key: the most available member first, then the most capable."""
    dependable = round(availability(problem, placement) / AVAILABILITY_STEP)
    name = problem.devices[placement.device].name
    return (-dependable, -placement.candidate.capability, name)


def _assignment(problem: Problem, placements: Placements, k: int, limits: PlanLimits) -> Assignment:
    c, sight = placements[k].candidate, problem.devices[placements[k].device].sight
    reason = why(problem, placements, k, limits)
    if sight is not None and sight.owner:
        reason += f"; it fetches the pictures of {sight.owner}, which is too weak to compute them"
    return Assignment(
        k=k,
        submodel=c.spec if isinstance(c.spec, SubModelSpec) else None,
        network=c.spec if isinstance(c.spec, NetworkSpec) else None,
        why=reason,
        accuracy=None
        if problem.predictor.unknown_of([c.spec])
        else problem.predictor.accuracy(c.capability),
        camera=None if sight is None else sight.camera,
        **_run_of(problem, placements[k].device, c),
    )


def _run_of(problem: Problem, device: int, c: Candidate) -> dict[str, Any]:
    """The fields that assignments and replicas have in common."""
    return {
        "device": problem.devices[device].name,
        "predicted_ms": c.predicted_ms,
        "memory_bytes": c.memory_bytes,
        "provider": c.way.provider,
        "threads": c.way.threads,
        "encoding": c.encoding,
        "runtime": c.way.runtime,
        "energy_j": c.energy_j,
        "spin": problem.devices[device].profile.spin,
    }


def _explain_unused(
    problem: Problem, placements: Sequence[Placement], limits: PlanLimits
) -> dict[str, str]:
    """Unused devices, each with the reason."""
    busy = {device for placement in placements for device in placement.devices}
    taken = {placement.candidate.identity for placement in placements}
    reasons = {}
    for index, device in enumerate(problem.devices):
        if index in busy:
            continue
        rows = device.rows[device.places(limits)]
        identities = set((device.choices.identity[rows] + device.beyond).tolist())
        if not identities:
            reasons[device.name] = why_left_out(device, limits) + _elsewhere(problem, device, busy)
        elif identities <= taken:
            reasons[device.name] = "another member already has every sub-model it could run"
        elif not _joins(device, placements, limits):
            reasons[device.name] = (
                "with its crop at the client's port too, the answers would be too late"
            )
        else:
            reasons[device.name] = (
                "by the law's order it would add next to nothing"
                if accuracy_unknown(problem, placements)
                else f"it would add less than {100 * LEAST_GAIN:g} points to the expected accuracy"
            )
    return reasons


def _elsewhere(problem: Problem, device: DeviceCandidates, busy: Collection[int]) -> str:
    """The one of the `busy` devices that computes an unused device's camera; empty if none."""
    for index in sorted(busy):
        sight = problem.devices[index].sight
        if sight is not None and sight.owner == device.name:
            return f"; {problem.devices[index].name} computes its camera {sight.camera}"
    return ""


def _joins(device: DeviceCandidates, placements: Sequence[Placement], limits: PlanLimits) -> bool:
    """Tell whether one more crop at the client's port leaves these members in time."""
    if limits.client_bps == math.inf:
        return True
    latest_ms = max(c.latency_ms(limits.quantile) for p in placements for c in p.candidates)
    places = device.places(limits)
    own_ms = device.costs.request_bytes[places] * 8e3 / limits.client_bps
    theirs_ms = total_bytes(placements) * 8e3 / limits.client_bps
    alone_ms = device.costs.latency_ms(limits.quantile)[places]
    last_ms = np.maximum(alone_ms + theirs_ms, latest_ms + own_ms)
    return bool(np.any(last_ms <= limits.target_ms))


def why_left_out(device: DeviceCandidates, limits: PlanLimits) -> str:
    """Reason why a device is unused: its fastest choice, and the limit that it exceeds."""
    if device.blind:
        return "it has no camera (--camera)"
    if device.sight is not None and (other := device.computing_neighbour(limits)):
        return f"{other} computes the camera {device.sight.camera} itself"
    c = device.quickest
    return (
        f"even {c} {limit_broken(device, c, limits)} ({c.predicted_ms.compute:.2f} ms compute, "
        f"{c.predicted_ms.network:.2f} ms network)"
    )


def nothing_fits(problem: Problem, target_ms: float) -> str:
    """One line with the nearest targets that can be met."""
    alone = problem.limits(target_ms, 1)
    able = [
        (min(c.latency_ms(alone.quantile) for c in options), device.name)
        for device in problem.devices
        if (options := device.within(replace(alone, target_ms=math.inf)))
    ]
    if not able:
        reasons = "; ".join(f"{d.name}: {why_left_out(d, alone)}" for d in problem.devices)
        if alone.max_energy_j is not None and any(len(d.rows) for d in problem.devices):
            return f"no device can answer with {alone.max_energy_j:g} J ({reasons})"
        return f"no device has the memory for a sub-model ({reasons})"
    able.sort()
    both_ms = two_by_ms(problem)
    text = (
        f"no device can answer within {target_ms:g} ms; the nearest target that could be "
        f"met is {round_up(able[0][0]):g} ms, by {able[0][1]}"
    )
    if both_ms is not None:
        text += f", and two devices can take part from {round_up(both_ms):g} ms on"
    return text


def two_by_ms(problem: Problem) -> float | None:
    """Milliseconds in which two devices can answer, each crop waiting for the other.

    None where fewer than two can answer at all.
    """
    limits = problem.limits(math.inf, 2)
    able = [found for device in problem.devices if (found := device.within(limits))]
    if len(able) < 2:
        return None
    fastest: dict[float, dict[int, tuple[float, Candidate]]] = {}
    for index, options in enumerate(able):
        for c in options:
            of_size, ms = fastest.setdefault(c.request_bytes, {}), c.latency_ms(limits.quantile)
            if index not in of_size or ms < of_size[index][0]:
                of_size[index] = (ms, c)
    few = [
        (index, c)
        for of_size in fastest.values()
        for index, (_, c) in sorted(of_size.items(), key=lambda entry: entry[1][0])[:2]
    ]
    together = []
    for (first, a), (second, b) in combinations(few, 2):
        if first != second:
            waits = waits_ms([a.request_bytes, b.request_bytes], limits.client_bps)
            pair = zip((a, b), waits, strict=True)
            together.append(max(c.with_wait(w).latency_ms(limits.quantile) for c, w in pair))
    return min(together)
