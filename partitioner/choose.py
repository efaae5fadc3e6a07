"""Which device runs which candidate: the search itself. Pure and without chance.

Expected accuracy is monotone and submodular in the members, for parts only ever add and every
further step (a root, an exponential) is concave. So the greedy choice is a good one to start from
(Nemhauser, Wolsey and Fisher, 1978), gains may be looked up lazily (Minoux, 1978), and what greed
got wrong between two or three devices is put right by exchanging until nothing helps.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mdp.plan import PLANNED_MEMBERS
from partitioner.accuracy_law import capability_of
from partitioner.candidates import Candidate, Device
from partitioner.expectation import Objective, Sums, arrivals
from partitioner.predictor import Predictor
from partitioner.spread import TYPICAL, Pace

#: Of each view so many candidates are tried, the most capable that meet the target.
PER_VIEW = 3
#: A device has to add this much expected accuracy, else it is left out; and as a member this much
#: more than as a replica, for a member has to be trained. In fractions of pictures.
LEAST_GAIN, MEMBER_WORTH = 1e-4, 5e-4
#: Pairs are exchanged among so few devices; in larger fleets single exchanges do as well.
PAIRS_UP_TO = 10
#: How many devices that have no part are tried in a member's place.
_BENCH = 12
_ROUNDS = 20


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
        return max(c.energy_j or 0.0 for c in (self.candidate, *(c for _, c in self.replicas)))


Seats = tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every plan of one search has to keep."""

    target_ms: float
    max_energy_j: float | None = None
    #: By when each member has to have answered, where there are no more than so many members.
    pace: Pace = TYPICAL
    most_members: int = PLANNED_MEMBERS


def choose(
    devices: Sequence[Device],
    predictor: Predictor,
    limits: Limits,
    start: Seats = (),
) -> tuple[Seats, float]:
    """Seats with the highest expected accuracy found, and that accuracy.

    `start` is a plan of stricter limits; what is found is at least as good.
    """
    search = _Search(devices, predictor, limits)
    found = [search.improve(search.greedy(per_joule=False))]
    if limits.max_energy_j is not None:
        found.append(search.improve(search.greedy(per_joule=True)))
    if start:
        found.append(search.improve(start))
    best = max(found, key=search.value)
    return best, search.value(best)


#: Seats and their expected accuracy.
_Valued = tuple[Seats, float]


