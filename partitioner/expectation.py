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

from partitioner.accuracy_law import AccuracyLaw, Array
from partitioner.candidates import Candidate

#: Up to so many devices every pattern of arrivals is counted.
MAX_EXACT = 10
#: How many patterns are drawn for more devices.
PATTERNS = 1024
_SEED = 0


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
    """What members add up to in every pattern: all parts, the largest per view, and per build."""

    total: Array
    views: dict[int, Array]
    models: dict[int, Array]


class Objective:
    """Expected accuracy of members, and what one more would make of it."""

    def __init__(self, law: AccuracyLaw, top: float, arrived: Arrivals) -> None:
        """`top` is the capability that parts are counted relative to: the teacher's."""
        self.law, self.top, self.arrived = law, top, arrived
        self._own = 1 - law.same_view - law.same_model

    def part(self, capability: float) -> float:
        """A member's part in the sum."""
        return float((capability / self.top) ** self.law.sharpness)

    def present(self, devices: Sequence[int]) -> NDArray[np.bool_]:
        """In which patterns any of these devices is there."""
        there: NDArray[np.bool_] = np.any(self.arrived.there[:, list(devices)], axis=1)
        return there

    def sums(self, members: Sequence[tuple[Candidate, Sequence[int]]]) -> Sums:
        """What members, each served by some devices, add up to."""
        sums = Sums(total=np.zeros(len(self.arrived.weights)), views={}, models={})
        for member, devices in members:
            sums = self.added(sums, member, devices)
        return sums

    def added(self, sums: Sums, member: Candidate, devices: Sequence[int]) -> Sums:
        """The sums with one member more."""
        part = self.part(member.capability) * self.present(devices)
        view = np.maximum(sums.views.get(member.view, 0.0), part)
        model = np.maximum(sums.models.get(member.model, 0.0), part)
        return Sums(
            total=sums.total + part,
            views={**sums.views, member.view: view},
            models={**sums.models, member.model: model},
        )

    def value(self, sums: Sums, *, at_most_top: bool = False) -> float:
        """Expected accuracy; `at_most_top`: where no answer counts for more than the teacher's."""
        combined = self._combined(sums)
        if at_most_top:
            combined = np.minimum(combined, 1.0)
        return float(self._values(combined[:, None])[0])

    def with_one_more(
        self, sums: Sums, candidates: Sequence[Candidate], devices: Sequence[int]
    ) -> Array:
        """Expected accuracy `[candidates]` when these devices serve one of the candidates too."""
        parts = np.array([self.part(c.capability) for c in candidates])
        zero = np.zeros(len(self.arrived.weights))
        views = np.stack([sums.views.get(c.view, zero) for c in candidates], axis=1)
        models = np.stack([sums.models.get(c.model, zero) for c in candidates], axis=1)
        more = self._own * parts
        more = more + self.law.same_view * np.maximum(parts - views, 0)
        more = more + self.law.same_model * np.maximum(parts - models, 0)
        base = self._combined(sums)[:, None]
        return self._values(base + self.present(devices)[:, None] * more)

    def _combined(self, sums: Sums) -> Array:
        combined = self._own * sums.total
        for share, best in ((self.law.same_view, sums.views), (self.law.same_model, sums.models)):
            for part in best.values():
                combined = combined + share * part
        return combined

    def _values(self, combined: Array) -> Array:
        right = -np.expm1(-self.top * combined ** (1 / self.law.sharpness))
        values: Array = self.arrived.weights @ right
        return values
