"""What a search is about: the teacher, and every device with all that it could run. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from mdp.errors import InputError
from mdp.formats.plan import (
    PLANNED_MEMBERS,
    NetworkSpec,
    PredictedAccuracy,
    PredictedMs,
    TeacherSpec,
)
from mdp.formats.profile import DeviceProfile, Precision
from partitioner.estimates.accuracy import Predictor, predictor_for, shipped_law
from partitioner.estimates.accuracy_law import Member, capability_of, together
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_members import MemberLatency
from partitioner.estimates.latency_quantiles import (
    Jitter,
    Pace,
    client_ms,
    jitter_of,
    pace_for,
    share_in_time,
)
from partitioner.estimates.macs import memory_bytes
from partitioner.estimates.network import choose_encoding, network_ms, through_port
from partitioner.planner.availability import Objective, Sums, exact_arrivals
from partitioner.planner.candidates import Device, evaluate_device, fitted_ways
from partitioner.planner.design_space import make_choices, quantised
from partitioner.planner.families import Families
from partitioner.planner.placement import Limits, Seat, settled

FP32: tuple[Precision, ...] = ("fp32",)
#: The plain ViTs of the teacher's alone.
VITS = Families()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A public network that one device could run alone instead of any plan."""

    spec: NetworkSpec
    predicted_ms: PredictedMs
    sigma: float
    jitter: Jitter
    energy_j: float | None
    capability: float

    def by_ms(self, pace: Pace) -> float:
        """When it has answered, at this pace."""
        ms = self.predicted_ms
        compute, network, sigma = (np.array([v]) for v in (ms.compute, ms.network, self.sigma))
        return float(pace.by_ms(compute, network, sigma, self.jitter)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a search needs, counted and fitted once for all its targets."""

    teacher: TeacherSpec
    predictor: Predictor
    devices: tuple[Device, ...]
    #: Each device with the teacher itself as its only choice, so far as its memory allows.
    with_teacher: tuple[Device, ...]
    #: Of each device the public networks that it could run, the most capable first; none where the
    #: teacher's pictures are smaller than any that such networks are known for.
    rivals: tuple[tuple[Rival, ...], ...]
    max_energy_j: float | None
    #: Of the answers that are to be complete within a target; None: targets are about typical ones.
    percentile: float | None = None
    #: What the client's port carries; infinite where it was not to be reckoned with.
    client_bps: float = math.inf

    @property
    def most_members(self) -> int:
        """How many members there can be."""
        return min(PLANNED_MEMBERS, len(self.devices))

    def limits(self, target_ms: float, members: int | None = None) -> Limits:
        """The limits of a plan for this target with at most so many members."""
        most = self.most_members if members is None else members
        return Limits(
            target_ms=target_ms,
            max_energy_j=self.max_energy_j,
            pace=pace_for(self.percentile, most),
            most_members=most,
            client_bps=self.client_bps,
        )


def make_problem(
    teacher: TeacherSpec,
    profiles: Sequence[DeviceProfile],
    *,
    num_classes: int = 1000,
    predictor: Predictor | None = None,
    precisions: Sequence[Precision] = FP32,
    max_energy_j: float | None = None,
    percentile: float | None = None,
    client_bps: float | None = None,
    families: Families = VITS,
) -> Problem:
    """Cost every choice on every device; raises InputError for unusable arguments.

    `client_bps` is what the client's port carries: by default as much as the quickest of the
    devices' links, and with infinity every crop has its link to itself.
    """
    _check(profiles, num_classes, max_energy_j)
    if client_bps is None:
        client_bps = max(profile.link.bandwidth_bps for profile in profiles)
    if not client_bps > 0:
        raise InputError(f"expected a client's port above 0 bit/s, got {client_bps:g}")
    if predictor is None:
        predictor = predictor_for(shipped_law(), teacher.shape, num_classes=num_classes)
    choices = make_choices(
        teacher.shape,
        predictor,
        precisions,
        shapes=None if families.vits else (),
        networks=families.networks,
    )
    whole = make_choices(teacher.shape, predictor, precisions, shapes=[teacher.shape])
    # The order in which profiles are named must not matter.
    ordered = [
        msgspec.structs.replace(profile, link=through_port(profile.link, client_bps))
        for profile in sorted(profiles, key=lambda profile: profile.name)
    ]
    with_networks = bool(families.networks) or predictor.has_networks
    fitted = [
        (profile, fitted_ways(profile, precisions, networks=with_networks)) for profile in ordered
    ]
    pace = pace_for(percentile, min(PLANNED_MEMBERS, len(ordered)))
    return Problem(
        teacher=teacher,
        predictor=predictor,
        devices=tuple(evaluate_device(*device, choices, pace) for device in fitted),
        with_teacher=tuple(evaluate_device(*device, whole, pace) for device in fitted),
        rivals=tuple(_rivals(*device, predictor) for device in fitted),
        max_energy_j=max_energy_j,
        percentile=percentile,
        client_bps=client_bps,
    )


def _rivals(
    profile: DeviceProfile,
    models: Sequence[MemberLatency],
    predictor: Predictor,
) -> tuple[Rival, ...]:
    """Every public network at every picture size that nothing quicker on the device outdoes."""
    if not predictor.has_networks:
        return ()
    predictor = replace(predictor, pretrained=None)
    found = []
    for model in models:
        if model.networks is None:
            continue
        precision, classes = model.way.precision, predictor.num_classes
        specs = [
            network.spec(size, classes, precision)
            for network in catalogue().values()
            for size in network.costs
        ]
        compute = model.networks.predict_many_ms(specs).tolist()
        values = quantised(predictor.of_specs(specs), precision)
        for spec, compute_ms, capability in zip(specs, compute, values.tolist(), strict=True):
            if math.isnan(compute_ms) or memory_bytes(spec, classes) > profile.memory_bytes:
                continue
            encoding = choose_encoding(profile.link, spec.image_size, classes)
            sent_ms = network_ms(profile.link, spec.image_size, classes, encoding)
            found.append(
                Rival(
                    spec=spec,
                    predicted_ms=PredictedMs(
                        compute=round(compute_ms, 3),
                        network=round(sent_ms, 3),
                        total=round(compute_ms + sent_ms, 3),
                    ),
                    sigma=float(model.vit.spread.sigma(np.array([compute_ms]))[0]),
                    jitter=jitter_of(profile.link),
                    energy_j=None
                    if profile.power_w is None
                    else profile.power_w * compute_ms / 1e3,
                    capability=capability,
                )
            )
    kept: list[Rival] = []
    for rival in sorted(found, key=lambda r: (r.predicted_ms.total, -r.capability)):
        if not kept or rival.capability > kept[-1].capability:
            kept.append(rival)
    return tuple(reversed(kept))


def _check(profiles: Sequence[DeviceProfile], num_classes: int, max_energy_j: float | None) -> None:
    if num_classes < 2:
        raise InputError(f"expected at least 2 classes, got {num_classes}")
    if not profiles:
        raise InputError("expected at least 1 profile, got 0")
    repeated = [name for name, n in Counter(p.name for p in profiles).items() if n > 1]
    if repeated:
        raise InputError(
            f"expected every profile once, got {', '.join(repeated)} repeatedly "
            f"({repeated[0]}*2 for several boards of a kind)"
        )
    if max_energy_j is not None and not (math.isfinite(max_energy_j) and max_energy_j > 0):
        raise InputError(f"expected an energy limit above 0 J, got {max_energy_j:g}")


def predicted_accuracy(problem: Problem, seats: Sequence[Seat]) -> PredictedAccuracy:
    """With every member in, and expected over which devices are there, counted exactly."""
    predictor = problem.predictor
    members = [
        Member(capability=c.capability, view=c.view, model=c.model)
        for c in (seat.candidate for seat in seats)
    ]
    objective, sums = exact_objective(problem, seats)
    all_in = predictor.accuracy(min(together(predictor.law, members), predictor.most))
    low, high = predictor.interval(all_in)
    return PredictedAccuracy(
        all_in=all_in,
        expected=objective.value(sums, most=predictor.beyond),
        typical_error=min(predictor.typical_error, 1.0),
        low=low,
        high=high,
        unknown=predictor.unknown,
    )


def exact_objective(problem: Problem, seats: Sequence[Seat]) -> tuple[Objective, Sums]:
    """What the seats add up to in every pattern of who is served."""
    predictor = problem.predictor
    there = [availability(problem, seat) for seat in seats]
    objective = Objective(
        predictor.law, capability_of(predictor.teacher_accuracy), exact_arrivals(there)
    )
    return objective, objective.sums([(seat.candidate, [k]) for k, seat in enumerate(seats)])


def availability(problem: Problem, seat: Seat) -> float:
    """Share of the time in which someone serves this member."""
    away = [1 - problem.devices[device].profile.availability for device in seat.devices]
    return 1 - math.prod(away)


def latency_ms(problem: Problem, seats: Sequence[Seat], pace: Pace) -> float:
    """Milliseconds of an answer at this pace, by the slowest of all who serve a member."""
    together = settled(seats, problem.client_bps)
    return max(run.by_ms(pace) for seat in together for run in seat.runs)


def share_complete(problem: Problem, seats: Sequence[Seat], target_ms: float) -> float:
    """Share of answers with every member in by the target, with all devices there."""
    left_ms = target_ms - client_ms(len(seats))
    shares = [
        share_in_time(left_ms, ms.compute, ms.network, seat.candidate.sigma, seat.candidate.jitter)
        for seat in seats
        for ms in [seat.candidate.predicted_ms]
    ]
    return math.prod(shares)
