"""Which device runs which sub-model: a first search over a small grid of shapes. Pure.

Every shape is tried on every device; then the devices choose one after another, strongest first,
by the capability proxy of `partitioner.grid`.
"""

import math
from collections import Counter
from collections.abc import Sequence

from mdp.errors import InputError, PlanRefused
from mdp.plan import (
    MAX_MEMBERS,
    Assignment,
    Plan,
    SingleDevice,
    SubModelSpec,
    TeacherSpec,
)
from mdp.profile import DeviceProfile
from partitioner.cost import memory_bytes
from partitioner.grid import Candidate, Device, evaluate_grid, size_of, sub_model_grid, words
from partitioner.latency import predict
from partitioner.network import choose_encoding

#: A sub-model whose picture size, or whose width and depth, another member already has counts this
#: much less, once per such member: unlike members err differently, and that is what an ensemble
#: lives on. How much a difference is worth is a guess until subsets are measured; for scale, from
#: DeiT-S to DeiT-Ti the MACs fall to a quarter and ImageNet accuracy from 79.8 to 72.2 % (Touvron
#: et al., arXiv 2012.12877).
REPEATED_IMAGE_SIZE, REPEATED_MODEL_SIZE = 0.5, 0.8
#: Availabilities closer than one step count as equal when the boosting order is made.
AVAILABILITY_STEP = 0.05


Chosen = list[tuple[Device, Candidate]]


def make_plan(
    teacher: TeacherSpec,
    profiles: Sequence[DeviceProfile],
    *,
    target_ms: float,
    num_classes: int = 1000,
) -> Plan:
    """Assign a different sub-model to every device that can answer within `target_ms`.

    The plan is marked as refused where one device alone does at least as well. While accuracy is
    only a proxy, "at least as well" is claimed where it needs no predictor: one device runs the
    teacher itself in time, or a sub-model with at least the MACs of all members together, or there
    is only one device. Anything finer would be a guess dressed up as a verdict. Raises InputError
    for unusable arguments and PlanRefused, naming the nearest target that could be met, when no
    device can take part.
    """
    _check(profiles, target_ms, num_classes)
    shapes = sub_model_grid(teacher.shape)
    devices = [evaluate_grid(p, shapes, teacher.shape, target_ms, num_classes) for p in profiles]
    able = [device for device in devices if device.feasible]
    if not able:
        raise PlanRefused(_nothing_fits(devices, target_ms))
    left_out = {d.name: _why_left_out(d, target_ms) for d in devices if not d.feasible}
    chosen: Chosen = []
    for device in sorted(able, key=_strongest_first):
        pick = _pick(device, [candidate.spec for _, candidate in chosen])
        if pick is None:
            left_out[device.name] = "another member already has every sub-model it could run"
        else:
            chosen.append((device, pick))
    chosen.sort(key=_boosting_order)
    single = _single_device(teacher.shape, devices, target_ms, num_classes)
    reason = _reason_to_refuse(chosen, single, target_ms)
    assignments = [_assignment(k, chosen, target_ms, num_classes) for k, _ in enumerate(chosen)]
    return Plan(
        teacher=teacher,
        target_ms=target_ms,
        refused=bool(reason),
        reason=reason,
        assignments=assignments,
        single_device=single,
        left_out=left_out,
    )


def _check(profiles: Sequence[DeviceProfile], target_ms: float, num_classes: int) -> None:
    if not (math.isfinite(target_ms) and target_ms > 0):
        raise InputError(f"expected a latency target above 0 ms, got {target_ms}")
    if num_classes < 2:
        raise InputError(f"expected at least 2 classes, got {num_classes}")
    if not 1 <= len(profiles) <= MAX_MEMBERS:
        raise InputError(f"expected 1 to {MAX_MEMBERS} profiles, got {len(profiles)}")
    repeated = [name for name, n in Counter(p.name for p in profiles).items() if n > 1]
    if repeated:
        raise InputError(f"expected every profile once, got {', '.join(repeated)} repeatedly")


def _strongest_first(device: Device) -> tuple[float, str]:
    """The order in which devices choose: large pictures should go where they can be used."""
    return (-device.feasible[0].score, device.name)


def _boosting_order(part: tuple[Device, Candidate]) -> tuple[float, float, str]:
    """f_0 carries most: the most dependable device first, then the most capable."""
    device, candidate = part
    dependable = round(device.profile.availability / AVAILABILITY_STEP)
    return (-dependable, -candidate.score, device.name)


def _pick(device: Device, taken: Sequence[SubModelSpec]) -> Candidate | None:
    """The most capable feasible sub-model that nobody has taken, or None."""
    sizes = {size_of(spec) for spec in taken}
    image_sizes = Counter(spec.image_size for spec in taken)
    model_sizes = Counter((spec.embed_dim, spec.depth) for spec in taken)

    def worth(candidate: Candidate) -> float:
        spec = candidate.spec
        like_image = REPEATED_IMAGE_SIZE ** image_sizes[spec.image_size]
        like_model = REPEATED_MODEL_SIZE ** model_sizes[spec.embed_dim, spec.depth]
        return candidate.score * like_image * like_model

    free = (candidate for candidate in device.feasible if size_of(candidate.spec) not in sizes)
    return max(free, key=worth, default=None)


