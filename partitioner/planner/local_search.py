"""Which device runs which candidate: the search itself. Pure and without chance.

Expected accuracy is monotone and submodular in the members, for parts only ever add and every
further step (a root, an exponential) is concave. So the greedy choice is a good one to start from
(Nemhauser, Wolsey and Fisher, 1978), gains may be looked up lazily (Minoux, 1978), and what greed
got wrong between two or three devices is put right by exchanging until nothing helps.
"""

import heapq
from collections.abc import Callable, Container, Sequence
from itertools import combinations, combinations_with_replacement

import numpy as np

from partitioner.estimates.accuracy import Predictor
from partitioner.estimates.accuracy_law import capability_of
from partitioner.estimates.network import UNSHARED, Port
from partitioner.planner.availability import Objective, Sums, arrivals
from partitioner.planner.candidates import Candidate, Device
from partitioner.planner.placement import Limits, Seat, Seats, bytes_of, energy_of, without

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
#: How many totals of bytes are tried where crops share the client's port, and from how many of the
#: plans found so the exchanges start.
TOTALS, STARTS = 12, 2
#: Up to so many devices are few, and more totals are tried for them.
_FEW, FEW_TOTALS = 3, 48
#: Among so many devices, of more than these the ablest, totals are compared.
ABLEST = 128


def choose(
    devices: Sequence[Device],
    predictor: Predictor,
    limits: Limits,
    start: Seats = (),
) -> tuple[Seats, float]:
    """Seats with the highest expected accuracy found, and that accuracy.

    `start` is a plan of stricter limits; what is found is at least as good.
    """
    if limits.client_bps < np.inf:
        return _through_port(devices, predictor, limits, start)
    search = _Search(devices, predictor, limits)
    best = max(
        (search.improve(seats) for seats in (*search.greedy_choices(), start)), key=search.value
    )
    return best, search.value(best)


#: Seats and their expected accuracy.
_Valued = tuple[Seats, float]


def _through_port(
    devices: Sequence[Device], predictor: Predictor, limits: Limits, start: Seats
) -> _Valued:
    """The same where crops wait for each other at the client's port.

    How long each may compute depends on how many bytes all others have. So several totals are
    tried: with one given, every candidate's wait is known, and what is left is a limit on the sum
    of bytes as on the sum of joules. What a plan leaves of its total is given back to it as time.
    """
    able = _ablest(devices, predictor, limits)
    found: list[tuple[float, float, Seats]] = []
    for most_bytes in _totals(devices, limits):
        search = _Search(devices, predictor, limits, _port(limits, most_bytes), able)
        found += [(search.value(seats), most_bytes, seats) for seats in search.greedy_choices()]
    found.sort(key=lambda one: -one[0])
    begin = [(most_bytes, seats) for _, most_bytes, seats in found[:STARTS]]
    if start:
        begin.append((bytes_of(start), start))
    improved = [
        _tightened(devices, predictor, limits, most_bytes, seats, able)
        for most_bytes, seats in begin
    ]
    # One member waits for no other crop, whatever total was tried.
    improved.append(_Search(devices, predictor, limits).best_alone())
    return max(improved, key=lambda one: one[1])


def _tightened(
    devices: Sequence[Device],
    predictor: Predictor,
    limits: Limits,
    most_bytes: float,
    seats: Seats,
    able: Container[int],
) -> _Valued:
    """Seats after exchanges, and after more with what they left of the total as time."""
    now = 0.0
    while True:
        search = _Search(devices, predictor, limits, _port(limits, most_bytes), able)
        seats = search.improve(seats)
        before, now = now, search.value(seats)
        sent = bytes_of(seats)
        if now <= before + LEAST_GAIN / 10 or sent >= most_bytes:
            return seats, now
        most_bytes = sent


def _ablest(devices: Sequence[Device], predictor: Predictor, limits: Limits) -> set[int]:
    """The devices that alone would be right most often: enough to tell totals from each other."""
    if len(devices) <= ABLEST:
        return set(range(len(devices)))
    right = []
    for device in devices:
        places = device.places(limits.target_ms, limits.max_energy_j, limits.pace)
        capability = device.choices.capability[device.rows[places]].max(initial=0.0)
        right.append(device.profile.availability * predictor.accuracy(float(capability)))
    return set(np.argsort(-np.array(right), kind="stable")[:ABLEST].tolist())


