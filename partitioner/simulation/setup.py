"""From a plan and its devices' profiles to device models, with every assumption named. Plain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import Assignment, Encoding, Plan, PredictedMs, Replica
from mdp.formats.profile import DeviceProfile
from partitioner.estimates.latency import Way, own_way, points_of, predict
from partitioner.estimates.latency_members import fit_members
from partitioner.estimates.latency_quantiles import (
    ASSUMED_JITTER_MS,
    ASSUMED_SIGMA,
    CLIENT_FUSE_MS,
    CLIENT_SEND_MS,
    TWO_MEDIAN,
    jitter_of,
    spread_of,
)
from partitioner.estimates.network import network_ms, reply_bytes, request_bytes
from partitioner.simulation.models import (
    DeviceModel,
    Jittered,
    LogNormal,
    SlowSpells,
)

Milliseconds = Annotated[float, Meta(ge=0, le=3.6e6)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class Assumptions(Record, frozen=True):
    """What neither plan nor profiles tell."""

    sigma: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=3,
                description="Spread of computing times: standard deviation of their logarithm; "
                f"default: from the profile's p10_ms and p90_ms, else {ASSUMED_SIGMA:g}",
            ),
        ]
        | None
    ) = None
    jitter_ms: (
        Annotated[
            Milliseconds,
            Meta(
                description="Mean of the random delay of each message, exponential; default: from "
                f"the link's 90th percentile, else {ASSUMED_JITTER_MS:g}"
            ),
        ]
        | None
    ) = None
    loss: Annotated[
        float,
        Meta(ge=0, le=0.5, description="Share of messages with a lost packet, which TCP repeats"),
    ] = 0.0
    mean_down_s: Annotated[
        Seconds,
        Meta(description="Mean time that a device is away; its availability says how often"),
    ] = 10.0
    detect_s: Annotated[
        float,
        Meta(ge=0, le=1e6, description="From a device's loss until clients know of it"),
    ] = 3.0
    reconnect_s: Annotated[
        float, Meta(ge=0, le=1e6, description="From a device's return until it is asked again")
    ] = 0.5
    slow_every_s: (
        Annotated[Seconds, Meta(description="Mean time between slow spells of a device")] | None
    ) = None
    slow_lasts_s: Annotated[Seconds, Meta(description="Mean duration of a slow spell")] = 1.0
    slow_factor: Annotated[
        float, Meta(ge=1, le=1e4, description="How much longer computing takes in a slow spell")
    ] = 3.0
    before_ms: Annotated[
        Milliseconds,
        Meta(description="What the client needs to cut and send a picture, for each sub-model"),
    ] = CLIENT_SEND_MS
    after_ms: Annotated[Milliseconds, Meta(description="What the client needs to fuse")] = (
        CLIENT_FUSE_MS
    )
    late_ms: Annotated[
        Milliseconds,
        Meta(description="How late the client notices a deadline, which it sleeps towards"),
    ] = 1.0
    turnaround_ms: Annotated[
        Milliseconds, Meta(description="What an agent needs after computing, to send the reply")
    ] = 0.1


def device_models(
    plan: Plan,
    profiles: Mapping[str, DeviceProfile],
    num_classes: int,
    assumed: Assumptions,
    *,
    copies: int = 1,
) -> tuple[DeviceModel, ...]:
    """One model per device of `plan` and per replica, each `copies` times; raises InputError."""
    parts = parts_of(plan)
    missing = sorted({part.device for part in parts} - profiles.keys())
    if missing:
        raise InputError(
            f"--profiles: expected one of each device of the plan, found none of "
            f"{', '.join(missing)}"
        )
    models = []
    for part in parts:
        spec = plan.assignments[part.k].spec
        for copy in range(copies):
            models.append(
                device_model(
                    profiles[part.device],
                    name=part.device if copy == 0 else f"{part.device}/{copy + 1}",
                    k=part.k,
                    predicted=part.predicted_ms,
                    way=Way(
                        precision=spec.precision,
                        runtime=part.runtime,
                        provider=part.provider,
                        threads=part.threads,
                    ),
                    image_size=spec.image_size,
                    encoding=part.encoding,
                    num_classes=num_classes,
                    assumed=assumed,
                )
            )
    return tuple(models)


def parts_of(plan: Plan) -> list[Assignment | Replica]:
    """What each device of a plan is to do, assignments first."""
    return [*plan.assignments, *plan.replicas]


def device_model(
    profile: DeviceProfile,
    *,
    name: str,
    k: int,
    predicted: PredictedMs,
    way: Way,
    image_size: int,
    encoding: Encoding,
    num_classes: int,
    assumed: Assumptions,
) -> DeviceModel:
    """What `profile`'s device is like when it serves sub-model `k`; raises InputError."""
    link = profile.link
    sent, received = request_bytes(image_size, encoding), reply_bytes(num_classes)
    # What the network costs beyond its bytes: the round trip, and coding where JPEG travels.
    bytes_ms = (sent + received) * 8e3 / link.bandwidth_bps
    trip_ms = network_ms(link, image_size, num_classes, encoding) - bytes_ms
    jitter_ms = assumed.jitter_ms
    if jitter_ms is None:
        jitter = jitter_of(link)
        jitter_ms = jitter.mean_ms
        # The median that was measured has the jitter's in it.
        trip_ms -= TWO_MEDIAN * jitter.mean_ms - jitter.added_ms
    up_s, down_s = renewal(profile.availability, assumed.mean_down_s)
    slow = None
    if assumed.slow_every_s is not None:
        slow = SlowSpells(
            every_s=assumed.slow_every_s,
            lasts_s=assumed.slow_lasts_s,
            factor=assumed.slow_factor,
        )
    return DeviceModel(
        name=name,
        k=k,
        compute=LogNormal(
            median_s=predicted.compute / 1e3, sigma=sigma(profile, way, predicted.compute, assumed)
        ),
        delay=Jittered(round_trip_s=max(0.0, trip_ms) / 1e3, jitter_s=jitter_ms / 1e3),
        request_bytes=sent,
        reply_bytes=received,
        bandwidth_bps=link.bandwidth_bps,
        turnaround_s=assumed.turnaround_ms / 1e3,
        mean_up_s=up_s,
        mean_down_s=down_s,
        loss=assumed.loss,
        slow=slow,
    )


