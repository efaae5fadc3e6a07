"""Who is to run what: the members of a plan in the making, and what it has to keep. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdp.formats.plan import PLANNED_MEMBERS
from partitioner.estimates.latency_quantiles import TYPICAL, Pace
from partitioner.estimates.network import waits_ms
from partitioner.planner.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One member: its candidate on its own device, and the devices that serve it too."""

    device: int
    candidate: Candidate
    #: (device, how that one runs the same sub-model).
    replicas: tuple[tuple[int, Candidate], ...] = ()

    @property
    def devices(self) -> list[int]:
        """Everyone who serves this member."""
        return [self.device, *(device for device, _ in self.replicas)]

    @property
    def energy_j(self) -> float:
        """Joules of one answer, by whoever needs most; 0 where unknown."""
        return max(c.energy_j or 0.0 for c in self.runs)

    @property
    def request_bytes(self) -> float:
        """Bytes of its crop, to whoever gets the largest."""
        return max(c.request_bytes for c in self.runs)

    @property
    def runs(self) -> list[Candidate]:
        """How everyone who serves this member runs it."""
        return [self.candidate, *(run for _, run in self.replicas)]

    def waiting(self, wait_ms: float) -> "Seat":
        """The same, its crop being so long at the client's port behind those of other members."""
        return replace(
            self,
            candidate=self.candidate.waiting(wait_ms),
            replicas=tuple((device, run.waiting(wait_ms)) for device, run in self.replicas),
        )


Seats = tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every plan of one search has to keep."""

    target_ms: float
    max_energy_j: float | None = None
    #: By when each member has to have answered, where there are no more than so many members.
    pace: Pace = TYPICAL
    most_members: int = PLANNED_MEMBERS
    #: What the client's port carries, in bits per second.
    client_bps: float = np.inf


def energy_of(seats: Seats) -> float:
    """Joules of one answer by all members; 0 where unknown."""
    return sum(seat.energy_j for seat in seats)


def bytes_of(seats: Seats) -> float:
    """Bytes of the crops that the client sends for one picture, one to each member."""
    return sum(seat.request_bytes for seat in seats)


def settled(seats: Sequence[Seat], client_bps: float) -> Seats:
    """The seats with what each crop waits at the client's port for all others."""
    waits = waits_ms([seat.request_bytes for seat in seats], client_bps)
    return tuple(seat.waiting(wait) for seat, wait in zip(seats, waits, strict=True))


def without(seats: Seats, index: int) -> Seats:
    """Without a device: a member's first replica takes its place."""
    kept = []
    for seat in seats:
        if seat.device == index:
            if seat.replicas:
                (device, run), *others = seat.replicas
                kept.append(Seat(device=device, candidate=run, replicas=tuple(others)))
        else:
            others = [pair for pair in seat.replicas if pair[0] != index]
            kept.append(
                seat
                if len(others) == len(seat.replicas)
                else Seat(device=seat.device, candidate=seat.candidate, replicas=tuple(others))
            )
    return tuple(kept)
