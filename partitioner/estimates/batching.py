"""Where a device's profile says that computing several pictures at once pays. Pure."""

from collections.abc import Iterable
from statistics import median
from typing import TypeVar

from msgspec.structs import replace

from mdp.formats.plan import Assignment, Plan, Replica
from mdp.formats.profile import DeviceProfile, LatencyPoint
from mdp.queueing.compute_times import PAYS

Seat = TypeVar("Seat", Assignment, Replica)


def with_batches(plan: Plan, profiles: Iterable[DeviceProfile]) -> Plan:
    """`plan` with the number of pictures that each of its devices had best compute at once."""
    known = {profile.name: profile for profile in profiles}

    def seated(seat: Seat, precision: str) -> Seat:
        return replace(seat, batch=_batch(seat, precision, known[seat.device], plan.target_ms))

    precisions = [assignment.spec.precision for assignment in plan.assignments]
    return replace(
        plan,
        assignments=[seated(a, a.spec.precision) for a in plan.assignments],
        replicas=[seated(r, precisions[r.k]) for r in plan.replicas],
    )


def _batch(
    seat: Assignment | Replica, precision: str, profile: DeviceProfile, target_ms: float
) -> int:
    """The measured batch that takes least time a picture within the target, else 1."""
    best, least = 1, PAYS
    for pictures, share in sorted(batch_shares(seat, precision, profile).items()):
        took_ms = seat.predicted_ms.compute * pictures * share + seat.predicted_ms.network
        if share <= least and took_ms <= target_ms:
            best, least = pictures, share
    return best


def batch_shares(
    seat: Assignment | Replica, precision: str, profile: DeviceProfile
) -> dict[int, float]:
    """Pictures at once -> what share of the time one by one they took, as this seat is run.

    The median over the encoders that were measured both ways.
    """
    mine = [
        point
        for point in profile.latency
        if (point.precision, point.runtime) == (precision, seat.runtime)
        and (point.provider or profile.provider, point.threads) == (seat.provider, seat.threads)
    ]
    alone = {_shape(point): point.latency_ms for point in mine if point.batch == 1}
    shares: dict[int, list[float]] = {}
    for point in mine:
        if point.batch > 1 and _shape(point) in alone:
            share = point.latency_ms / point.batch / alone[_shape(point)]
            shares.setdefault(point.batch, []).append(share)
    return {pictures: median(measured) for pictures, measured in shares.items()}


def _shape(point: LatencyPoint) -> tuple[float, ...]:
    return (
        point.image_size,
        point.patch_size,
        point.embed_dim,
        point.depth,
        point.num_heads,
        point.mlp_ratio,
    )
