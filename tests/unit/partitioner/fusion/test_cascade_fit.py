"""A cascade keeps its promise on the logits that it was fitted to; what it does is counted."""

import msgspec
import numpy as np
import pytest

from mdp.formats.plan import Plan
from mdp.fusion.fuse import Contribution, Fusion, fuse, rule_for, weights_for
from mdp.testing.bundles import colour_plan
from partitioner.fusion.cascade_cost import both_ways, cost
from partitioner.fusion.cascade_fit import (
    MAX_LOSS,
    MIN_PICTURES,
    fit_cascade,
    measure_cascade,
    threshold,
)
from partitioner.fusion.stacking import fit_fusion

pytestmark = pytest.mark.torch

CLASSES = 5
SKILL = (2.5, 2.3, 0.3)
RULES: tuple[Fusion, ...] = ("stacked", "boosted", "bagged")


def members(
    pictures: int, seed: int, skill: tuple[float, ...] = SKILL
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Logits of members that see the target through noise, and the targets."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, CLASSES, pictures)
    truth = np.eye(CLASSES, dtype=np.float32)[targets]

    def head(skill: float) -> np.ndarray:
        return (skill * truth + random.normal(size=truth.shape)).astype(np.float32)

    return {k: Contribution(head(s), head(s)) for k, s in enumerate(skill)}, targets


def plan(
    compute_ms: tuple[float, ...] = (1.0, 1.0, 1.0),
    energy_j: tuple[float | None, ...] = (None, None, None),
    deadline_ms: float | None = None,
) -> Plan:
    """A plan whose devices compute for so long, and need half as long for the network."""
    made = colour_plan(("alpha", "beta", "gamma"), (8, 8, 8))
    assignments = [
        msgspec.structs.replace(
            a,
            predicted_ms=msgspec.structs.replace(
                a.predicted_ms, compute=ms, network=ms / 2, total=1.5 * ms
            ),
            energy_j=joules,
        )
        for a, ms, joules in zip(made.assignments, compute_ms, energy_j, strict=True)
    ]
    return msgspec.structs.replace(made, assignments=assignments, deadline_ms=deadline_ms)


@pytest.mark.parametrize("fusion", RULES)
def test_no_more_right_answers_are_lost_than_may_be(fusion: Fusion) -> None:
    contributions, targets = members(2000, 1)
    weights = fit_fusion(contributions, targets)
    cascade = fit_cascade(plan(), contributions, targets, weights)
    assert cascade is not None
    assert cascade.pictures == 2000
    measured = measure_cascade(contributions, targets, weights, cascade)
    rule = rule_for((0, 1, 2), fusion, weights)
    whole = fuse(contributions, weights_for((0, 1, 2), rule, weights)).argmax(axis=1)
    together = float((whole == targets).mean())
    assert getattr(measured.accuracy, fusion) >= together - MAX_LOSS
    assert 0 < getattr(measured.escalated, fusion) < 1
    assert measured.escalated.stacked == cascade.escalated
    # Other pictures of the same kind: the same within what so many tell.
    others, labels = members(2000, 2)
    elsewhere = measure_cascade(others, labels, weights, cascade)
    assert abs(getattr(elsewhere.escalated, fusion) - getattr(measured.escalated, fusion)) < 0.05


def test_the_threshold_is_the_lowest_that_loses_no_more_than_may_be() -> None:
    confidence = np.linspace(0.999, 0.0, 1000, dtype=np.float32)
    lost = np.zeros(1000, dtype=bool)
    assert threshold(confidence, lost) == 0.0
    lost[[100, 200, 300, 400, 500]] = True
    found = threshold(confidence, lost)
    # Three of a thousand may be lost, so the fourth may not be answered.
    assert found >= confidence[400]
    assert confidence[399] > found
    assert threshold(np.ones(1000, np.float32), lost) == 1.0


@pytest.mark.parametrize(
    ("made", "first"),
    [
        pytest.param(plan(compute_ms=(1.0, 4.0, 4.0)), (0,), id="the quickest"),
        pytest.param(plan(compute_ms=(9.0, 1.0, 4.0)), (1,), id="one that is as sure, and quicker"),
        pytest.param(plan(energy_j=(5.0, 1.0, 1.0)), (1,), id="energy goes before time"),
        pytest.param(plan(energy_j=(1.0, 5.0, None)), (0,), id="not where one is not known"),
        pytest.param(
            plan(compute_ms=(9.0, 10.0, 1.0), energy_j=(1.0, 5.0, 5.0), deadline_ms=17.0),
            (0, 1),
            id="both stages within the deadline",
        ),
    ],
)
def test_who_is_asked_first_costs_least(made: Plan, first: tuple[int, ...]) -> None:
    contributions, targets = members(2000, 1)
    cascade = fit_cascade(made, contributions, targets, fit_fusion(contributions, targets))
    assert cascade is not None
    assert cascade.first == first
    assert cost(made, first, cascade.escalated) < cost(made, first, 1.0)


def test_too_few_pictures_or_a_single_member_make_no_cascade() -> None:
    few, targets = members(MIN_PICTURES - 1, 1)
    assert fit_cascade(plan(), few, targets, fit_fusion(few, targets)) is None
    one, targets = members(1000, 1, SKILL[:1])
    alone = msgspec.structs.replace(plan(), assignments=plan().assignments[:1])
    assert fit_cascade(alone, one, targets, fit_fusion(one, targets)) is None


def test_what_each_way_costs() -> None:
    made = plan(compute_ms=(2.0, 4.0, 6.0), energy_j=(1.0, 2.0, 3.0))
    ways = both_ways(made, [0], 0.25)
    at_once, cascade = ways.at_once, ways.cascade
    assert (at_once.mean_ms, at_once.p99_ms, at_once.device_ms) == (9.0, 9.0, 12.0)
    assert (cascade.mean_ms, cascade.p99_ms, cascade.device_ms) == (3.0 + 9.0 / 4, 12.0, 4.5)
    assert (at_once.energy_j, cascade.energy_j) == (6.0, 1.0 + 5.0 / 4)
    seldom = both_ways(plan(compute_ms=(2.0, 4.0, 6.0)), [0], 0.001).cascade
    assert (seldom.p99_ms, seldom.energy_j) == (3.0, None)
