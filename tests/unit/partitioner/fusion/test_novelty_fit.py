"""Scores of unknown items and their thresholds, fitted to logits."""

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from mdp.fusion.fuse import (
    Contribution,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    list_subsets,
    sizes_not_listed,
)
from mdp.fusion.novelty import NoveltyScore
from partitioner.fusion.novelty_fit import (
    area_under_curve,
    fit_novelty,
    tells_distance,
    threshold_places,
    thresholds,
)
from partitioner.fusion.stacking import fit_fusion

CLASSES = 4


def items(
    count: int, members: int, *, known: bool = True, seed: int = 0
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Logits of items, the later a member the noisier; unknown ones have weak and mixed logits."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, CLASSES, count)
    parts = {}
    for k in range(members):
        signal = (4.0 if known else 0.5) * np.eye(CLASSES)[targets]
        noise = (1.0 + 0.5 * k) * random.normal(size=(count, CLASSES))
        parts[k] = Contribution(None, (signal + noise).astype(np.float32))
    return parts, targets


def fit(count: int, members: int = 3) -> tuple[dict[int, Contribution], FusionWeights]:
    parts, targets = items(count, members)
    return parts, fit_fusion(parts, targets)


def test_the_rate_of_every_subset_holds_on_further_items() -> None:
    """Split conformal: on average over calibrations, the share above is at most the rate."""
    rates = []
    for seed in range(25):
        parts, targets = items(99, 2, seed=seed)
        fusion = fit_fusion(parts, targets)
        novelty = fit_novelty(parts, fusion)
        assert (novelty.pictures, novelty.default) == (99, 0.02)
        others, _ = items(2000, 2, seed=1000 + seed)
        for one in novelty.subsets:
            score = NoveltyScore(one.members, fusion).of(others, one.weights)
            rates.append([(score > value).mean() for value in one.thresholds])
    mean = np.mean(rates, axis=0)
    wanted = np.array(novelty.rates)
    # The fit to the same items costs a little.
    assert (mean <= 1.15 * wanted + 0.006).all()
    assert (mean >= 0.7 * wanted - 0.006).all()


def test_few_items_support_no_low_rate_and_that_is_said() -> None:
    said: list[str] = []
    parts, fusion = fit(8)
    novelty = fit_novelty(parts, fusion, note=said.append)
    assert novelty.default == novelty.rates[0] == pytest.approx(1 / 9, abs=1e-5)
    assert said == [
        "unknown items: 8 calibration pictures support no rate of rejected known items below "
        "11.11%, which is taken: 2% takes 49"
    ]
    said.clear()
    parts, fusion = fit(49)
    assert fit_novelty(parts, fusion, note=said.append).default == 0.02
    assert said == []


def test_two_items_have_a_threshold() -> None:
    parts, targets = items(2, 2)
    novelty = fit_novelty(parts, fit_fusion(parts, targets), note=lambda line: None)
    assert novelty.rates == (0.333333,)
    assert all(np.isfinite(one.thresholds).all() for one in novelty.subsets)


def test_of_very_many_logits_some_pictures_are_enough() -> None:
    parts, _ = items(1200, 1)
    many = {0: Contribution(None, np.tile(parts[0].bag, (1, 600)))}
    subset = SubsetWeights(members=(0,), a=(), b=(1.0,))
    fusion = FusionWeights(num_classes=600 * CLASSES, subsets=[subset])
    assert fit_novelty(many, fusion).pictures == 1000


def test_thresholds_are_the_largest_scores() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.7])
    assert thresholds(scores, [1, 2, 4]) == [0.9, 0.7, 0.1]


