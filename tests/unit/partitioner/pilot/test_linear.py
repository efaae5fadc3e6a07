"""A linear classifier in closed form: what it predicts for groups left out, and its interval."""

import numpy as np
import pytest
from numpy.typing import NDArray

from partitioner.pilot import linear
from partitioner.pilot.linear import (
    PENALTIES,
    SHARPNESS,
    fit,
    folds,
    interval,
    leave_groups_out,
    log_softmax,
)

CLASSES = 4


def pictures(
    count: int, width: int, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Features `[N, D]` whose first values say the class, mostly, and the classes."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, CLASSES, count)
    return random.normal(size=(count, width)) + 2 * np.eye(CLASSES, width)[targets], targets


def fit_again(
    features: NDArray[np.float64], targets: NDArray[np.int64], groups: NDArray[np.int64]
) -> tuple[NDArray[np.float64], int]:
    """Left-out answers `[P x S, N, C]` by fits without each fold, and the place of the best."""
    z = (features - features.mean(axis=0)) / features.std(axis=0)
    labels, fold_of = np.eye(CLASSES)[targets], folds(targets, groups)
    scores = np.empty((len(PENALTIES), len(z), CLASSES))
    for fold in np.unique(fold_of):
        out = fold_of == fold
        mean, centre = z[~out].mean(axis=0), labels[~out].mean(axis=0)
        centred = z[~out] - mean
        for number, penalty in enumerate(PENALTIES):
            system = centred.T @ centred + penalty * np.eye(z.shape[1])
            weight = np.linalg.solve(system, centred.T @ (labels[~out] - centre))
            scores[number, out] = (z[out] - mean) @ weight + centre
    answers = np.stack([log_softmax(sharp * one) for one in scores for sharp in SHARPNESS])
    losses = -answers[:, np.arange(len(z)), targets].mean(axis=1)
    return answers, int(losses.argmin())


@pytest.mark.parametrize(
    ("width", "size"),
    [(30, 1), (30, 3), (90, 1), (90, 4)],
    ids=["pictures", "scenes", "wide", "wide scenes"],
)
@pytest.mark.parametrize("few", [False, True])
def test_folds_left_out_are_predicted_as_by_fitting_again_without_them(
    width: int, size: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few pictures a part is also unknown to the choice of the penalty for it."""
    monkeypatch.setattr(linear, "_FEW", 60 if few else 59)
    monkeypatch.setattr(linear, "_PARTS", 3)
    features, targets = pictures(60 // size, width)
    groups = np.random.default_rng(1).permutation(np.arange(60) // size)
    features = features[groups] + np.random.default_rng(2).normal(size=(60, width))
    targets = targets[groups]
    found = leave_groups_out(features, targets, groups, CLASSES)
    answers, best = fit_again(features, targets, groups)
    parts = folds(targets, groups) % 3
    for part in range(3):
        inside = parts == part
        chosen = best
        if few:
            rest = ~inside
            chosen = fit_again(features[rest], targets[rest], groups[rest])[1]
        assert found.answers[inside] == pytest.approx(answers[chosen][inside], abs=1e-6)
    assert found.penalty == PENALTIES[best // len(SHARPNESS)]
    assert found.sharpness == SHARPNESS[best % len(SHARPNESS)]


def test_groups_of_several_sizes_are_left_out_whole() -> None:
    # The pictures of a scene are copies of one another: left out singly, each is given away by the
    # others, though its class was drawn.
    features, _ = pictures(30, 40)
    rows = np.repeat(np.arange(30), [2, 4] * 15)
    drawn = np.random.default_rng(3).integers(0, CLASSES, 30)[rows]
    whole = leave_groups_out(features[rows], drawn, rows, CLASSES)
    single = leave_groups_out(features[rows], drawn, np.arange(90), CLASSES)
    right = [(found.answers.argmax(axis=1) == drawn).mean() for found in (whole, single)]
    assert right[0] < 0.5
    assert right[1] > 0.9


def test_a_fold_has_a_group_of_every_class() -> None:
    targets = np.repeat(np.arange(3), 8)
    groups = np.arange(24) // 2
    found = folds(targets, groups)
    assert len(np.unique(found)) == 4
    for fold in range(4):
        assert np.bincount(targets[found == fold]).tolist() == [2, 2, 2]
        assert all((found[groups == group] == fold).all() for group in groups[found == fold])


@pytest.mark.parametrize(
    ("counts", "expected"), [((5, 5), 5), ((12, 200), 12), ((1, 200), 10), ((3, 7), 7), ((1, 1), 2)]
)
def test_folds_are_as_many_as_the_rarest_class_has_pictures_if_these_are_enough(
    counts: tuple[int, int], expected: int
) -> None:
    targets = np.repeat([0, 1], counts)
    found = folds(targets, np.arange(sum(counts)))
    assert set(found) == set(range(expected))


def test_few_pictures_are_not_predicted_worse_than_others_are_answered() -> None:
    """Leaving out one picture alone makes its class rarer: with noise it is never answered."""
    random, right = np.random.default_rng(4), []
    targets = np.repeat(np.arange(10), 5)
    for _ in range(10):
        found = leave_groups_out(random.normal(size=(50, 8)), targets, np.arange(50), 10)
        right.append((found.answers.argmax(axis=1) == targets).mean())
    assert np.mean(right) == pytest.approx(0.1, abs=0.03)


def test_networks_that_are_right_by_chance_are_not_the_surest_together() -> None:
    """Of noise nothing is known: were sharpness chosen by the same pictures, 84 % were right."""
    random, right = np.random.default_rng(5), []
    targets = np.repeat([0, 1], 5)
    for _ in range(12):
        total = sum(
            leave_groups_out(random.normal(size=(10, 30)), targets, np.arange(10), 2)
            .answers
            for _ in range(5)
        )  # fmt: skip
        assert isinstance(total, np.ndarray)
        right.append((total.argmax(axis=1) == targets).mean())
    assert np.mean(right) == pytest.approx(0.5, abs=0.15)


def test_a_classifier_answers_pictures_that_it_has_not_seen() -> None:
    features, targets = pictures(400, 20)
    left_out = leave_groups_out(features[:200], targets[:200], np.arange(200), CLASSES)
    classifier = fit(
        features[:200],
        targets[:200],
        CLASSES,
        penalty=left_out.penalty,
        sharpness=left_out.sharpness,
    )
    answers = log_softmax(classifier.logits(features[200:]))
    expected = (left_out.answers.argmax(axis=1) == targets[:200]).mean()
    measured = (answers.argmax(axis=1) == targets[200:]).mean()
    assert measured == pytest.approx(expected, abs=0.1)
    assert measured > 0.7


def test_more_features_than_pictures_are_fitted_alike() -> None:
    """The two forms of the normal equations give one classifier."""
    features, targets = pictures(60, 59)
    narrow = fit(features, targets, CLASSES, penalty=10.0, sharpness=2.0)
    wide = fit(
        np.hstack([features, np.zeros((60, 10))]), targets, CLASSES, penalty=10.0, sharpness=2.0
    )
    assert wide.weight[:, :59] == pytest.approx(narrow.weight)
    assert wide.bias == pytest.approx(narrow.bias)
    assert not wide.weight[:, 59:].any()


def test_the_interval_of_a_test_is_wider_by_the_tests_own_sampling() -> None:
    many, like = interval(90, 100), interval(90, 100, tested=100)
    assert like[0] < many[0] < many[1] < like[1]
    assert interval(90, 100, tested=10**9) == pytest.approx(many, abs=1e-6)


def test_the_interval_holds_the_share_and_shrinks_with_pictures() -> None:
    low, high = interval(90, 100)
    assert low < 0.9 < high
    closer = interval(900, 1000)
    assert low < closer[0] < 0.9 < closer[1] < high
    assert interval(10, 10)[1] == 1.0
    assert interval(0, 10)[0] == 0.0
