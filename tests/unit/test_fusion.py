"""One formula for every arrival subset, and when which rule applies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert

from mdp.fusion import (
    Contribution,
    Fusion,
    FusionWeights,
    SubsetWeights,
    arrival_subsets,
    fuse,
    is_boosting_prefix,
    mode_of,
    probabilities,
    rule_for,
    weights_for,
)

FINITE = st.floats(-1e6, 1e6, width=32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[int, Contribution], SubsetWeights]:
    """Contributions of up to four members, of which some are in the subset, and its weights."""
    classes = draw(st.integers(1, 5))
    arrived = draw(st.sets(st.integers(0, 7), min_size=1, max_size=4))
    members = tuple(sorted(draw(st.sets(st.sampled_from(sorted(arrived)), min_size=1))))
    row = st.lists(FINITE, min_size=classes, max_size=classes)
    scalars = st.lists(st.floats(-4, 4, width=32), min_size=len(members), max_size=len(members))
    contributions = {
        k: Contribution(
            np.array(draw(row), dtype=np.float32), np.array(draw(row), dtype=np.float32)
        )
        for k in arrived
    }
    weights = SubsetWeights(
        members=members,
        a=tuple(draw(scalars)),
        b=tuple(draw(scalars)),
        bias=tuple(draw(st.one_of(st.just([]), row))),
    )
    return contributions, weights


@given(cases())
def test_fuse_is_the_formula(case: tuple[dict[int, Contribution], SubsetWeights]) -> None:
    contributions, weights = case
    terms = [np.array(weights.bias or [0.0], dtype=np.float64)]
    for k, a, b in zip(weights.members, weights.a, weights.b, strict=True):
        terms += [a * contributions[k].boost.astype(np.float64)]
        terms += [b * contributions[k].bag.astype(np.float64)]
    fused = fuse(contributions, weights)
    assert fused.dtype == np.float32
    # Terms may cancel out: what may be lost is a part of their sizes, not of their sum.
    size = np.sum([abs(term) + 1e-30 for term in np.broadcast_arrays(*terms)], axis=0)
    assert (abs(fused - np.sum(np.broadcast_arrays(*terms), axis=0)) <= 1e-5 * size + 1e-30).all()


def test_fuse_takes_batches_and_leaves_its_inputs_alone() -> None:
    rng = np.random.default_rng(0)
    parts = {k: Contribution(*rng.normal(size=(2, 4, 3)).astype(np.float32)) for k in (0, 2)}
    before = {k: (part.boost.copy(), part.bag.copy()) for k, part in parts.items()}
    weights = SubsetWeights(members=(0, 2), a=(1.0, 0.5), b=(0.0, 2.0), bias=(1.0, 2.0, 3.0))
    fused = fuse(parts, weights)
    expected = parts[0].boost + 0.5 * parts[2].boost + 2 * parts[2].bag + np.array([1, 2, 3])
    np.testing.assert_allclose(fused, expected, rtol=1e-5)
    for k, (boost, bag) in before.items():
        np.testing.assert_array_equal(parts[k].boost, boost)
        np.testing.assert_array_equal(parts[k].bag, bag)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_probabilities_of_any_finite_logits(logits: list[float]) -> None:
    scores = probabilities(np.array(logits, dtype=np.float32))
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()
    assert (scores >= 0).all()
    assert scores.sum() == pytest.approx(1.0, abs=1e-5)
    assert scores[int(np.argmax(logits))] == scores.max()


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=8), st.floats(-1e4, 1e4))
def test_probabilities_do_not_change_with_an_offset(logits: list[float], offset: float) -> None:
    plain = np.array(logits, dtype=np.float64)
    np.testing.assert_allclose(probabilities(plain), probabilities(plain + offset), atol=1e-6)


def test_arrival_subsets_are_all_of_them_smaller_ones_first() -> None:
    assert arrival_subsets([2, 0, 1]) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert len(arrival_subsets(range(8))) == 255


@pytest.mark.parametrize(
    ("members", "expected"),
    [((0,), True), ((0, 1), True), ((0, 1, 2), True), ((1,), False), ((0, 2), False), ((), True)],
)
def test_boosting_prefix(members: tuple[int, ...], expected: bool) -> None:
    assert is_boosting_prefix(members) is expected


@pytest.mark.parametrize(
    ("members", "wanted", "fitted", "rule", "mode"),
    [
        ((0, 1, 2), "stacked", True, "stacked", "stacked"),
        ((0, 1, 2), "stacked", False, "bagged", "bagged"),
        ((0, 1, 2), "boosted", True, "boosted", "boosted"),
        ((0, 1), "boosted", False, "boosted", "boosted"),
        ((0, 2), "boosted", True, "bagged", "bagged"),
        ((1, 2), "boosted", False, "bagged", "bagged"),
        ((0, 1, 2), "bagged", True, "bagged", "bagged"),
        ((0,), "boosted", True, "boosted", "single"),
        ((1,), "boosted", True, "bagged", "single"),
        ((1,), "stacked", True, "stacked", "single"),
        ((2,), "bagged", True, "bagged", "single"),
    ],
)
def test_rule_and_mode(
    members: tuple[int, ...], wanted: Fusion, fitted: bool, rule: Fusion, mode: str
) -> None:
    assert rule_for(members, wanted, fitted=fitted) == rule
    assert mode_of(members, rule) == mode


def test_weights_of_every_rule() -> None:
    fitted = SubsetWeights(members=(0, 2), a=(0.25, 0.5), b=(0.75, 1.0))
    stacking = {(0, 2): fitted}
    assert weights_for((0, 2), "stacked", stacking) is fitted
    boosted = SubsetWeights(members=(0, 1), a=(1.0, 1.0), b=(0.0, 0.0))
    assert weights_for((0, 1), "boosted", {}) == boosted
    bagged = SubsetWeights(members=(0, 2), a=(0.0, 0.0), b=(0.5, 0.5))
    assert weights_for((0, 2), "bagged", stacking) == bagged


GOOD = {"members": [0, 1], "a": [0.5, 0.5], "b": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"a": [0.5]}, "`members`, `a` and `b` need the same length"),
        ({"b": []}, "`members`, `a` and `b` need the same length"),
        ({"members": [1, 0]}, "distinct, not negative and ascending"),
        ({"members": [1, 1]}, "distinct, not negative and ascending"),
        ({"members": [-1, 0]}, "distinct, not negative and ascending"),
        ({"members": [], "a": [], "b": []}, "length >= 1"),
        ({"bias": [1.0]}, "`bias` needs 3 numbers, got 1"),
        ({"a": [0.5, float("inf")]}, r"weights of members \[0, 1\] have to be finite"),
        ({"b": [0.5, float("nan")]}, r"weights of members \[0, 1\] have to be finite"),
        ({"b": [0.5, -1e300]}, "finite and at most 1e\\+06 in size"),
        ({"surprise": 1}, "unknown field `surprise`"),
    ],
)
def test_weights_that_are_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        convert({"num_classes": 3, "subsets": [{**GOOD, **change}]}, FusionWeights)


def test_the_same_subset_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="`subsets` list the same members twice"):
        convert({"num_classes": 3, "subsets": [GOOD, GOOD]}, FusionWeights)
    weights = convert({"num_classes": 3, "subsets": [GOOD]}, FusionWeights)
    assert list(weights.by_members()) == [(0, 1)]
