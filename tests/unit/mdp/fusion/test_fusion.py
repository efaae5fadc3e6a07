"""One formula for every arrival subset, and when which rule applies."""

from itertools import chain
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert
from msgspec.structs import replace

from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import (
    MAX_WEIGHT,
    Contribution,
    Fusion,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    Temperatures,
    fuse,
    is_boosting_prefix,
    labels_held,
    list_subsets,
    mode_of,
    probabilities,
    rule_for,
    sigmoid,
    sizes_not_listed,
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
    two_heads = draw(st.booleans())
    contributions = {
        k: Contribution.of([np.array(draw(row), np.float32) for _ in range(1 + two_heads)])
        for k in arrived
    }
    weights = SubsetWeights(
        members=members,
        a=tuple(draw(scalars)) if two_heads else (),
        b=tuple(draw(scalars)),
        bias=tuple(draw(st.one_of(st.just([]), row))),
    )
    return contributions, weights


@given(cases())
def test_fuse_is_the_formula(case: tuple[dict[int, Contribution], SubsetWeights]) -> None:
    contributions, weights = case
    terms = [np.array(weights.bias or [0.0], dtype=np.float64)]
    heads = zip(*(contributions[k].heads for k in weights.members), strict=True)
    for scalar, head in zip(weights.a + weights.b, chain(*heads), strict=True):
        terms += [scalar * head.astype(np.float64)]
    fused = fuse(contributions, weights)
    assert fused.dtype == np.float32
    # Terms may cancel out: what may be lost is a part of their sizes, not of their sum.
    size = np.sum([abs(term) + 1e-30 for term in np.broadcast_arrays(*terms)], axis=0)
    assert (abs(fused - np.sum(np.broadcast_arrays(*terms), axis=0)) <= 1e-5 * size + 1e-30).all()


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
    plain: Any = np.array(logits, dtype=np.float64)
    np.testing.assert_allclose(probabilities(plain), probabilities(plain + offset), atol=1e-6)


def test_arrival_subsets_are_all_of_them_smaller_ones_first() -> None:
    assert list_subsets([2, 0, 1]) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_up_to_eight_members_every_subset_is_listed() -> None:
    for count in range(1, 9):
        assert len(list_subsets(range(count))) == 2**count - 1
        assert sizes_not_listed(count) == []


@pytest.mark.parametrize("count", range(9, 17))
def test_of_more_members_few_subsets_are_listed_and_every_prefix(count: int) -> None:
    listed = list_subsets(range(count))
    assert len(set(listed)) == len(listed) < 400
    assert [len(members) for members in listed] == sorted(len(members) for members in listed)
    unlisted = sizes_not_listed(count)
    assert {1, 2, count - 2, count - 1, count}.isdisjoint(unlisted)
    for size in range(1, count + 1):
        of_size = sum(len(members) == size for members in listed)
        assert of_size == (1 if size in unlisted else comb(count, size))
        assert tuple(range(size)) in listed


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
    ones, other = (1.0,) * len(members), SubsetWeights(members=(7,), a=(1.0,), b=(1.0,))
    own = [SubsetWeights(members=members, a=ones, b=ones)] if fitted else []
    assert rule_for(members, wanted, FusionWeights(num_classes=3, subsets=[other, *own])) == rule
    assert mode_of(members, rule) == mode


def test_without_boost_heads_a_boosted_answer_is_a_bagged_one() -> None:
    own = SubsetWeights(members=(0, 1), a=(), b=(0.25, 0.5))
    fusion = FusionWeights(num_classes=3, subsets=[own])
    assert fusion.rules == ("stacked", "bagged")
    assert rule_for((0, 1), "boosted", fusion) == "bagged"
    two_heads = SubsetWeights(members=(0,), a=(1.0,), b=(1.0,))
    with pytest.raises(ValueError, match="`a` has to be empty everywhere or nowhere"):
        FusionWeights(num_classes=3, subsets=[own, two_heads])


def test_weights_of_every_rule() -> None:
    fitted = SubsetWeights(members=(0, 2), a=(0.25, 0.5), b=(0.75, 1.0))
    fusion = FusionWeights(num_classes=3, subsets=[fitted])
    assert weights_for((0, 2), "stacked", fusion) is fitted
    boosted = SubsetWeights(members=(0, 1), a=(1.0, 1.0), b=(0.0, 0.0))
    assert weights_for((0, 1), "boosted", fusion) == boosted
    bagged = SubsetWeights(members=(0, 2), a=(), b=(0.5, 0.5))
    assert weights_for((0, 2), "bagged", fusion) == bagged
    with pytest.raises(KeyError, match=r"\(0, 1\)"):
        weights_for((0, 1), "stacked", fusion)


def test_plain_rules_are_divided_by_their_temperatures() -> None:
    temperatures = Temperatures(boosted=2.0, bagged=0.5)
    fitted = SubsetWeights(members=(0, 1), a=(1.0, 1.0), b=(1.0, 1.0), temperatures=temperatures)
    fusion = FusionWeights(num_classes=3, subsets=[fitted])
    assert weights_for((0, 1), "boosted", fusion).a == (0.5, 0.5)
    assert weights_for((0, 1), "boosted", fusion).b == (0.0, 0.0)
    assert weights_for((0, 1), "bagged", fusion).b == (1.0, 1.0)
    assert weights_for((0, 1), "stacked", fusion).b == (1.0, 1.0)


SHARED = SizeWeights(
    size=2, a=(1.0, 2.0, 3.0), b=(4.0, 5.0, 6.0), temperatures=Temperatures(bagged=0.25)
)


def test_a_subset_that_is_not_listed_takes_the_weights_of_its_size() -> None:
    own = SubsetWeights(members=(0, 1), a=(0.25, 0.5), b=(0.75, 1.0))
    fusion = FusionWeights(num_classes=3, subsets=[own], by_size=(SHARED,))
    assert weights_for((0, 1), "stacked", fusion) is own
    assert weights_for((0, 2), "stacked", fusion) == SubsetWeights(
        members=(0, 2), a=(1.0, 3.0), b=(4.0, 6.0), temperatures=SHARED.temperatures
    )
    assert weights_for((0, 2), "bagged", fusion).b == (2.0, 2.0)
    assert weights_for((0, 2), "boosted", fusion).a == (1.0, 1.0)
    assert fusion.weights_of((1,)) is None
    assert fusion.weights_of((1, 3)) is None


@given(cases(), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_temperatures_leave_every_label_as_it_is(
    case: tuple[dict[int, Contribution], SubsetWeights], boosted: float, bagged: float
) -> None:
    contributions, fitted = case
    temperatures = Temperatures(boosted=boosted, bagged=bagged)
    warm = SubsetWeights(members=fitted.members, a=fitted.a, b=fitted.b, temperatures=temperatures)
    fusion = FusionWeights(num_classes=1, subsets=[warm])
    plain = FusionWeights(num_classes=1, subsets=[])
    values: dict[Fusion, float] = {"boosted": boosted, "bagged": bagged}
    for rule in set(values) & set(fusion.rules):
        cold = fuse(contributions, weights_for(fitted.members, rule, plain))
        divided = fuse(contributions, weights_for(fitted.members, rule, fusion))
        size = np.abs([c.heads for c in contributions.values()]).max()
        np.testing.assert_allclose(
            divided * values[rule], cold, rtol=1e-4, atol=1e-5 * size + 1e-30
        )


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
    assert weights.subsets[0].temperatures == Temperatures(boosted=1.0, bagged=1.0)
    assert weights.by_size == ()


GOOD_SIZE = {"size": 2, "a": [0.5, 0.5, 0.5], "b": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("by_size", "expected"),
    [
        ([{**GOOD_SIZE, "size": 0}], "`int` >= 1"),
        ([{**GOOD_SIZE, "size": 4}], "same length, at least `size`"),
        ([{**GOOD_SIZE, "a": [0.5, 0.5]}], "same length, at least `size`"),
        ([{**GOOD_SIZE, "a": [0.5, 0.5, float("nan")]}], "weights of size 2 have to be finite"),
        ([{**GOOD_SIZE, "surprise": 1}], "unknown field `surprise`"),
        ([GOOD_SIZE, GOOD_SIZE], "`by_size` lists the same size twice"),
        (
            [GOOD_SIZE, {"size": 1, "a": [1.0], "b": [1.0]}],
            "`by_size` needs weights of the same members for every size",
        ),
        ([{**GOOD_SIZE, "temperatures": {"bagged": 0.0}}], "temperatures have to be 1e-06 to"),
        ([{**GOOD_SIZE, "temperatures": {"boosted": float("nan")}}], "temperatures have to be"),
        ([{**GOOD_SIZE, "temperatures": {"boosted": -1.0}}], "temperatures have to be"),
        ([{**GOOD_SIZE, "temperatures": {"stacked": 1.0}}], "unknown field `stacked`"),
    ],
)
def test_shared_weights_that_are_refused(by_size: object, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        convert({"num_classes": 3, "subsets": [GOOD], "by_size": by_size}, FusionWeights)


def test_one_picture_is_fused_as_one_of_many_which_stay_as_they_are() -> None:
    draw = np.random.default_rng(0)
    many = {k: Contribution(*draw.normal(size=(2, 7, 4)).astype(np.float32)) for k in (0, 2, 5)}
    weights = SubsetWeights(
        members=(0, 2, 5), a=(0.5, 0.0, 1.5), b=(1.0, -2.0, 0.0), bias=(0.1, 0.2, 0.3, 0.4)
    )
    before = {k: [head.copy() for head in each.heads] for k, each in many.items()}
    fused = fuse(many, weights)
    for k, heads in before.items():
        np.testing.assert_array_equal(many[k].heads, heads)
    for picture in range(7):
        one = {k: Contribution.of([head[picture] for head in h.heads]) for k, h in many.items()}
        assert fuse(one, weights) == pytest.approx(fused[picture], abs=1e-5)


def test_a_size_is_unlisted_above_120_subsets() -> None:
    assert sizes_not_listed(8) == []
    assert sizes_not_listed(16) == list(range(3, 14))
    assert sizes_not_listed(121) == list(range(1, 121))


def test_temperatures_reach_their_bounds() -> None:
    assert Temperatures(boosted=1 / MAX_WEIGHT, bagged=MAX_WEIGHT).boosted == 1 / MAX_WEIGHT
    with pytest.raises(ValueError, match="temperatures have to be"):
        Temperatures(boosted=0.9 / MAX_WEIGHT)


def test_one_class_and_format_version_1_are_read() -> None:
    stored = {"num_classes": 1, "subsets": [], "format_version": 1}
    assert convert(stored, FusionWeights) == FusionWeights(num_classes=1, subsets=[])


def test_several_pictures_are_normalised_each_by_itself() -> None:
    logits = np.array([[1.0, 2.0, 4.0], [9.0, 0.0, -3.0]], dtype=np.float32)
    np.testing.assert_allclose(
        probabilities(logits), [probabilities(row) for row in logits], rtol=1e-6
    )


def test_several_pictures_of_one_member_with_one_head() -> None:
    logits = np.array([[1.0, 2.0], [3.0, 5.0]], dtype=np.float32)
    fused = fuse({0: Contribution(None, logits)}, SubsetWeights(members=(0,), a=(), b=(2.0,)))
    np.testing.assert_array_equal(fused, 2 * logits)


def test_weights_of_boost_heads_that_are_not_there_are_an_error() -> None:
    logits = np.ones((2, 3), dtype=np.float32)
    weights = SubsetWeights(members=(0,), a=(1.0,), b=(1.0,))
    with pytest.raises(ValueError, match="shorter"):
        fuse({0: Contribution(None, logits)}, weights)


CASCADE = {"first": [0, 2], "pictures": 1, "stacked": 0.9, "bagged": 0.8, "escalated": 0.25}


def test_a_cascade_as_stored() -> None:
    cascade = convert(CASCADE, Cascade)
    assert cascade.first == (0, 2)
    assert [cascade.threshold(rule) for rule in ("stacked", "bagged", "boosted")] == [0.9, 0.8, 0.8]
    assert convert({**CASCADE, "first": [0], "boosted": 0.7}, Cascade).threshold("boosted") == 0.7


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"first": []}, "length >= 1"),
        ({"first": [2, 0]}, "ascending"),
        ({"first": [0, 0]}, "distinct"),
        ({"first": [-1, 0]}, "not negative"),
        ({"pictures": 0}, ">= 1"),
        ({"stacked": 1.5}, "<= 1"),
    ],
)
def test_cascades_that_are_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        convert({**CASCADE, **change}, Cascade)


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (Contribution(None, np.zeros(2, np.float32)), "boost"),
        (SubsetWeights(members=(0,), a=(), b=(1.0,)), "members"),
        (Temperatures(), "boosted"),
        (FusionWeights(num_classes=2, subsets=[]), "subsets"),
        (convert(CASCADE, Cascade), "first"),
    ],
)
def test_records_cannot_be_changed(record: object, field: str) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(record, field, None)


