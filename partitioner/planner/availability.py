"""Expected accuracy of members whose devices are not always available. Pure.

Availabilities are independent, and an unanswered request counts as wrong. With few devices every
pattern of available devices counts with its probability; with many, patterns are drawn once from a
fixed seed, the same for all plans compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.estimates.accuracy_law import AccuracyLaw, Array
from partitioner.planner.candidates import Candidate

#: Most devices whose every pattern is counted.
MAX_EXACT = 10
#: Patterns drawn for more devices.
PATTERNS = 1024
_SEED = 0
_ALL = slice(None)

#: Indices of patterns.
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Patterns of available devices `there[n, devices]`, each with a probability `[n]`."""

    there: NDArray[np.bool_]
    weights: Array


def arrivals(availability: Sequence[float], *, seed: int = _SEED) -> Arrivals:
    """Every pattern of up to `MAX_EXACT` devices, else `PATTERNS` drawn ones."""
    chances = np.array(availability, dtype=np.float64)
    if len(chances) <= MAX_EXACT:
        return exact_arrivals(availability)
    draws = np.random.default_rng(seed).random((PATTERNS, len(chances)))
    return Arrivals(there=draws < chances, weights=np.full(PATTERNS, 1 / PATTERNS))


def exact_arrivals(availability: Sequence[float]) -> Arrivals:
    """Every possible pattern; the planner has at most 2^16."""
    chances = np.array(availability, dtype=np.float64)
    bits = np.arange(2 ** len(chances))[:, None] >> np.arange(len(chances)) & 1
    there = bits.astype(bool)
    weights: Array = np.where(there, chances, 1 - chances).prod(axis=1)
    possible = weights > 0
    return Arrivals(there=there[possible], weights=weights[possible])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartSums:
    """Sums `[n]` of members' parts by pattern, and the largest parts that members share."""

    total: Array
    #: By view and by architecture, in the order of the law's shares in `Objective`.
    most: tuple[dict[int, Array], dict[int, Array]]


class Objective:
    """Expected accuracy of members, by an accuracy law."""

    def __init__(self, law: AccuracyLaw, top: float, arrived: Arrivals) -> None:
        """Parts are relative to the capability `top`, the teacher's."""
        self.law, self.top, self.arrived = law, top, arrived
        self._shares = (law.same_view, law.same_model)

    def part(self, capability: float) -> float:
        """A member's part of the sum."""
        return float((capability / self.top) ** self.law.sharpness)

    def present(self, devices: Sequence[int]) -> NDArray[np.bool_]:
        """In which patterns `[n]` any of these devices is available."""
        there: NDArray[np.bool_] = np.any(self.arrived.there[:, list(devices)], axis=1)
        return there

    def sums(self, members: Sequence[tuple[Candidate, Sequence[int]]]) -> PartSums:
        """The sums of members, each with the devices that serve it."""
        sums = PartSums(total=np.zeros(len(self.arrived.weights)), most=({}, {}))
        for member, devices in members:
            sums = self.with_member(sums, member, devices)
        return sums

    def with_member(self, sums: PartSums, member: Candidate, devices: Sequence[int]) -> PartSums:
        """The sums with one more member."""
        part = self.part(member.capability) * self.present(devices)
        views, models = (
            {**known, key: np.maximum(known.get(key, 0.0), part)}
            for known, key in zip(sums.most, _keys(member), strict=True)
        )
        return PartSums(total=sums.total + part, most=(views, models))

    def value(self, sums: PartSums, *, most: float = np.inf) -> float:
        """Expected accuracy; an answer counts for at most `most` times the top capability."""
        combined = self._combine(sums)
        combined = np.minimum(combined, most**self.law.sharpness)
        return float(self._values(combined))

    def values_with(
        self, sums: PartSums, candidates: Sequence[Candidate], devices: Sequence[int]
    ) -> Array:
        """Expected accuracy `[candidates]` with each as a further member on these devices."""
        parts = np.array([self.part(c.capability) for c in candidates])
        there, base = self.present(devices), self._combine(sums)
        # Only patterns with one of these devices, often half of them, differ between candidates;
        # and only what a candidate shares with members differs between those patterns.
        rows = np.flatnonzero(there)
        alone, more = self.law.own * parts, np.zeros((len(candidates), len(rows)))
        keys = zip(*map(_keys, candidates), strict=True)
        for share, known, wanted in zip(self._shares, sums.most, keys, strict=True):
            alone += share * parts
            shared = np.array([key in known for key in wanted])
            if share and shared.any():
                most = np.array([known[key] for key in wanted if key in known])[:, rows]
                more[shared] -= share * np.minimum(parts[shared, None], most)
        grown = self._values(base[rows] + alone[:, None] + more, rows)
        return grown + self._values(base[~there], np.flatnonzero(~there))

    def _combine(self, sums: PartSums) -> Array:
        combined = self.law.own * sums.total
        for share, known in zip(self._shares, sums.most, strict=True):
            for part in known.values():
                combined = combined + share * part
        return combined

    def _values(self, combined: Array, rows: Rows | slice = _ALL) -> Array:
        """Contribution `[...]` of patterns `[..., rows]` to expected accuracy."""
        right = -np.expm1(-self.top * combined ** (1 / self.law.sharpness))
        values: Array = right @ self.arrived.weights[rows]
        return values


def _keys(member: Candidate) -> tuple[int, int]:
    """The keys that members can have in common, in the order of the law's shares."""
    return member.view, member.model
