"""Explanations of a plan: each device's limit, and the gain of the next larger sub-model. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdp.formats.profile import DeviceProfile
from partitioner.estimates.latency import load_factor
from partitioner.estimates.latency_quantiles import LatencyQuantile
from partitioner.planner.candidates import Candidate, DeviceCandidates
from partitioner.planner.limits import PlanLimits
from partitioner.planner.placement import Placement
from partitioner.planner.problem import Problem, Solution, accuracy_unknown, expected_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One device's part in the plan, in sentences."""

    device: str
    k: int | None
    sentences: list[str]


def limit_broken(device: DeviceCandidates, c: Candidate, limits: PlanLimits) -> str:
    """The limit that a candidate exceeds on a device, and by how much; empty if none."""
    over_bytes = c.memory_bytes - device.profile.memory_bytes
    if over_bytes > 0:
        return f"would need {over_bytes / 1e6:.1f} MB more memory than there is"
    over_ms = c.latency_ms(limits.quantile) - limits.target_ms
    if over_ms > 0:
        return f"would be {over_ms:.2f} ms too late"
    if limits.max_energy_j is None:
        return ""
    if c.energy_j is None:
        return "would need energy that cannot be known, for the profile has no `power_w`"
    if c.energy_j > limits.max_energy_j:
        return f"would need {c.energy_j - limits.max_energy_j:.3f} J more than one answer may"
    return ""


def next_bigger(
    device: DeviceCandidates, pick: Candidate, quantile: LatencyQuantile
) -> Candidate | None:
    """The fastest more capable choice with the same view; None if there is none."""
    choices = device.choices
    same = (choices.view + device.beyond == pick.view) & choices.fast_on(device.profile)
    rows = np.flatnonzero(same & (choices.capability > pick.capability * (1 + 1e-9)))
    table = device.cost_table(rows)
    places = np.flatnonzero(table.way >= 0)
    if not len(places):
        return None
    total_ms, capability = table.latency_ms(quantile)[places], choices.capability[rows[places]]
    place = int(places[np.lexsort((-capability, total_ms))[0]])
    bigger = device.candidate(table, place, rows[place])
    # Pictures of one size wait equally long.
    return bigger.with_wait(pick.wait_ms)


def why(problem: Problem, placements: Sequence[Placement], k: int, limits: PlanLimits) -> str:
    """One sentence: the choice, and the limit that the next larger one exceeds."""
    placement = placements[k]
    device, pick = problem.devices[placement.device], placement.candidate
    text = f"{pick} takes {share_of_target(pick, limits)}, and "
    following = next_bigger(device, pick, limits.quantile)
    if following is None:
        return text + "none tried with this picture size is bigger"
    text += f"the next bigger one with this picture size ({following})"
    limit = limit_broken(device, following, limits)
    if limit:
        return f"{text} {limit}"
    for other in placements:
        if other.candidate.identity == following.identity:
            return f"{text} is the one on {problem.devices[other.device].name}"
    if accuracy_unknown(problem, placements):
        return f"{text} makes no plan that the law ranks clearly higher"
    gain = gain_of(problem, placements, k, following)
    return f"{text} would change the expected accuracy by {100 * gain:+.2f} points"


def share_of_target(c: Candidate, limits: PlanLimits) -> str:
    """The share of the target that a sub-model takes, slow answers included with a percentile."""
    text = f"{c.predicted_ms.total:.2f} of {limits.target_ms:g} ms"
    if limits.quantile.median:
        return text
    return (
        f"{text} typically and {c.latency_ms(limits.quantile):.2f} with slow answers and the client"
    )


def why_replica(problem: Problem, placements: Sequence[Placement], k: int) -> str:
    """One sentence: the gain of a member's replicas."""
    placement = placements[k]
    device = problem.devices[placement.device]
    text = f"{device.name} answers {device.profile.availability:.0%} of the time; "
    if accuracy_unknown(problem, placements):
        return f"{text}a member of its own would by the law's order add no more"
    without = [*placements[:k], replace(placement, replicas=()), *placements[k + 1 :]]
    gain = expected_accuracy(problem, placements) - expected_accuracy(problem, without)
    return (
        f"{text}with its replicas the expected accuracy is {100 * gain:.2f} points higher, and a "
        "member of its own would add no more"
    )


def gain_of(problem: Problem, placements: Sequence[Placement], k: int, instead: Candidate) -> float:
    """Change of the expected accuracy with another candidate as member k."""
    changed = [*placements[:k], replace(placements[k], candidate=instead), *placements[k + 1 :]]
    return expected_accuracy(problem, changed) - expected_accuracy(problem, placements)


