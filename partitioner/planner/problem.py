"""The problem of a search: the teacher, and every device with its candidates. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import numpy as np

from mdp.errors import InputError
from mdp.formats.plan import PLANNED_MEMBERS, Plan, PredictedAccuracy, PredictedMs, TeacherSpec
from mdp.formats.profile import DeviceProfile, Precision, check_different
from partitioner.estimates.accuracy import Predictor, predictor_for, read_shipped_law
from partitioner.estimates.accuracy_law import LawMember, capability_of, together
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_members import MemberLatency
from partitioner.estimates.latency_quantiles import (
    LatencyQuantile,
    client_ms,
    jitter_of,
    quantile_for,
    share_in_time,
)
from partitioner.estimates.macs import memory_bytes
from partitioner.estimates.network import choose_encoding, network_ms, through_port
from partitioner.planner.availability import Objective, PartSums, exact_arrivals
from partitioner.planner.candidates import DeviceCandidates, Run, Sight, evaluate_device, fit_ways
from partitioner.planner.design_space import after_quantisation, make_design_space
from partitioner.planner.families import Families
from partitioner.planner.limits import PlanLimits
from partitioner.planner.placement import Placement, Placements, with_waits

FP32: tuple[Precision, ...] = ("fp32",)
#: The plain ViTs of the teacher's alone.
VITS = Families()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Devices with their costs, and the predictor of accuracy, for searches of any target."""

    teacher: TeacherSpec
    predictor: Predictor
    devices: tuple[DeviceCandidates, ...]
    #: Each device with the teacher as its only choice, if its memory suffices.
    with_teacher: tuple[DeviceCandidates, ...]
    #: Public networks that each device can run, the most capable first; none where the teacher's
    #: pictures are smaller than theirs.
    public_networks: tuple[tuple[Run, ...], ...]
    max_energy_j: float | None
    #: Percentage of the answers to be complete within a target; None: the typical answer is.
    percentile: float | None = None
    #: Bits per second of the client's port; infinite: not modelled.
    client_bps: float = math.inf

    @property
    def max_members(self) -> int:
        """Most members of a plan."""
        return min(PLANNED_MEMBERS, len(self.devices))

    def limits(self, target_ms: float, members: int | None = None) -> PlanLimits:
        """The limits of a plan for this target with at most so many members."""
        most = self.max_members if members is None else members
        return PlanLimits(
            target_ms=target_ms,
            max_energy_j=self.max_energy_j,
            quantile=quantile_for(self.percentile, most),
            max_members=most,
            client_bps=self.client_bps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan, and the placements that it was made of, by `k`."""

    plan: Plan
    placements: Placements


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
    cameras: Mapping[str, str] = MappingProxyType({}),
) -> Problem:
    """Cost every choice on every device; raises InputError for unusable arguments.

    `cameras` maps devices to the names of their cameras. Of several devices with one camera, the
    first has it, and the next one that can in time computes its pictures where those before cannot.
    `client_bps` is the rate of the client's port, by default that of the fastest of the devices'
    links; infinite: each crop has its link to itself.
    """
    _check(profiles, num_classes)
    if client_bps is None:
        client_bps = max(profile.link.bandwidth_bps for profile in profiles)
    if predictor is None:
        predictor = predictor_for(read_shipped_law(), teacher.shape, num_classes=num_classes)
    choices = make_design_space(
        teacher.shape,
        predictor,
        precisions,
        shapes=None if families.vits else (),
        networks=families.networks,
    )
    whole = make_design_space(teacher.shape, predictor, precisions, shapes=[teacher.shape])
    # Plans must not depend on the order of the profiles.
    ordered = [
        msgspec.structs.replace(profile, link=through_port(profile.link, client_bps))
        for profile in sorted(profiles, key=lambda profile: profile.name)
    ]
    with_networks = bool(families.networks) or predictor.has_networks
    fitted = [
        (profile, fit_ways(profile, precisions, networks=with_networks)) for profile in ordered
    ]
    quantile = quantile_for(percentile, min(PLANNED_MEMBERS, len(ordered)))
    sights = sights_of(cameras, ordered)
    able = {
        profile.name: evaluate_device(profile, models, choices, quantile, sights.get(profile.name))
        for profile, models in fitted
    }
    teaching = [
        evaluate_device(profile, models, whole, quantile, sights.get(profile.name))
        for profile, models in fitted
    ]
    return Problem(
        teacher=teacher,
        predictor=predictor,
        devices=tuple(_seeing(device, able, cameras) for device in able.values()),
        with_teacher=tuple(_seeing(device, able, cameras) for device in teaching),
        public_networks=tuple(
            ()
            if cameras and profile.name not in sights
            else _public_networks(profile, models, predictor, sights.get(profile.name))
            for profile, models in fitted
        ),
        max_energy_j=max_energy_j,
        percentile=percentile,
        client_bps=client_bps,
    )


def sights_of(cameras: Mapping[str, str], profiles: Sequence[DeviceProfile]) -> dict[str, Sight]:
    """The view of each device with a camera; raises InputError for a camera of no profile's."""
    links = {profile.name: profile.link for profile in profiles}
    for device, camera in cameras.items():
        if device not in links:
            raise InputError(
                f"plan.cameras: expected cameras of {', '.join(links)}; camera {camera!r} is "
                f"said to be {device}'s, which --profiles lacks"
            )
    owners: dict[str, str] = {}
    for device, camera in cameras.items():
        owners.setdefault(camera, device)
    numbers = {camera: number for number, camera in enumerate(sorted(owners))}
    return {
        device: Sight(
            camera=camera,
            number=numbers[camera],
            owner="" if owners[camera] == device else owners[camera],
            owner_link=None if owners[camera] == device else links[owners[camera]],
        )
        for device, camera in cameras.items()
    }


def _seeing(
    device: DeviceCandidates, able: Mapping[str, DeviceCandidates], cameras: Mapping[str, str]
) -> DeviceCandidates:
    """A device that leaves its camera to those before it that can compute it."""
    if not cameras:
        return device
    if device.sight is None:
        return replace(device, blind=True)
    shared = [name for name, camera in cameras.items() if camera == device.sight.camera]
    earlier = shared[: shared.index(device.name)]
    return replace(device, before=tuple(able[name] for name in earlier))


def _public_networks(
    profile: DeviceProfile,
    models: Sequence[MemberLatency],
    predictor: Predictor,
    sight: Sight | None,
) -> tuple[Run, ...]:
    """The Pareto front of public networks at every picture size, in time and capability."""
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
        values = after_quantisation(predictor.of_specs(specs), precision)
        for spec, compute_ms, capability in zip(specs, compute, values.tolist(), strict=True):
            if math.isnan(compute_ms) or memory_bytes(spec, classes) > profile.memory_bytes:
                continue
            encoding = choose_encoding(profile.link, spec.image_size, classes)
            sent_ms = network_ms(profile.link, spec.image_size, classes, encoding)
            if sight is not None:
                sent_ms = sight.network_ms(profile.link, spec.image_size, classes)
            found.append(
                Run(
                    spec=spec,
                    predicted_ms=PredictedMs(
                        compute=round(compute_ms, 3),
                        network=round(sent_ms, 3),
                        total=round(compute_ms + sent_ms, 3),
                    ),
                    sigma=float(model.vit.spread.sigma(np.array([compute_ms]))[0]),
                    jitter=jitter_of(profile.link),
                    energy_j=profile.power_w and profile.power_w * compute_ms / 1e3,
                    capability=capability,
                )
            )
    kept: list[Run] = []
    for run in sorted(found, key=lambda r: (r.predicted_ms.total, -r.capability)):
        if not kept or run.capability > kept[-1].capability:
            kept.append(run)
    return tuple(reversed(kept))


def _check(profiles: Sequence[DeviceProfile], num_classes: int) -> None:
    if num_classes < 2:
        raise InputError(f"expected at least 2 classes, got {num_classes}")
    if not profiles:
        raise InputError("expected at least 1 profile, got 0")
    check_different(profiles)


def accuracy_unknown(problem: Problem, placements: Sequence[Placement]) -> str:
    """Reason why no accuracy of these placements is predicted; empty where one is."""
    return problem.predictor.unknown_of([placement.candidate.spec for placement in placements])


def predict_accuracy(problem: Problem, placements: Sequence[Placement]) -> PredictedAccuracy:
    """Accuracy with every member in, and the exact expectation over available devices.

    Nothing but the reason where no recorded training supports it.
    """
    if unknown := accuracy_unknown(problem, placements):
        return PredictedAccuracy(unknown=unknown)
    predictor, specs = problem.predictor, [placement.candidate.spec for placement in placements]
    members = [
        LawMember(capability=c.capability, view=c.view, model=c.model)
        for c in (placement.candidate for placement in placements)
    ]
    all_in = predictor.accuracy(min(together(predictor.law, members), predictor.most))
    low, high = predictor.interval(all_in, specs)
    return PredictedAccuracy(
        all_in=all_in,
        expected=expected_accuracy(problem, placements),
        typical_error=min(predictor.typical_error, 1.0),
        low=low,
        high=high,
    )


def expected_accuracy(problem: Problem, placements: Sequence[Placement]) -> float:
    """Expected accuracy alone."""
    objective, sums = exact_objective(problem, placements)
    return objective.value(sums, most=problem.predictor.beyond)


def exact_objective(
    problem: Problem, placements: Sequence[Placement]
) -> tuple[Objective, PartSums]:
    """The objective over every pattern of members, and the sums of the placements."""
    predictor = problem.predictor
    there = [availability(problem, placement) for placement in placements]
    objective = Objective(
        predictor.law, capability_of(predictor.teacher_accuracy), exact_arrivals(there)
    )
    return objective, objective.sums(
        [(placement.candidate, [k]) for k, placement in enumerate(placements)]
    )


def availability(problem: Problem, placement: Placement) -> float:
    """Share of the time in which a device serves this member."""
    away = [1 - problem.devices[device].profile.availability for device in placement.devices]
    return 1 - math.prod(away)


def latency_ms(
    problem: Problem, placements: Sequence[Placement], quantile: LatencyQuantile
) -> float:
    """Milliseconds of an answer at this quantile, by the slowest device."""
    waiting = with_waits(placements, problem.client_bps)
    return max(c.latency_ms(quantile) for placement in waiting for c in placement.candidates)


def share_complete(problem: Problem, placements: Sequence[Placement], target_ms: float) -> float:
    """Share of answers with every member in by the target, all devices available."""
    left_ms = target_ms - client_ms(len(placements))
    shares = [
        share_in_time(
            left_ms, ms.compute, ms.network, placement.candidate.sigma, placement.candidate.jitter
        )
        for placement in placements
        for ms in [placement.candidate.predicted_ms]
    ]
    return math.prod(shares)
