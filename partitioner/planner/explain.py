"""Why a plan is as it is: what limits each device, and what the next bigger sub-model would gain.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdp.formats.plan import Plan, Spec
from mdp.formats.profile import DeviceProfile
from partitioner.estimates.latency import sustained_factor
from partitioner.estimates.latency_quantiles import TYPICAL, Pace
from partitioner.planner.candidates import Candidate, Device, candidate, timetable
from partitioner.planner.placement import Limits, Seat, Seats, settled
from partitioner.planner.problem import Problem, predicted_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One device's part, in sentences for people."""

    device: str
    k: int | None
    sentences: list[str]


def limit_broken(device: Device, c: Candidate, limits: Limits) -> str:
    """Which limit this candidate breaks on this device, and by how much; empty if none."""
    over_bytes = c.memory_bytes - device.profile.memory_bytes
    if over_bytes > 0:
        return f"would need {over_bytes / 1e6:.1f} MB more memory than there is"
    over_ms = c.by_ms(limits.pace) - limits.target_ms
    if over_ms > 0:
        return f"would be {over_ms:.2f} ms too late"
    if limits.max_energy_j is None:
        return ""
    if c.energy_j is None:
        return "would need energy that cannot be known, for the profile has no `power_w`"
    if c.energy_j > limits.max_energy_j:
        return f"would need {c.energy_j - limits.max_energy_j:.3f} J more than one answer may"
    return ""


def next_bigger(device: Device, pick: Candidate, pace: Pace = TYPICAL) -> Candidate | None:
    """The quickest choice more capable than the pick that sees the same; None if there is none."""
    choices = device.choices
    same = (choices.view == pick.view) & choices.fast_on(device.profile)
    rows = np.flatnonzero(same & (choices.capability > pick.capability * (1 + 1e-9)))
    table = timetable(device.profile, device.models, choices, rows)
    places = np.flatnonzero(table.way >= 0)
    if not len(places):
        return None
    order = places[np.lexsort((-choices.capability[rows[places]], table.by_ms(pace)[places]))]
    place = int(order[0])
    bigger = candidate(device.profile, device.models, choices, table, place, int(rows[place]))
    # Of the same picture size, it waits as long for the crops of others.
    return bigger.waiting(pick.wait_ms)


def why(problem: Problem, seats: Sequence[Seat], k: int, limits: Limits) -> str:
    """One sentence: what was chosen, and which limit the next bigger one would break."""
    seat = seats[k]
    device, pick = problem.devices[seat.device], seat.candidate
    text = f"{pick} takes {taken(pick, limits)}, and "
    following = next_bigger(device, pick, limits.pace)
    if following is None:
        return text + "none tried with this picture size is bigger"
    text += f"the next bigger one with this picture size ({following})"
    limit = limit_broken(device, following, limits)
    if limit:
        return f"{text} {limit}"
    if any(other.candidate.identity == following.identity for other in seats):
        owner = next(s for s in seats if s.candidate.identity == following.identity)
        return f"{text} is the one on {problem.devices[owner.device].name}"
    gain = gain_of(problem, seats, k, following)
    return f"{text} would change the expected accuracy by {100 * gain:+.2f} points"


def taken(c: Candidate, limits: Limits) -> str:
    """What of the target a sub-model takes: typically, or with what is kept for slow answers."""
    text = f"{c.predicted_ms.total:.2f} of {limits.target_ms:g} ms"
    if limits.pace.typical:
        return text
    return f"{text} typically and {c.by_ms(limits.pace):.2f} with slow answers and the client"


def why_replica(problem: Problem, seats: Sequence[Seat], k: int) -> str:
    """One sentence about what a further device for a member is worth."""
    seat = seats[k]
    alone = Seat(device=seat.device, candidate=seat.candidate)
    without = [*seats[:k], alone, *seats[k + 1 :]]
    gain = (
        predicted_accuracy(problem, seats).expected - predicted_accuracy(problem, without).expected
    )
    name = problem.devices[seat.device].name
    there = problem.devices[seat.device].profile.availability
    return (
        f"{name} answers {there:.0%} of the time; with its replicas the expected accuracy is "
        f"{100 * gain:.2f} points higher, and a member of its own would add no more"
    )


def gain_of(problem: Problem, seats: Sequence[Seat], k: int, instead: Candidate) -> float:
    """By how much expected accuracy changes with another candidate in member k's place."""
    changed = Seat(device=seats[k].device, candidate=instead, replicas=seats[k].replicas)
    now = predicted_accuracy(problem, seats).expected
    return predicted_accuracy(problem, [*seats[:k], changed, *seats[k + 1 :]]).expected - now


def explain(problem: Problem, plan: Plan) -> list[Explanation]:
    """For each device why this and not the next bigger one, what limits it, and how sure it is."""
    limits = problem.limits(plan.target_ms, len(plan.assignments))
    seats = seats_of(problem, plan)
    told = [
        Explanation(
            device=problem.devices[seat.device].name,
            k=k,
            sentences=_member_sentences(problem, seats, k, limits, plan.assignments[k].why),
        )
        for k, seat in enumerate(seats)
    ]
    for replica in plan.replicas:
        device = _device(problem, replica.device)
        run = next(c for d, c in seats[replica.k].replicas if problem.devices[d] is device)
        sentences = [f"Serves member {replica.k} too: {replica.why}.", _sureness(device, run)]
        told.append(Explanation(device=replica.device, k=replica.k, sentences=sentences))
    for name, reason in plan.left_out.items():
        told.append(Explanation(device=name, k=None, sentences=[f"Left out: {reason}."]))
    return told