class _Search:
    """One search: the candidates within the limits, and the objective over their devices."""

    def __init__(self, devices: Sequence[Device], predictor: Predictor, limits: Limits) -> None:
        self.devices, self.limits = devices, limits
        self.options = [
            device.within(
                limits.target_ms, limits.max_energy_j, pace=limits.pace, per_view=PER_VIEW
            )
            for device in devices
        ]
        self.objective = Objective(
            predictor.law,
            capability_of(predictor.teacher_accuracy),
            arrivals([d.profile.availability for d in devices]),
        )
        self._summed: tuple[Seats, Sums] | None = None
        self._runs: dict[tuple[int, int], Candidate | None] = {}
        self._parts: dict[tuple[int, int], list[Candidate]] = {}

    def value(self, seats: Seats) -> float:
        """Expected accuracy."""
        return self.objective.value(self._sums(seats))

    def greedy(self, *, per_joule: bool) -> Seats:
        """One device after another, the one that adds most first."""
        seats: Seats = ()
        now = 0.0
        queue = [(-np.inf, index) for index, options in enumerate(self.options) if options]
        heapq.heapify(queue)
        while queue:
            _, index = heapq.heappop(queue)
            placed = self._placed(seats, index)
            if placed is None or placed[1] - now < LEAST_GAIN:
                continue
            worth = placed[1] - now
            if per_joule:
                worth /= max(energy_of(placed[0]) - energy_of(seats), 1e-9)
            # Others' gains are those with fewer seats, and can only have fallen since.
            if queue and -worth > queue[0][0]:
                heapq.heappush(queue, (-worth, index))
                continue
            seats, now = placed
        return seats

    def improve(self, seats: Seats) -> Seats:
        """Exchange until no exchange helps."""
        now = self.value(seats)
        moves: list[tuple[Callable[..., _Valued | None], list[tuple[int, ...]]]] = [
            (self._again, self._busy(seats)),
            (self._instead, self._bench(seats)),
            (self._two_again, self._pairs()),
        ]
        for _ in range(_ROUNDS):
            before = now
            for move, where in moves:
                for place in where:
                    moved = move(seats, *place)
                    if moved is not None and moved[1] > now + LEAST_GAIN / 10:
                        seats, now = moved
                if now > before:
                    break
            if now <= before:
                return seats
        return seats

    def _able(self) -> list[tuple[int, ...]]:
        return [(index,) for index, options in enumerate(self.options) if options]

    def _busy(self, seats: Seats) -> list[tuple[int, ...]]:
        """The devices with a part, and in small fleets all that could have one."""
        busy = {device for seat in seats for device in seat.devices}
        few = len(self.devices) <= PAIRS_UP_TO
        return [place for place in self._able() if few or place[0] in busy]

    def _bench(self, seats: Seats) -> list[tuple[int, ...]]:
        """The most capable of the devices without a part."""
        busy = {device for seat in seats for device in seat.devices}
        bench = [place for place in self._able() if place[0] not in busy]
        bench.sort(key=lambda place: -max(c.capability for c in self.options[place[0]]))
        return bench[:_BENCH]

    def _pairs(self) -> list[tuple[int, ...]]:
        if len(self.devices) > PAIRS_UP_TO:
            return []
        return [(*a, *b) for a, b in combinations(self._able(), 2)]

    def _placed(self, seats: Seats, index: int) -> _Valued | None:
        """These seats with a device as the better of one more member and one more replica."""
        member = self._as_member(seats, self._sums(seats), index)
        replica = self._as_replica(seats, index)
        if member is None or replica is None:
            return member or replica
        return member if member[1] - replica[1] >= MEMBER_WORTH else replica

    def _as_member(self, seats: Seats, sums: Sums, index: int) -> _Valued | None:
        """With a device's best candidate as one more member; None without any that may be."""
        if len(seats) >= self.limits.most_members:
            return None
        free = self._free(seats, index)
        if not free:
            return None
        values = self.objective.with_one_more(sums, free, [index])
        best = int(np.argmax(values))
        return (*seats, Seat(device=index, candidate=free[best])), float(values[best])

    def _free(self, seats: Seats, index: int) -> list[Candidate]:
        """What a device may run beside these members, each as whole and in parts of the square.

        All parts are worth the same alone. One that nobody sees shares nothing with anybody, so it
        stands for all others while there is one.
        """
        taken = {seat.candidate.identity for seat in seats}
        seen = {seat.candidate.part for seat in seats}
        parts = range(1, len(self.devices[index].choices.tried))
        unseen = next((part for part in parts if part not in seen), None)
        offered = [0, *parts] if unseen is None else [0, unseen]
        spent_j = energy_of(seats)
        return [
            c
            for part in offered
            for c in self._seeing(index, part)
            if c.identity not in taken and self._affordable(spent_j + (c.energy_j or 0.0))
        ]

    def _seeing(self, index: int, part: int) -> list[Candidate]:
        """The options of a device where they see one of the regions tried."""
        if part == 0:
            return self.options[index]
        if (index, part) not in self._parts:
            device = self.devices[index]
            self._parts[index, part] = [device.seeing(c, part) for c in self.options[index]]
        return self._parts[index, part]

    def _as_replica(self, seats: Seats, index: int) -> _Valued | None:
        """With a device as one more replica of the member that gains most; None if of no one."""
        best: _Valued | None = None
        for k, seat in enumerate(seats):
            if self.devices[seat.device].profile.availability >= 1:
                continue
            run = self._running(index, seat.candidate.choice)
            if run is None:
                continue
            served = Seat(
                device=seat.device,
                candidate=seat.candidate,
                replicas=(*seat.replicas, (index, run)),
            )
            grown = (*seats[:k], served, *seats[k + 1 :])
            if not self._affordable(energy_of(grown)):
                continue
            value = self.objective.value(self._summed_up(grown))
            if best is None or value > best[1]:
                best = (grown, value)
        return best

    def _running(self, index: int, choice: int) -> Candidate | None:
        """How a device would run a choice within the limits, or None."""
        if (index, choice) not in self._runs:
            self._runs[index, choice] = self.devices[index].running(choice)
        run = self._runs[index, choice]
        if run is None or run.by_ms(self.limits.pace) > self.limits.target_ms:
            return None
        if self.limits.max_energy_j is not None and run.energy_j is None:
            return None
        return run

    def _sums(self, seats: Seats) -> Sums:
        """What the seats add up to; asked for again and again with the same ones."""
        if self._summed is None or self._summed[0] is not seats:
            self._summed = (seats, self._summed_up(seats))
        return self._summed[1]

    def _summed_up(self, seats: Seats) -> Sums:
        return self.objective.sums([(s.candidate, s.devices) for s in seats])

    def _affordable(self, energy_j: float) -> bool:
        limit = self.limits.max_energy_j
        return limit is None or energy_j <= limit * (1 + 1e-12)

    def _again(self, seats: Seats, index: int) -> _Valued | None:
        """A device's own part chosen again, in the light of all others'."""
        rest = without(seats, index)
        return self._placed(rest, index)

    def _instead(self, seats: Seats, index: int) -> _Valued | None:
        """A device without a part in the place of whichever member is best replaced, or beside."""
        if index in {device for seat in seats for device in seat.devices}:
            return None
        found = [self._placed(without(seats, seat.device), index) for seat in seats]
        found.append(self._placed(seats, index))
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def _two_again(self, seats: Seats, first: int, second: int) -> _Valued | None:
        """Two devices' parts as members chosen again together."""
        rest = without(without(seats, first), second)
        if len(rest) + 2 > self.limits.most_members:
            return None
        sums = self._summed_up(rest)
        best: _Valued | None = None
        for option in self._free(rest, first):
            one = (*rest, Seat(device=first, candidate=option))
            both = self._as_member(one, self.objective.added(sums, option, [first]), second)
            if both is not None and (best is None or both[1] > best[1]):
                best = both
        return best


def energy_of(seats: Seats) -> float:
    """Joules of one answer by all members; 0 where unknown."""
    return sum(seat.energy_j for seat in seats)


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
