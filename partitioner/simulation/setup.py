"""Device models from a plan and its devices' profiles."""

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
from partitioner.estimates.latency_quantiles import TWO_MEDIAN, jitter_of, spread_of
from partitioner.estimates.network import FRAMING_BYTES, network_ms, reply_bytes, request_bytes
from partitioner.simulation.models import DeviceModel, Jittered, LogNormal

#: An agent's time after computing, in which it sends the reply.
TURNAROUND_S = 1e-4
#: Time after the moment of decision at which a client wakes: the 90th percentile of an idle event
#: loop; a blocking client takes 0.2 ms.
LATE_S = 1e-3


class Assumptions(Record, frozen=True):
    """Assumptions that neither plan nor profiles contain."""

    #: Standard deviation of the logarithm of computing times, and mean delay of a message, which is
    #: exponential; None: from the profile, else `ASSUMED_SIGMA` and `ASSUMED_JITTER_MS`.
    sigma: Annotated[float, Meta(ge=0, le=3)] | None = None
    jitter_ms: Annotated[float, Meta(ge=0, le=3.6e6)] | None = None
    #: Share of messages with a lost packet.
    loss: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    #: Mean duration of a failure.
    mean_down_s: Annotated[float, Meta(gt=0, le=1e9)] = 10.0
    #: Time from a device's loss until clients know of it.
    detect_s: Annotated[float, Meta(ge=0, le=1e6)] = 3.0


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
        member = plan.assignments[part.k]
        spec = member.spec
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
                    looks=member.camera is not None,
                    rungs=_shares(member),
                )
            )
    return tuple(models)


def _shares(member: Assignment) -> tuple[float, ...]:
    """Computing time at each rung below the top, as a share of that at the top."""
    return tuple(rung.compute_ms / member.predicted_ms.compute for rung in member.lower)


def parts_of(plan: Plan) -> list[Assignment | Replica]:
    """All seats of a plan, assignments first."""
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
    looks: bool = False,
    rungs: tuple[float, ...] = (),
) -> DeviceModel:
    """The model of `profile`'s device serving sub-model `k`; raises InputError.

    A device that `looks` through its own camera is sent no crop.
    """
    link = profile.link
    sent = FRAMING_BYTES if looks else request_bytes(image_size, encoding)
    received = reply_bytes(num_classes)
    # Without the bytes: the round trip, and JPEG coding.
    bytes_ms = (sent + received) * 8e3 / link.bandwidth_bps
    asked_ms = network_ms(link, image_size, num_classes, encoding)
    trip_ms = (predicted.network if looks else asked_ms) - bytes_ms
    jitter_ms = assumed.jitter_ms
    if jitter_ms is None:
        jitter = jitter_of(link)
        jitter_ms = jitter.mean_ms
        # The measured median includes the jitter's.
        trip_ms -= TWO_MEDIAN * jitter.mean_ms - jitter.added_ms
    up_s, down_s = renewal(profile.availability, assumed.mean_down_s)
    return DeviceModel(
        name=name,
        k=k,
        compute=LogNormal(
            median_s=predicted.compute / 1e3, sigma=sigma(profile, way, predicted.compute, assumed)
        ),
        delay=Jittered(round_trip_s=max(0.0, trip_ms) / 1e3, jitter_s=jitter_ms / 1e3),
        request_bytes=sent,
        waiting_bytes=round(request_bytes(image_size, "raw") if looks else sent),
        reply_bytes=received,
        bandwidth_bps=link.bandwidth_bps,
        turnaround_s=TURNAROUND_S,
        mean_up_s=up_s,
        mean_down_s=down_s,
        loss=assumed.loss,
        rungs=rungs,
    )


def replica_model(
    plan: Plan, profile: DeviceProfile, k: int, num_classes: int, assumed: Assumptions
) -> DeviceModel:
    """`profile`'s device as one more replica of member `k`, by the latency model's prediction.

    It runs the same file, in the same precision and runtime. Raises InputError where the profile
    has no measurement of these.
    """
    assignment = plan.assignments[k]
    spec, encoding = assignment.spec, assignment.encoding
    own = own_way(profile)
    way = replace(own, precision=spec.precision, runtime=assignment.runtime)
    model = fit_members(profile, None if way == own else way)
    compute_ms = model.predict_ms(spec, num_classes)
    predicted = predict(profile, compute_ms, spec.image_size, num_classes)
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
        rungs=_shares(assignment),
    )


def sigma(profile: DeviceProfile, way: Way, compute_ms: float, assumed: Assumptions) -> float:
    """Sigma of computing times of about `compute_ms`: as assumed, else as measured."""
    if assumed.sigma is not None:
        return assumed.sigma
    points = points_of(profile, way) or profile.latency
    return float(spread_of(points).sigma(np.array([compute_ms]))[0])


def renewal(availability: float, mean_down_s: float) -> tuple[float, float]:
    """Mean seconds up and down of a device of this availability."""
    if availability >= 1:
        return math.inf, 0.0
    return mean_down_s * availability / (1 - availability), mean_down_s


def by_name(profiles: Sequence[DeviceProfile]) -> dict[str, DeviceProfile]:
    """Profiles by name; raises InputError for two of one name."""
    found: dict[str, DeviceProfile] = {}
    for profile in profiles:
        if profile.name in found:
            raise InputError(f"--profiles: {profile.name!r} is given twice")
        found[profile.name] = profile
    return found