def seats_of(problem: Problem, plan: Plan) -> Seats:
    """The seats that a plan of this problem came from, by k, with what their crops wait."""
    index = {device.name: number for number, device in enumerate(problem.devices)}
    found = []
    for a in plan.assignments:
        choice = _choice(problem, a.spec)
        replicas = []
        for replica in plan.replicas:
            if replica.k == a.k:
                run = problem.devices[index[replica.device]].running(choice)
                assert run is not None
                replicas.append((index[replica.device], run))
        own = problem.devices[index[a.device]].running(choice)
        assert own is not None
        found.append(Seat(device=index[a.device], candidate=own, replicas=tuple(replicas)))
    return settled(found, problem.client_bps)


def _choice(problem: Problem, spec: Spec) -> int:
    return problem.devices[0].choices.specs.index(spec)


def _device(problem: Problem, name: str) -> Device:
    return next(device for device in problem.devices if device.name == name)


def _member_sentences(
    problem: Problem, seats: Sequence[Seat], k: int, limits: Limits, why_this: str
) -> list[str]:
    seat = seats[k]
    device, pick = problem.devices[seat.device], seat.candidate
    alone = problem.predictor.accuracy(pick.capability)
    with_all = predicted_accuracy(problem, seats)
    without = predicted_accuracy(problem, [*seats[:k], *seats[k + 1 :]]) if seats[1:] else None
    worth = with_all.expected - (without.expected if without else 0.0)
    sentences = [
        f"Runs {pick} ({pick.way}), sent as {pick.encoding}: predicted right on {alone:.1%} alone, "
        f"and worth {100 * worth:.2f} points of the expected accuracy.",
        f"{why_this[0].upper()}{why_this[1:]}.",
    ]
    following = next_bigger(device, pick, limits.pace)
    if following is not None:
        gain = gain_of(problem, seats, k, following)
        sentences.append(
            f"That one would have changed the expected accuracy by {100 * gain:+.2f} points."
        )
    sentences += [_limited_by(device, pick, following, limits), _waits(pick, limits)]
    sentences.append(_sureness(device, pick))
    return [sentence for sentence in sentences if sentence]


def _limited_by(
    device: Device, pick: Candidate, following: Candidate | None, limits: Limits
) -> str:
    """What keeps a device from more: compute, network, memory, energy, or nothing."""
    ms = pick.predicted_ms
    shares = (
        f"{ms.compute:.2f} ms compute, {ms.network:.2f} ms network, "
        f"{limits.target_ms - pick.by_ms(limits.pace):.2f} ms slack"
    )
    if following is None:
        return f"Limited by nothing but the grid: {shares}."
    if following.memory_bytes > device.profile.memory_bytes:
        return f"Limited by memory: {shares}."
    if following.by_ms(limits.pace) > limits.target_ms:
        by = "network" if ms.network > ms.compute else "compute"
        return f"Limited by {by}: {shares}."
    if limits.max_energy_j is not None:
        return f"Limited by energy, {pick.energy_j or 0.0:.3f} J of this device: {shares}."
    return f"Limited by what other members have: {shares}."


def _waits(pick: Candidate, limits: Limits) -> str:
    """What the client's port costs this member; nothing where no other crop goes through it."""
    if not pick.wait_ms:
        return ""
    return (
        f"Of that network its crop ({pick.request_bytes / 1e3:.1f} kB) waits {pick.wait_ms:.2f} ms "
        f"for the crops of the others, which leave through the same port of the client "
        f"({limits.client_bps / 1e6:g} Mbit/s)."
    )


def _sureness(device: Device, pick: Candidate) -> str:
    """How far the latency may be off, and where it lies outside of what was measured."""
    model = next(model for model in device.models if model.way == pick.way)
    estimate = model.estimate(pick.spec, device.choices.num_classes)
    how = device.profile.provenance["latency"].method
    text = (
        f"Compute is expected between {estimate.low_ms:.2f} and {estimate.high_ms:.2f} ms, by "
        f"{how} latencies"
    )
    if estimate.outside:
        text += f"; outside of them: {estimate.outside}"
    return ". ".join([text, *cautions(device.profile)]) + "."


def cautions(profile: DeviceProfile) -> list[str]:
    """What its probe went through that makes a profile's latencies less sure."""
    record = profile.probe
    if record is None:
        return []
    said = []
    if not record.complete:
        said.append(
            f"Its probe was interrupted: {len(profile.latency)} of {record.planned_points} points"
        )
    if record.busy_points:
        said.append(
            f"During {record.busy_points} of {len(profile.latency)} points others kept it busy, so "
            "it may be faster"
        )
    slower = sustained_factor(profile)
    if record.sustained is not None and slower > 1:
        said.append(
            f"After {record.sustained.minutes:g} minutes of load it takes {slower - 1:.0%} longer, "
            "which is planned with"
        )
    return said