def test_labels_that_do_not_exclude_each_other_hold_above_their_thresholds() -> None:
    logits = np.array([[0.0, 800.0, -800.0], [1.0, -1.0, 0.4]], np.float32)
    shares = sigmoid(logits)
    assert shares.tolist()[0] == [0.5, 1.0, 0.0]
    plain = SubsetWeights(members=(0,), a=(), b=(1.0,))
    assert labels_held(shares, plain).tolist() == [[False, True, False], [True, False, True]]
    moved = replace(plain, thresholds=(0.4, 0.5, 0.6))
    assert labels_held(shares, moved).tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"subsets": [(0.5,), (0.5, 0.5)]}, "`thresholds` need 2 numbers, got 1"),
        ({"subsets": [(), (0.5, 0.5)]}, "`thresholds` have to be given everywhere or nowhere"),
        (
            {"subsets": [(0.5, 0.5), (0.5, 0.5)], "agreement": (0.5,)},
            "`thresholds` go with none of `by_size`, `novelty` and `agreement`",
        ),
    ],
)
def test_thresholds_that_do_not_fit_the_weights(change: dict[str, Any], told: str) -> None:
    subsets = [
        SubsetWeights(members=(k,), a=(), b=(1.0,), thresholds=thresholds)
        for k, thresholds in enumerate(change.pop("subsets"))
    ]
    with pytest.raises(ValueError, match=told):
        FusionWeights(num_classes=2, subsets=subsets, **change)