def explain(problem: Problem, solution: Solution) -> list[Explanation]:
    """For each device the reason for its choice, its limit, and the uncertainty of its latency."""
    plan, placements = solution.plan, solution.placements
    limits = problem.limits(plan.target_ms, len(placements))
    found, replicas = [], []
    for k, placement in enumerate(placements):
        sentences = _member_sentences(problem, placements, k, limits, plan.assignments[k].why)
        name = problem.devices[placement.device].name
        found.append(Explanation(device=name, k=k, sentences=sentences))
        replicas += [(k, problem.devices[index], c) for index, c in placement.replicas]
    for (k, device, c), replica in zip(replicas, plan.replicas, strict=True):
        sentences = [f"Serves member {k} too: {replica.why}.", _sureness(device, c)]
        found.append(Explanation(device=device.name, k=k, sentences=sentences))
    for name, reason in plan.left_out.items():
        found.append(Explanation(device=name, k=None, sentences=[f"Left out: {reason}."]))
    return found


def _member_sentences(
    problem: Problem, placements: Sequence[Placement], k: int, limits: PlanLimits, why_this: str
) -> list[str]:
    placement = placements[k]
    device, pick = problem.devices[placement.device], placement.candidate
    unknown = accuracy_unknown(problem, placements)
    sent = f"sent as {pick.encoding}"
    if device.sight is not None:
        sent = f"on the pictures of camera {device.sight.camera}"
    sentences = [
        f"Runs {pick} ({pick.way}), {sent}{'' if unknown else _worth(problem, placements, k)}.",
        f"{why_this[0].upper()}{why_this[1:]}.",
    ]
    following = None if unknown else next_bigger(device, pick, limits.quantile)
    if following is not None:
        gain = gain_of(problem, placements, k, following)
        sentences.append(
            f"That one would have changed the expected accuracy by {100 * gain:+.2f} points."
        )
    sentences += [_waits(pick, limits), _sureness(device, pick)]
    return [sentence for sentence in sentences if sentence]


def _worth(problem: Problem, placements: Sequence[Placement], k: int) -> str:
    """The predicted accuracy of a member alone, and what it adds to the others."""
    alone = problem.predictor.accuracy(placements[k].candidate.capability)
    worth = expected_accuracy(problem, placements)
    if placements[1:]:
        worth -= expected_accuracy(problem, [*placements[:k], *placements[k + 1 :]])
    return (
        f": predicted right on {alone:.1%} alone, and worth {100 * worth:.2f} points of the "
        "expected accuracy"
    )


def _waits(pick: Candidate, limits: PlanLimits) -> str:
    """The member's wait at the client's port; empty where there is none."""
    if round(pick.wait_ms, 2) == 0:
        return ""
    return (
        f"Of that network its crop ({pick.request_bytes / 1e3:.1f} kB) waits {pick.wait_ms:.2f} ms "
        f"for the crops of the others, which leave through the same port of the client "
        f"({limits.client_bps / 1e6:g} Mbit/s)."
    )


def _sureness(device: DeviceCandidates, pick: Candidate) -> str:
    """The interval of the latency, and the dimensions in which it extrapolates."""
    estimate = device.model_of(pick).estimate(pick.spec, device.choices.num_classes)
    how = device.profile.provenance["latency"].method
    text = (
        f"Compute is expected between {estimate.low_ms:.2f} and {estimate.high_ms:.2f} ms, by "
        f"{how} latencies"
    )
    if estimate.outside:
        text += f"; outside of them: {estimate.outside}"
    return ". ".join([text, *cautions(device.profile)]) + "."


def cautions(profile: DeviceProfile) -> list[str]:
    """Reasons why a profile's latencies are less certain: interruption, load, throttling."""
    record = profile.probe
    if record is None:
        return []
    found = []
    if not record.complete:
        found.append(
            f"Its probe was interrupted: {len(profile.latency)} of {record.planned_points} points"
        )
    if record.busy_points:
        found.append(
            f"During {record.busy_points} of {len(profile.latency)} points others kept it busy, so "
            "it may be faster"
        )
    slower = load_factor(profile)
    if record.sustained is not None and slower > 1:
        found.append(
            f"After {record.sustained.minutes:g} minutes of load it takes {slower - 1:.0%} longer, "
            "which is planned with"
        )
    return found
