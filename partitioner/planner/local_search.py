"""Local search for the placements with the highest expected accuracy. Pure and deterministic.

Expected accuracy is monotone and submodular in the members: parts add, and the root and the
exponential are concave. So a lazy greedy choice (Nemhauser, Wolsey and Fisher, 1978; Minoux, 1978)
starts, and exchanges of one and two devices follow until none helps.
"""

import heapq
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement

import numpy as np

from partitioner.estimates.accuracy import Predictor
from partitioner.estimates.accuracy_law import capability_of
from partitioner.planner.availability import Objective, PartSums, arrivals
from partitioner.planner.candidates import Candidate, DeviceCandidates
from partitioner.planner.limits import PlanLimits
from partitioner.planner.placement import (
    Placement,
    Placements,
    total_bytes,
    total_energy_j,
    without_device,
)

#: Candidates per view: the most capable that meet the target.
PER_VIEW = 3
#: Least expected accuracy, in fractions of pictures, that a device has to add; and that it has to
#: add as a member beyond what it adds as a replica, because a member has to be trained.
LEAST_GAIN, MEMBER_WORTH = 1e-4, 5e-4
#: Most devices for exchanges of pairs; in larger fleets single exchanges do as well.
PAIRS_UP_TO = 10
#: Unused devices that are tried in a member's place.
_SPARES = 12
_ROUNDS = 20
#: Totals of bytes tried for the client's port, and plans of theirs that exchanges start from.
TOTALS, STARTS = 12, 2
#: A fleet of at most so many devices gets more totals.
_FEW, FEW_TOTALS = 3, 48
#: Most devices, the most accurate ones, for which totals are compared.
MOST_ACCURATE = 128


def choose(
    devices: Sequence[DeviceCandidates],
    predictor: Predictor,
    limits: PlanLimits,
    start: Placements = (),
) -> tuple[Placements, float]:
    """Placements with the highest expected accuracy found, and that accuracy.

    The result is at least as good as `start`, placements that meet the limits.
    """
    if limits.client_bps < np.inf:
        return _with_port(devices, predictor, limits, start)
    search = _Search(devices, predictor, limits)
    return max((search.improve(p) for p in (*search.greedy_plans(), start)), key=lambda v: v[1])


#: Placements and their expected accuracy.
_Valued = tuple[Placements, float]


def _with_port(
    devices: Sequence[DeviceCandidates], predictor: Predictor, limits: PlanLimits, start: Placements
) -> _Valued:
    """`choose` where crops wait for each other at the client's port.

    A crop's wait depends on the bytes of all others, so several totals are tried: each gives every
    candidate's wait and limits the sum of bytes. Unused bytes of a total become computing time.
    """
    among = _most_accurate(devices, predictor, limits)

    def search(port_bytes: float) -> _Search:
        return _Search(devices, predictor, replace(limits, port_bytes=port_bytes), among)

    def refine(port_bytes: float, placements: Placements) -> _Valued:
        now = 0.0
        while True:
            before = now
            placements, now = search(port_bytes).improve(placements)
            sent = total_bytes(placements)
            if now <= before + LEAST_GAIN / 10 or sent >= port_bytes:
                return placements, now
            port_bytes = sent

    found = []
    for port_bytes in _totals(devices, limits):
        tried = search(port_bytes)
        found += [(tried.value(plan), port_bytes, plan) for plan in tried.greedy_plans()]
    found.sort(key=lambda one: -one[0])
    starts = [(port_bytes, plan) for _, port_bytes, plan in found[:STARTS]]
    if start:
        starts.append((total_bytes(start), start))
    improved = [refine(*one) for one in starts]
    # A single member does not wait, whatever the total.
    improved.append(_Search(devices, predictor, limits).best_alone())
    return max(improved, key=lambda one: one[1])


def _most_accurate(
    devices: Sequence[DeviceCandidates], predictor: Predictor, limits: PlanLimits
) -> set[int]:
    """The devices with the highest expected accuracy alone."""
    if len(devices) <= MOST_ACCURATE:
        return set(range(len(devices)))
    right = []
    for device in devices:
        capability = device.choices.capability[device.rows[device.places(limits)]].max(initial=0.0)
        right.append(device.profile.availability * predictor.accuracy(float(capability)))
    return set(np.argsort(-np.array(right), kind="stable")[:MOST_ACCURATE].tolist())