def _single_device(
    teacher: SubModelSpec, devices: Sequence[Device], target_ms: float, num_classes: int
) -> SingleDevice:
    """The fastest device that runs the teacher in time, else the most capable sub-model of any."""
    alone = [
        (predicted.total, device.name, predicted)
        for device in devices
        if memory_bytes(teacher, num_classes) <= device.profile.memory_bytes
        and (predicted := predict(device.profile, device.latency, teacher, num_classes)).total
        <= target_ms
    ]
    if alone:
        _, name, predicted = min(alone, key=lambda entry: entry[:2])
        return SingleDevice(device=name, submodel=teacher, predicted_ms=predicted, is_teacher=True)
    able = [device for device in devices if device.feasible]
    best = min(able, key=lambda d: (-d.feasible[0].score, d.feasible[0].predicted_ms.total, d.name))
    top = best.feasible[0]
    return SingleDevice(
        device=best.name, submodel=top.spec, predicted_ms=top.predicted_ms, is_teacher=False
    )


def _reason_to_refuse(chosen: Chosen, single: SingleDevice, target_ms: float) -> str:
    """Why one device does at least as well, or an empty text."""
    if single.is_teacher:
        return (
            f"{single.device} runs the teacher itself in {single.predicted_ms.total:.1f} ms, "
            f"within the target of {target_ms:g} ms"
        )
    if len(chosen) == 1:
        return f"only {chosen[0][0].name} can take part, so there is nothing to run in parallel"
    total_macs = sum(candidate.macs for _, candidate in chosen)
    latency_ms = max(candidate.predicted_ms.total for _, candidate in chosen)
    for device, _ in chosen:
        for candidate in device.feasible:
            if candidate.macs >= total_macs and candidate.predicted_ms.total <= latency_ms:
                return (
                    f"{device.name} alone runs a sub-model of {words(candidate.spec)} in "
                    f"{candidate.predicted_ms.total:.1f} ms, which computes at least as much as "
                    f"all {len(chosen)} members together in {latency_ms:.1f} ms"
                )
    return ""


def _assignment(k: int, chosen: Chosen, target_ms: float, num_classes: int) -> Assignment:
    device, pick = chosen[k]
    profile = device.profile
    others = [(other.name, candidate.spec) for other, candidate in chosen if other is not device]
    return Assignment(
        k=k,
        device=device.name,
        submodel=pick.spec,
        predicted_ms=pick.predicted_ms,
        memory_bytes=pick.memory_bytes,
        provider=profile.provider,
        threads=profile.threads,
        why=_why(device, pick, others, target_ms),
        encoding=choose_encoding(profile.link, pick.spec.image_size, num_classes),
    )


def _why(
    device: Device, pick: Candidate, others: Sequence[tuple[str, SubModelSpec]], target_ms: float
) -> str:
    """One sentence: what was chosen, and which limit the next bigger one would break."""
    text = (
        f"{words(pick.spec)} takes {pick.predicted_ms.total:.2f} of {target_ms:g} ms, and "
        f"{_next_bigger(device, pick, others, target_ms)}"
    )
    top = device.feasible[0].spec
    if top.image_size == pick.spec.image_size:
        return text
    owner = next((name for name, spec in others if spec.image_size == top.image_size), None)
    if owner is None:
        return text
    return f"{text}; {top.image_size} px is left to {owner}, for unlike views"


def _next_bigger(
    device: Device, pick: Candidate, others: Sequence[tuple[str, SubModelSpec]], target_ms: float
) -> str:
    """What keeps the next bigger one with the same picture size from being taken."""
    bigger = [
        candidate
        for candidate in device.grid
        if candidate.spec.image_size == pick.spec.image_size and candidate.score > pick.score
    ]
    if not bigger:
        return "none with this picture size and below the teacher is bigger"
    following = min(bigger, key=lambda candidate: candidate.score)
    text = f"the next bigger one with this picture size ({words(following.spec)})"
    limit = _limit_broken(device, following, target_ms)
    if limit:
        return f"{text} {limit}"
    # Both have the same picture size, so width and depth are what tells against this one.
    like = (following.spec.embed_dim, following.spec.depth)
    owner = next(name for name, spec in others if (spec.embed_dim, spec.depth) == like)
    return f"{text} would have the width and depth of the one on {owner}"


def _limit_broken(device: Device, candidate: Candidate, target_ms: float) -> str:
    """Which limit this candidate breaks on this device, and by how much; empty if none."""
    over_bytes = candidate.memory_bytes - device.profile.memory_bytes
    if over_bytes > 0:
        return f"would need {over_bytes / 1e6:.1f} MB more memory than there is"
    over_ms = candidate.predicted_ms.total - target_ms
    if over_ms > 0:
        return f"would be {over_ms:.2f} ms too late"
    return ""


def _why_left_out(device: Device, target_ms: float) -> str:
    """Why a device has no part: its cheapest shape, and the limit which that breaks."""
    cheapest = min(device.grid, key=lambda c: (c.predicted_ms.total, c.memory_bytes))
    return (
        f"even {words(cheapest.spec)} {_limit_broken(device, cheapest, target_ms)} "
        f"({cheapest.predicted_ms.compute:.2f} ms compute, "
        f"{cheapest.predicted_ms.network:.2f} ms network)"
    )


def _nothing_fits(devices: Sequence[Device], target_ms: float) -> str:
    """One line that names the nearest targets which could be met."""
    fastest = sorted(
        (min(c.predicted_ms.total for c in fitting), device.name)
        for device in devices
        if (fitting := [c for c in device.grid if c.memory_bytes <= device.profile.memory_bytes])
    )
    if not fastest:
        reasons = "; ".join(f"{d.name}: {_why_left_out(d, target_ms)}" for d in devices)
        return f"no device has the memory for a sub-model ({reasons})"
    text = (
        f"no device can answer within {target_ms:g} ms; the nearest target that could be met is "
        f"{_rounded_up(fastest[0][0]):g} ms, by {fastest[0][1]}"
    )
    if len(fastest) > 1:
        text += f", and two devices can take part from {_rounded_up(fastest[1][0]):g} ms on"
    return text


def _rounded_up(value_ms: float) -> float:
    return math.ceil(value_ms * 10) / 10