def added_model(
    plan: Plan, profile: DeviceProfile, k: int, num_classes: int, assumed: Assumptions
) -> DeviceModel:
    """`profile`'s device as one more replica of member `k`, by the latency model's prediction.

    It runs the same file, hence in the same precision and runtime. Raises InputError where the
    profile has not measured that.
    """
    assignment = plan.assignments[k]
    spec, encoding = assignment.spec, assignment.encoding
    own = own_way(profile)
    way = replace(own, precision=spec.precision, runtime=assignment.runtime)
    model = fit_members(profile, None if way == own else way)
    predicted = predict(profile, model, spec, num_classes)
    taken = {part.device for part in parts_of(plan)}
    name = f"{profile.name}/added" if profile.name in taken else profile.name
    return device_model(
        profile,
        name=name,
        k=k,
        predicted=predicted,
        way=model.way,
        image_size=spec.image_size,
        encoding=encoding,
        num_classes=num_classes,
        assumed=assumed,
    )


def sigma(profile: DeviceProfile, way: Way, compute_ms: float, assumed: Assumptions) -> float:
    """Sigma of computing times of about so many milliseconds: as asked for, else as measured."""
    if assumed.sigma is not None:
        return assumed.sigma
    points = points_of(profile, way) or profile.latency
    return float(spread_of(points).sigma(np.array([compute_ms]))[0])


def renewal(availability: float, mean_down_s: float) -> tuple[float, float]:
    """Mean seconds up and down of a device that is there for this share of the time."""
    if availability >= 1:
        return math.inf, 0.0
    return mean_down_s * availability / (1 - availability), mean_down_s


def by_name(profiles: Sequence[DeviceProfile]) -> dict[str, DeviceProfile]:
    """Profiles by their devices' names; raises InputError where one is given twice."""
    found: dict[str, DeviceProfile] = {}
    for profile in profiles:
        if profile.name in found:
            raise InputError(f"--profiles: {profile.name!r} is given twice")
        found[profile.name] = profile
    return found