def _totals(devices: Sequence[DeviceCandidates], limits: PlanLimits) -> list[float]:
    """Totals of bytes to plan with, about evenly spread among the sums of crops."""
    # The target leaves no time to send more.
    longest = limits.target_ms * limits.client_bps / 8e3
    sizes = {
        float(size)
        for device in devices
        for size in np.unique(device.costs.request_bytes[device.places(limits)])
    }
    most = min(limits.max_members, len(devices))
    sums = {count * size for count in range(1, most + 1) for size in sizes}
    # Of few crops every sum counts: the next larger one may leave them no time.
    for count in range(2, min(most, _FEW) + 1):
        sums |= {sum(some) for some in combinations_with_replacement(sorted(sizes), count)}
    totals = sorted(total for total in sums if total <= longest + max(sizes, default=0))
    return evenly_spread(totals, TOTALS if len(devices) > _FEW else FEW_TOTALS)


def evenly_spread(values: Sequence[float], count: int) -> list[float]:
    """At most `count` of ascending positive values, about even in their logarithm.

    The first and the last are among them.
    """
    if len(values) <= count:
        return list(values)
    wanted = np.geomspace(max(values[0], 1e-3), values[-1], count)
    indices = np.searchsorted(np.array(values), wanted * (1 - 1e-9))
    return [values[i] for i in sorted(set(np.minimum(indices, len(values) - 1).tolist()))]


