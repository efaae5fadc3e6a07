"""Accuracy expected of members whose devices are not always there. Pure.

Arrivals are taken to be independent, and a request that nobody answers counts as wrong. With few
devices every pattern of arrivals is counted, with its probability; with many, patterns are drawn
once, from a fixed seed, and serve every comparison, so that what differs between two plans is the
plans and not the draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.estimates.accuracy_law import AccuracyLaw, Array
from partitioner.planner.candidates import Candidate

#: Up to so many devices every pattern of arrivals is counted.
MAX_EXACT = 10
#: How many patterns are drawn for more devices.
PATTERNS = 1024
_SEED = 0
_ALL = slice(None)

#: Indices of patterns.
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Patterns of which devices are there: `there[n, devices]`, each with a probability `[n]`."""

    there: NDArray[np.bool_]
    weights: Array


def arrivals(availability: Sequence[float], *, seed: int = _SEED) -> Arrivals:
    """Every pattern of up to `MAX_EXACT` devices; drawn ones of more."""
    chances = np.array(availability, dtype=np.float64)
    if len(chances) <= MAX_EXACT:
        return exact_arrivals(availability)
    draws = np.random.default_rng(seed).random((PATTERNS, len(chances)))
    return Arrivals(there=draws < chances, weights=np.full(PATTERNS, 1 / PATTERNS))


def exact_arrivals(availability: Sequence[float]) -> Arrivals:
    """Every pattern, at most 2^16 of them in use."""
    chances = np.array(availability, dtype=np.float64)
    bits = np.arange(2 ** len(chances))[:, None] >> np.arange(len(chances)) & 1
    there = bits.astype(bool)
    weights: Array = np.where(there, chances, 1 - chances).prod(axis=1)
    possible = weights > 0
    return Arrivals(there=there[possible], weights=weights[possible])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sums:
    """What members add up to in every pattern: all parts, and the largest of whatever is shared."""

    total: Array
    #: Per view and per build, as the law's shares are ordered in `Objective`.
    most: tuple[dict[int, Array], dict[int, Array]]


class Objective:
    """Expected accuracy of members, and what one more would make of it."""

    def __init__(self, law: AccuracyLaw, top: float, arrived: Arrivals) -> None:
        """`top` is the capability that parts are counted relative to: the teacher's."""
        self.law, self.top, self.arrived = law, top, arrived
        self._shares = (law.same_view, law.same_model)

    def part(self, capability: float) -> float:
        """A member's part in the sum."""
        return float((capability / self.top) ** self.law.sharpness)

    def present(self, devices: Sequence[int]) -> NDArray[np.bool_]:
        """In which patterns any of these devices is there."""
        there: NDArray[np.bool_] = np.any(self.arrived.there[:, list(devices)], axis=1)
        return there

    def sums(self, members: Sequence[tuple[Candidate, Sequence[int]]]) -> Sums:
        """What members, each served by some devices, add up to."""
        sums = Sums(total=np.zeros(len(self.arrived.weights)), most=({}, {}))
        for member, devices in members:
            sums = self.added(sums, member, devices)
        return sums

    def added(self, sums: Sums, member: Candidate, devices: Sequence[int]) -> Sums:
        """The sums with one member more."""
        part = self.part(member.capability) * self.present(devices)
        views, models = (
            {**known, key: np.maximum(known.get(key, 0.0), part)}
            for known, key in zip(sums.most, _keys(member), strict=True)
        )
        return Sums(total=sums.total + part, most=(views, models))

    def value(self, sums: Sums, *, most: float = np.inf) -> float:
        """Expected accuracy; no answer counts for more than `most` times the top capability."""
        combined = self._combined(sums)
        combined = np.minimum(combined, most**self.law.sharpness)
        return float(self._values(combined))

    def with_one_more(
        self, sums: Sums, candidates: Sequence[Candidate], devices: Sequence[int]
    ) -> Array:
        """Expected accuracy `[candidates]` when these devices serve one of the candidates too."""
        parts = np.array([self.part(c.capability) for c in candidates])
        there, base = self.present(devices), self._combined(sums)
        # Of all that differs between candidates: where none of these devices is there, nothing
        # does, often in half of the patterns; and where nobody shares anything, patterns do not.
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

    def _combined(self, sums: Sums) -> Array:
        combined = self.law.own * sums.total
        for share, known in zip(self._shares, sums.most, strict=True):
            for part in known.values():
                combined = combined + share * part
        return combined

    def _values(self, combined: Array, rows: Rows | slice = _ALL) -> Array:
        """What patterns `[..., rows]` contribute to expected accuracy; `[...]`."""
        right = -np.expm1(-self.top * combined ** (1 / self.law.sharpness))
        values: Array = right @ self.arrived.weights[rows]
        return values


def _keys(member: Candidate) -> tuple[int, int]:
    """What a member may have in common with others, in the order of the law's shares."""
    return member.view, member.model
