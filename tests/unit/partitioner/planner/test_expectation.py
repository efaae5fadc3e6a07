"""Expected accuracy: counted and drawn patterns agree, and more never makes it worse."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.estimates.accuracy_law import AccuracyLaw, LawMember, together
from partitioner.planner.availability import (
    MAX_EXACT,
    Arrivals,
    Objective,
    arrivals,
    exact_arrivals,
)
from partitioner.planner.limits import PlanLimits
from tests.unit.partitioner.planner.test_choose import PREDICTOR, some_devices

LAW = PREDICTOR.law


def candidates(count: int) -> list[Any]:
    """As many different candidates, of some device."""
    found = some_devices(5, 1, 200)[0].within(PlanLimits(target_ms=1e9))
    return found[:: max(1, len(found) // count)][:count]


def by_hand(law: AccuracyLaw, members: Sequence[Any], there: Sequence[float]) -> float:
    """The sum over every subset of its probability times its accuracy."""
    total = 0.0
    for pattern in itertools.product([False, True], repeat=len(members)):
        chance = np.prod([p if in_ else 1 - p for p, in_ in zip(there, pattern, strict=True)])
        arrived = [
            LawMember(capability=c.capability, view=c.view, model=c.model)
            for c, in_ in zip(members, pattern, strict=True)
            if in_
        ]
        total += chance * (1 - np.exp(-together(law, arrived)))
    return float(total)


def test_every_pattern_has_its_probability() -> None:
    found = exact_arrivals([0.9, 1.0, 0.25])
    assert len(found.weights) == 4  # what cannot happen is left out
    assert found.weights.sum() == pytest.approx(1)
    assert (found.weights @ found.there).tolist() == pytest.approx([0.9, 1.0, 0.25])


def test_expected_accuracy_is_the_sum_over_subsets() -> None:
    members, there = candidates(4), [0.9, 0.5, 0.99, 0.7]
    objective = Objective(LAW, 1.6, arrivals(there))
    sums = objective.sums([(c, [k]) for k, c in enumerate(members)])
    assert objective.value(sums) == pytest.approx(by_hand(LAW, members, there))


def test_one_more_is_valued_as_if_it_were_there() -> None:
    members = candidates(5)
    objective = Objective(LAW, 1.6, arrivals([0.9, 0.5, 0.99, 0.7, 0.8]))
    three = objective.sums([(c, [k]) for k, c in enumerate(members[:3])])
    values = objective.values_with(three, members[3:], [4])
    for c, value in zip(members[3:], values, strict=True):
        assert value == pytest.approx(objective.value(objective.with_member(three, c, [4])))


@pytest.mark.parametrize("availability", [0.5, 0.8, 0.95, 0.99])
def test_drawn_patterns_agree_with_counted_ones(availability: float) -> None:
    members = candidates(14)
    there = [availability] * len(members)
    drawn, counted = arrivals(there), exact_arrivals(there)
    assert len(members) > MAX_EXACT
    assert len(drawn.weights) < len(counted.weights)
    served = [(c, [k]) for k, c in enumerate(members)]

    def value(patterns: Arrivals) -> float:
        objective = Objective(LAW, 1.6, patterns)
        return objective.value(objective.sums(served))

    assert value(drawn) == pytest.approx(value(counted), abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.integers(0, 11), min_size=2, max_size=6, unique=True),
    there=st.lists(st.floats(0.05, 1), min_size=6, max_size=6),
)
def test_one_more_member_or_replica_is_never_worse(picks: list[int], there: list[float]) -> None:
    members = [candidates(12)[i] for i in picks]
    objective = Objective(LAW, 1.6, exact_arrivals(there))
    served = [(c, [k]) for k, c in enumerate(members)]
    less = objective.value(objective.sums(served[:-1]))
    assert objective.value(objective.sums(served)) >= less
    replicated = [(served[0][0], [0, len(served) - 1]), *served[1:-1]]
    assert objective.value(objective.sums(replicated)) >= less - 1e-12
