"""Batch sizes of a plan's devices, from their profiles."""

from collections.abc import Iterable
from statistics import median
from typing import TypeVar

from msgspec.structs import replace

from mdp.formats.plan import Assignment, Plan, Replica
from mdp.formats.profile import DeviceProfile
from mdp.queueing.compute_times import PAYS
from partitioner.estimates.latency import spec_of

Part = TypeVar("Part", Assignment, Replica)


def with_batches(plan: Plan, profiles: Iterable[DeviceProfile]) -> Plan:
    """`plan` with the best batch size of each device."""
    known = {profile.name: profile for profile in profiles}

    def add_batch(part: Part, precision: str) -> Part:
        return replace(part, batch=_batch(part, precision, known[part.device], plan.target_ms))

    precisions = [assignment.spec.precision for assignment in plan.assignments]
    return replace(
        plan,
        assignments=[add_batch(a, a.spec.precision) for a in plan.assignments],
        replicas=[add_batch(r, precisions[r.k]) for r in plan.replicas],
    )


def _batch(
    part: Assignment | Replica, precision: str, profile: DeviceProfile, target_ms: float
) -> int:
    """The measured batch with the least time per picture within the target, else 1."""
    best, least = 1, PAYS
    for pictures, share in sorted(batch_shares(part, precision, profile).items()):
        took_ms = part.predicted_ms.compute * pictures * share + part.predicted_ms.network
        if share <= least and took_ms <= target_ms:
            best, least = pictures, share
    return best


def batch_shares(
    part: Assignment | Replica, precision: str, profile: DeviceProfile
) -> dict[int, float]:
    """Batch size -> time per picture relative to batch 1, for the way this part is run.

    The median over the encoders measured with both.
    """
    mine = [
        point
        for point in profile.latency
        if (point.precision, point.runtime) == (precision, part.runtime)
        and (point.provider or profile.provider, point.threads) == (part.provider, part.threads)
    ]
    alone = {spec_of(point): point.latency_ms for point in mine if point.batch == 1}
    shares: dict[int, list[float]] = {}
    for point in mine:
        if point.batch > 1 and spec_of(point) in alone:
            share = point.latency_ms / point.batch / alone[spec_of(point)]
            shares.setdefault(point.batch, []).append(share)
    return {pictures: median(measured) for pictures, measured in shares.items()}