class _Search:
    """One search: candidates within the limits, and the objective; of devices `among` alone."""

    def __init__(
        self,
        devices: Sequence[DeviceCandidates],
        predictor: Predictor,
        limits: PlanLimits,
        among: Container[int] | None = None,
    ) -> None:
        self.devices, self.limits = devices, limits
        max_energy_j = limits.max_energy_j
        self._most_j = np.inf if max_energy_j is None else max_energy_j * (1 + 1e-12)
        self.options = [
            device.within(limits, per_view=PER_VIEW) if among is None or index in among else []
            for index, device in enumerate(devices)
        ]
        self.objective = Objective(
            predictor.law,
            capability_of(predictor.teacher_accuracy),
            arrivals([d.profile.availability for d in devices]),
        )
        self._summed: tuple[Placements, PartSums] | None = None
        self._running: dict[tuple[int, int], Candidate | None] = {}

    def value(self, placements: Placements) -> float:
        """Expected accuracy."""
        return self.objective.value(self._sums(placements))

    def greedy_plans(self) -> list[Placements]:
        """Greedy choices by gain, and under an energy limit by gain per joule."""
        found = [self._greedy(per_joule=False)]
        if self.limits.max_energy_j is not None:
            found.append(self._greedy(per_joule=True))
        return found

    def _greedy(self, *, per_joule: bool) -> Placements:
        """Add one device after another, the one with the largest gain first."""
        placements: Placements = ()
        now = 0.0
        queue = [(-np.inf, index) for index, options in enumerate(self.options) if options]
        heapq.heapify(queue)
        while queue:
            _, index = heapq.heappop(queue)
            placed = self._add_device(placements, index)
            if placed is None or placed[1] - now < LEAST_GAIN:
                continue
            worth = placed[1] - now
            if per_joule:
                worth /= max(total_energy_j(placed[0]) - total_energy_j(placements), 1e-9)
            # Gains in the queue are of fewer placements, and only fall.
            if queue and -worth > queue[0][0]:
                heapq.heappush(queue, (-worth, index))
                continue
            placements, now = placed
        return placements

    def best_alone(self) -> _Valued:
        """The best plan of one member; no placements where no device has a candidate."""
        found = [self._add_member((), self._sums(()), index) for index in range(len(self.devices))]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=((), 0.0))

    def improve(self, placements: Placements) -> _Valued:
        """Exchange until no exchange helps."""
        now = self.value(placements)
        moves: list[tuple[Callable[..., _Valued | None], list[tuple[int, ...]]]] = [
            (self._reassign, self._in_use(placements)),
            (self._swap_in, self._spares(placements)),
            (self._reassign_pair, self._pairs()),
        ]
        for _ in range(_ROUNDS):
            before = now
            for move, where in moves:
                for indices in where:
                    moved = move(placements, *indices)
                    if moved is not None and moved[1] > now + LEAST_GAIN / 10:
                        placements, now = moved
                if now > before:
                    break
            if now <= before:
                break
        return placements, self.value(placements)

    def _usable(self) -> list[tuple[int, ...]]:
        return [(index,) for index, options in enumerate(self.options) if options]

    def _in_use(self, placements: Placements) -> list[tuple[int, ...]]:
        """The devices of the placements; in small fleets every usable device."""
        few, used = len(self.devices) <= PAIRS_UP_TO, _devices_of(placements)
        return [usable for usable in self._usable() if few or usable[0] in used]

    def _spares(self, placements: Placements) -> list[tuple[int, ...]]:
        """The most capable of the unused devices."""
        used = _devices_of(placements)
        spares = [usable for usable in self._usable() if usable[0] not in used]
        spares.sort(key=lambda spare: -max(c.capability for c in self.options[spare[0]]))
        return spares[:_SPARES]

    def _pairs(self) -> list[tuple[int, ...]]:
        if len(self.devices) > PAIRS_UP_TO:
            return []
        return [(*a, *b) for a, b in combinations(self._usable(), 2)]

    def _add_device(self, placements: Placements, index: int) -> _Valued | None:
        """Placements with a device as a further member or replica, whichever is better."""
        member = self._add_member(placements, self._sums(placements), index)
        replica = self._add_replica(placements, index)
        if member is None or replica is None:
            return member or replica
        return member if member[1] - replica[1] >= MEMBER_WORTH else replica

    def _add_member(self, placements: Placements, sums: PartSums, index: int) -> _Valued | None:
        """Placements with the device's best candidate as a further member; None without one."""
        if len(placements) >= self.limits.max_members:
            return None
        free = self._available(placements, index)
        if not free:
            return None
        values = self.objective.values_with(sums, free, [index])
        best = int(np.argmax(values))
        return (*placements, Placement(device=index, candidate=free[best])), float(values[best])

    def _available(self, placements: Placements, index: int) -> list[Candidate]:
        """Candidates of a device beside these members."""
        taken = {placement.candidate.identity for placement in placements}
        spent_j, sent = total_energy_j(placements), total_bytes(placements)
        most_bytes, most_j = self.limits.port_bytes, self._most_j
        # Inlined `_affordable`: half a million calls in a plan for eight devices.
        return [
            c
            for c in self.options[index]
            if c.identity not in taken
            and sent + c.request_bytes <= most_bytes
            and spent_j + (c.energy_j or 0.0) <= most_j
        ]

    def _add_replica(self, placements: Placements, index: int) -> _Valued | None:
        """Placements with the device as a replica of the member that gains most, or None."""
        best: _Valued | None = None
        if self.devices[index].sight is not None:
            # It does not see what another one does.
            return None
        for k, placement in enumerate(placements):
            if self.devices[placement.device].profile.availability >= 1:
                continue
            run = self._run(index, placement.candidate.choice)
            if run is None:
                continue
            served = replace(placement, replicas=(*placement.replicas, (index, run)))
            grown = (*placements[:k], served, *placements[k + 1 :])
            if not self._affordable(total_energy_j(grown), total_bytes(grown)):
                continue
            value = self.objective.value(self._sum_up(grown))
            if best is None or value > best[1]:
                best = (grown, value)
        return best

    def _run(self, index: int, choice: int) -> Candidate | None:
        """A choice as a device runs it within the limits, or None."""
        if (index, choice) not in self._running:
            self._running[index, choice] = self.devices[index].running(choice)
        run, limits = self._running[index, choice], self.limits
        if run is None or (limits.max_energy_j is not None and run.energy_j is None):
            return None
        wait_ms = float(limits.port_wait_ms(np.array([run.request_bytes]))[0])
        late = run.with_wait(wait_ms).latency_ms(limits.quantile) > limits.target_ms
        return None if late else run

    def _sums(self, placements: Placements) -> PartSums:
        """The sums of the placements; those of the last call are kept."""
        if self._summed is None or self._summed[0] is not placements:
            self._summed = (placements, self._sum_up(placements))
        return self._summed[1]

    def _sum_up(self, placements: Placements) -> PartSums:
        return self.objective.sums([(s.candidate, s.devices) for s in placements])

    def _affordable(self, energy_j: float, sent_bytes: float) -> bool:
        return sent_bytes <= self.limits.port_bytes and energy_j <= self._most_j

    def _reassign(self, placements: Placements, index: int) -> _Valued | None:
        """Choose one device's part again."""
        return self._add_device(without_device(placements, index), index)

    def _swap_in(self, placements: Placements, index: int) -> _Valued | None:
        """An unused device in the place of a member's, or beside all, whichever is best."""
        if index in _devices_of(placements):
            return None
        found = [self._add_device(without_device(placements, p.device), index) for p in placements]
        found.append(self._add_device(placements, index))
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def _reassign_pair(self, placements: Placements, first: int, second: int) -> _Valued | None:
        """Choose the sub-models of two devices, as members, again together."""
        rest = without_device(without_device(placements, first), second)
        if len(rest) + 2 > self.limits.max_members:
            return None
        sums = self._sum_up(rest)
        best: _Valued | None = None
        for option in self._available(rest, first):
            one = (*rest, Placement(device=first, candidate=option))
            both = self._add_member(one, self.objective.with_member(sums, option, [first]), second)
            if both is not None and (best is None or both[1] > best[1]):
                best = both
        return best


def _devices_of(placements: Placements) -> set[int]:
    return {device for placement in placements for device in placement.devices}