def _port(limits: Limits, most_bytes: float) -> Port:
    return Port(bandwidth_bps=limits.client_bps, most_bytes=most_bytes)


def _totals(devices: Sequence[Device], limits: Limits) -> list[float]:
    """Totals of bytes to plan with, of those that crops add up to; about evenly spread."""
    # A crop that the target leaves no time to send is of no use.
    longest = limits.target_ms * limits.client_bps / 8e3
    sizes = {
        float(size)
        for device in devices
        for size in np.unique(
            device.times.request_bytes[
                device.places(limits.target_ms, limits.max_energy_j, limits.pace)
            ]
        )
    }
    most = min(limits.most_members, len(devices))
    sums = {count * size for count in range(1, most + 1) for size in sizes}
    # Of few crops every sum counts: the next bigger one may leave them no time.
    for count in range(2, min(most, _FEW) + 1):
        sums |= {sum(some) for some in combinations_with_replacement(sorted(sizes), count)}
    totals = sorted(total for total in sums if total <= longest + max(sizes, default=0))
    tried = TOTALS if len(devices) > _FEW else FEW_TOTALS
    if len(totals) <= tried:
        return totals
    wanted = np.geomspace(totals[0], totals[-1], tried)
    places = np.searchsorted(totals, wanted * (1 - 1e-9))
    return [totals[i] for i in sorted(set(places.tolist()))]


class _Search:
    """One search: the candidates within the limits, and the objective over their devices."""

    def __init__(
        self,
        devices: Sequence[Device],
        predictor: Predictor,
        limits: Limits,
        port: Port = UNSHARED,
        among: Container[int] | None = None,
    ) -> None:
        self.devices, self.limits, self.port = devices, limits, port
        max_energy_j = limits.max_energy_j
        self._most_j = np.inf if max_energy_j is None else max_energy_j * (1 + 1e-12)
        self.options = [
            device.within(
                limits.target_ms, max_energy_j, pace=limits.pace, port=port, per_view=PER_VIEW
            )
            if among is None or index in among
            else []
            for index, device in enumerate(devices)
        ]
        self.objective = Objective(
            predictor.law,
            capability_of(predictor.teacher_accuracy),
            arrivals([d.profile.availability for d in devices]),
        )
        self._summed: tuple[Seats, Sums] | None = None
        self._runs: dict[tuple[int, int], Candidate | None] = {}

    def value(self, seats: Seats) -> float:
        """Expected accuracy."""
        return self.objective.value(self._sums(seats))

    def greedy_choices(self) -> list[Seats]:
        """What greed finds: by what a device adds, and where joules are short by that per joule."""
        found = [self._greedy(per_joule=False)]
        if self.limits.max_energy_j is not None:
            found.append(self._greedy(per_joule=True))
        return found

    def _greedy(self, *, per_joule: bool) -> Seats:
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

    def best_alone(self) -> _Valued:
        """The best plan of one member; no seats if no device has an option."""
        found = [self._as_member((), self._sums(()), index) for index in range(len(self.devices))]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=((), 0.0))

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
        """What a device may run beside these members."""
        taken = {seat.candidate.identity for seat in seats}
        spent_j, sent = energy_of(seats), bytes_of(seats)
        most_bytes, most_j = self.port.most_bytes, self._most_j
        # Half a million times in a plan for eight devices, so not by `_affordable`.
        return [
            c
            for c in self.options[index]
            if c.identity not in taken
            and sent + c.request_bytes <= most_bytes
            and spent_j + (c.energy_j or 0.0) <= most_j
        ]

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
            if not self._affordable(energy_of(grown), bytes_of(grown)):
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
        if run is None:
            return None
        waited_ms = float(self.port.wait_ms(np.array([run.request_bytes]))[0])
        if run.waiting(waited_ms).by_ms(self.limits.pace) > self.limits.target_ms:
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

    def _affordable(self, energy_j: float, sent_bytes: float) -> bool:
        return sent_bytes <= self.port.most_bytes and energy_j <= self._most_j

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
