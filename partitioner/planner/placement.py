"""Placements: which devices run a member's sub-model, and how. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partitioner.estimates.network import waits_ms
from partitioner.planner.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One member: its candidate on its own device, and its replicas."""

    device: int
    candidate: Candidate
    #: (device, the same sub-model as that device runs it).
    replicas: tuple[tuple[int, Candidate], ...] = ()

    @property
    def devices(self) -> list[int]:
        """Indices of all devices that serve this member."""
        return [self.device, *(device for device, _ in self.replicas)]

    @property
    def candidates(self) -> list[Candidate]:
        """The sub-model on each of `devices`."""
        return [self.candidate, *(candidate for _, candidate in self.replicas)]

    @property
    def energy_j(self) -> float:
        """Most joules of one answer on any of the devices; 0 where unknown."""
        return max(c.energy_j or 0.0 for c in self.candidates)

    @property
    def request_bytes(self) -> float:
        """Most bytes of the crop on any of the devices."""
        return max(c.request_bytes for c in self.candidates)

    def with_wait(self, wait_ms: float) -> "Placement":
        """A copy whose crop waits so long at the client's port for those of other members."""
        return replace(
            self,
            candidate=self.candidate.with_wait(wait_ms),
            replicas=tuple((device, c.with_wait(wait_ms)) for device, c in self.replicas),
        )


Placements = tuple[Placement, ...]


def total_energy_j(placements: Placements) -> float:
    """Joules of one answer by all members; 0 where unknown."""
    return sum(placement.energy_j for placement in placements)


def total_bytes(placements: Sequence[Placement]) -> float:
    """Bytes of the crops that the client sends for one picture, one to each member."""
    return sum(placement.request_bytes for placement in placements)


def with_waits(placements: Sequence[Placement], client_bps: float) -> Placements:
    """The placements with the time that each crop waits at the client's port for all others."""
    waits = waits_ms([placement.request_bytes for placement in placements], client_bps)
    return tuple(p.with_wait(wait) for p, wait in zip(placements, waits, strict=True))


def without_device(placements: Placements, index: int) -> Placements:
    """The placements without a device; a member's first replica takes its place."""
    kept = []
    for placement in placements:
        runs = zip(placement.devices, placement.candidates, strict=True)
        left = [(device, c) for device, c in runs if device != index]
        if left:
            (device, c), *others = left
            kept.append(Placement(device=device, candidate=c, replicas=tuple(others)))
    return tuple(kept)