@pytest.mark.parametrize("count", [1, 2, 8, 49, 60, 1000, 100_000])
def test_supported_rates_have_the_lowest_and_the_default_one(count: int) -> None:
    places = threshold_places(count)
    assert places[0] == 1
    assert places == sorted(set(places))
    assert len(places) <= 50
    assert places[-1] <= max(1, (count + 1) // 2)
    assert max(1, int(0.02 * (count + 1) + 1e-9)) in places


def test_the_area_under_the_curve_is_how_often_the_unknown_is_stranger() -> None:
    random = np.random.default_rng(0)
    known, unknown = random.integers(0, 6, 40) / 2, random.integers(2, 9, 30) / 2
    pairs = [(a < b) + 0.5 * (a == b) for a, b in itertools.product(known, unknown)]
    assert area_under_curve(known, unknown) == pytest.approx(np.mean(pairs))


def test_without_unknown_pictures_all_signals_count_alike() -> None:
    parts, fusion = fit(400)
    novelty = fit_novelty(parts, fusion)
    assert novelty.unknown == 0
    for one in novelty.subsets:
        # One member has nobody to disagree with.
        signals = ["energy", "doubt", "disagreement"][: 3 if one.size > 1 else 2]
        assert list(one.weights) == signals
    for size in (1, 2, 3):
        weights = next(one.weights for one in novelty.subsets if one.size == size)
        pooled = [
            NoveltyScore(one.members, fusion).of(parts, {signal: weight})
            for one in novelty.subsets
            if one.size == size
            for signal, weight in weights.items()
        ]
        spreads = np.array(pooled).reshape(-1, len(weights), 400).transpose(1, 0, 2)
        assert spreads.reshape(len(weights), -1).std(axis=1) == pytest.approx(1.0, abs=1e-3)


def test_where_models_tell_the_distance_it_takes_the_place_of_disagreement() -> None:
    parts, targets = items(400, 2)
    random = np.random.default_rng(3)
    distant = {}
    for k, part in parts.items():
        distances = random.uniform(0.9, 1.1, (400, 1)).astype(np.float32)
        mean = part.bag.mean(axis=1, keepdims=True)
        distant[k] = Contribution(None, part.bag - mean - distances)
    fusion = fit_fusion(distant, targets)
    novelty = fit_novelty(distant, fusion, distance=True)
    assert all(list(one.weights) == ["energy", "doubt", "distance"] for one in novelty.subsets)
    assert tells_distance(replace(fusion, novelty=novelty))
    assert not tells_distance(fusion)
    assert not tells_distance(replace(fusion, novelty=fit_novelty(distant, fusion)))
    # Items whose probabilities are those of known ones, from elsewhere.
    far = {k: Contribution(None, part.bag - 1.0) for k, part in distant.items()}
    both = novelty.subsets[-1]
    score = NoveltyScore(both.members, fusion).of(far, both.weights)
    assert (score > both.thresholds[novelty.place(None)]).mean() > 0.95


def test_unknown_pictures_choose_what_tells_them_best() -> None:
    parts, fusion = fit(400)
    unknown, _ = items(300, 3, known=False, seed=5)
    plain, chosen = fit_novelty(parts, fusion), fit_novelty(parts, fusion, unknown=unknown)
    assert chosen.unknown == 300
    others, _ = items(400, 3, seed=6)
    strange, _ = items(300, 3, known=False, seed=7)
    areas = {
        kind: np.mean([
            area_under_curve(*(
                NoveltyScore(one.members, fusion).of(given, one.weights)
                for given in (others, strange)
            ))
            for one in novelty.subsets
        ])
        for kind, novelty in (("plain", plain), ("chosen", chosen))
    }  # fmt: skip
    assert areas["chosen"] >= areas["plain"] - 0.005
    assert areas["chosen"] > 0.8
    # Where only disagreement tells them apart, it is what counts.
    sure = {k: Contribution(None, 9 * np.eye(CLASSES, dtype=np.float32)[[0, 1] * 20])
            for k in range(2)}  # fmt: skip
    split = {k: Contribution(None, 9 * np.eye(CLASSES, dtype=np.float32)[[k, 1 - k] * 20])
             for k in range(2)}  # fmt: skip
    random = np.random.default_rng(1)
    sure = {k: Contribution(None, part.bag + random.normal(0, 0.5, (40, CLASSES)).astype("f4"))
            for k, part in sure.items()}  # fmt: skip
    both = fit_novelty(sure, fit_fusion(sure, np.array([0, 1] * 20)), unknown=split)
    assert "disagreement" in both.subsets[-1].weights


def test_a_member_to_which_all_items_look_unknown_changes_nothing() -> None:
    parts, targets = items(400, 2)
    blind = {**parts, 2: Contribution(None, np.zeros((400, CLASSES), np.float32))}
    fusion = fit_fusion(blind, targets)
    novelty = fit_novelty(blind, fusion)
    strange, _ = items(300, 2, known=False, seed=5)
    strange[2] = Contribution(None, np.zeros((300, CLASSES), np.float32))
    with_it, without = novelty.of((0, 1, 2)), novelty.of((0, 1))
    assert with_it is not None
    assert without is not None
    areas = [
        area_under_curve(*(
            NoveltyScore(one.members, fusion).of(given, one.weights) for given in (blind, strange)
        ))
        for one in (with_it, without)
    ]  # fmt: skip
    assert areas[0] == pytest.approx(areas[1], abs=0.02)
    place = novelty.place(None)
    for one in (with_it, without):
        score = NoveltyScore(one.members, fusion).of(blind, one.weights)
        assert (score > one.thresholds[place]).mean() <= 0.02
    # Alone it tells nothing: no item is above its threshold, known or not.
    alone = novelty.of((2,))
    assert alone is not None
    score = NoveltyScore((2,), fusion).of(strange, alone.weights)
    assert not (score > alone.thresholds[place]).any()


def test_subsets_that_are_not_listed_share_one_score() -> None:
    parts, _ = items(60, 10)
    fusion = FusionWeights(
        num_classes=CLASSES,
        subsets=[
            SubsetWeights(members=s, a=(), b=(1 / len(s),) * len(s))
            for s in list_subsets(range(10))
        ],
        by_size=tuple(
            SizeWeights(size=size, a=(), b=(1 / size,) * 10) for size in sizes_not_listed(10)
        ),
    )
    novelty = fit_novelty(parts, fusion)
    listed = [one.members for one in novelty.subsets if one.members]
    assert listed == list_subsets(range(10))
    shared = [one.size for one in novelty.subsets if not one.members]
    assert shared == sizes_not_listed(10)
    assert novelty.of((1, 2, 3, 5, 9)) is novelty.of((0, 2, 4, 6, 8))
    # It is a bundle's.
    assert replace(fusion, novelty=novelty).novelty == novelty
