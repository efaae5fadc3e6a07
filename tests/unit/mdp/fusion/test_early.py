"""When what has arrived is enough for the label of the whole."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mdp.fusion.early_exit import EarlyBounds, EarlyRule, Pull, early_pairs, lead, part_of
from mdp.fusion.fuse import (
    Contribution,
    Fusion,
    FusionWeights,
    SubsetWeights,
    fuse,
    listed_subsets,
    rule_for,
    weights_for,
)

CLASSES = 4


def weights(count: int = 3, seed: int = 0) -> FusionWeights:
    """Stacking weights that differ for every subset, some of them negative, with a bias."""
    random = np.random.default_rng(seed)
    return FusionWeights(
        num_classes=CLASSES,
        subsets=[
            SubsetWeights(
                members=members,
                a=tuple(random.normal(0.7, 0.4, len(members)).tolist()),
                b=tuple(random.normal(0.5, 0.4, len(members)).tolist()),
                bias=tuple(random.normal(0, 0.2, CLASSES).tolist()),
            )
            for members in listed_subsets(range(count))
        ],
    )


def bounds(*pulls: tuple[tuple[int, ...], tuple[int, ...], float]) -> EarlyBounds:
    return EarlyBounds(
        pictures=1000,
        pulls=tuple(
            Pull(members=members, arrived=arrived, boosted=most, stacked=most, bagged=most)
            for members, arrived, most in pulls
        ),
    )


def contribution(*logits: float) -> Contribution:
    array = np.array(logits, dtype=np.float32)
    return Contribution(array, array)


def test_which_pairs_are_measured() -> None:
    assert early_pairs(1) == []
    assert early_pairs(2) == [((0, 1), (0,)), ((0, 1), (1,))]
    three = early_pairs(3)
    assert len(three) == len(set(three)) == 12
    assert ((0, 1, 2), (1,)) in three
    assert ((0, 2), (2,)) in three
    eight = early_pairs(8)
    assert len(eight) == len(set(eight)) == 36 + 8 * 28
    assert {len(members) - len(arrived) for members, arrived in eight} == {1, 2}
    assert {len(members) for members, _ in eight} == {7, 8}
    assert len(early_pairs(16)) == 136 + 16 * 120


def test_a_margin_beyond_the_pull_is_enough_and_one_within_is_not() -> None:
    fusion = weights()
    rule = EarlyRule(bounds(((0, 1), (0,), 1.0)), fusion, "bagged")
    # Bagged over two: half of what arrived counts.
    assert rule.enough({0: contribution(0, 4.2, 2, 0)}, [1])
    assert not rule.enough({0: contribution(0, 4.0, 2, 0)}, [1])
    assert not rule.enough({0: contribution(0, 3.8, 2, 0)}, [1])


def test_a_pair_that_was_not_measured_is_never_enough() -> None:
    rule = EarlyRule(bounds(((0, 1), (0,), 0.1)), weights(), "stacked")
    assert not rule.enough({0: contribution(0, 90, 2, 0)}, [2])
    assert not rule.enough({1: contribution(0, 90, 2, 0)}, [0])
    assert not rule.enough({0: contribution(0, 90, 2, 0)}, [1, 2])


def test_a_label_that_the_arrived_ones_own_weights_do_not_give_is_never_enough() -> None:
    whole = SubsetWeights(members=(0, 1), a=(1.0, 0.0), b=(0.0, 1.0))
    alone = SubsetWeights(members=(0,), a=(0.0,), b=(1.0,))
    fusion = FusionWeights(num_classes=2, subsets=[whole, alone])
    rule = EarlyRule(bounds(((0, 1), (0,), 1.0)), fusion, "stacked")
    for_the_first = np.array([5.0, 0.0], np.float32)
    for_the_second = np.array([0.0, 5.0], np.float32)
    assert rule.enough({0: Contribution(for_the_first, for_the_first)}, [1])
    assert not rule.enough({0: Contribution(for_the_first, for_the_second)}, [1])


def test_the_leader_and_its_margin() -> None:
    leaders, margins = lead(np.array([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0]], np.float32))
    assert leaders.tolist() == [1, 0]
    assert margins.tolist() == [0.5, 0.0]


LOGITS = arrays(np.float32, (3, 2, CLASSES), elements=st.floats(-8, 8, width=32))


@settings(max_examples=400)
@given(
    logits=LOGITS,
    seed=st.integers(0, 20),
    pair=st.sampled_from(early_pairs(3)),
    fusion=st.sampled_from(["stacked", "boosted", "bagged"]),
    most=st.floats(0, 6),
)
def test_within_the_measured_pull_the_label_is_that_of_the_whole(
    logits: np.ndarray,
    seed: int,
    pair: tuple[tuple[int, ...], tuple[int, ...]],
    fusion: Fusion,
    most: float,
) -> None:
    members, arrived = pair
    table = weights(seed=seed)
    parts = {k: Contribution(*logits[k]) for k in members}
    rule = rule_for(members, fusion, fitted=True)
    whole = weights_for(members, rule, table)
    awaited = tuple(k for k in members if k not in arrived)
    partial = fuse(parts, part_of(whole, arrived, bias=True))
    missing = fuse(parts, part_of(whole, awaited, bias=False))
    pull = float(missing.max() - missing[partial.argmax()])
    early = EarlyRule(bounds((members, arrived, most)), table, fusion)
    enough = early.enough({k: parts[k] for k in arrived}, awaited)
    if enough and pull <= most:
        assert fuse(parts, whole).argmax() == partial.argmax()
        own = weights_for(arrived, rule_for(arrived, fusion, fitted=True), table)
        assert fuse(parts, own).argmax() == partial.argmax()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrived": [0, 1]}, "`arrived` has to be a part of `members`"),
        ({"arrived": [2]}, "`arrived` has to be a part of `members`"),
        ({"arrived": []}, "`members` and `arrived` have to be ascending and not empty"),
        ({"members": [1, 0]}, "`members` and `arrived` have to be ascending and not empty"),
        ({"stacked": -1.0}, "Expected `float` >= 0.0"),
    ],
)
def test_pulls_that_are_refused(change: dict[str, object], message: str) -> None:
    pull = {"members": [0, 1], "arrived": [0], "boosted": 1.0, "stacked": 1.0, "bagged": 1.0}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(pull | change, Pull)
