"""Classifiers of labels that do not exclude each other, and what they say of pictures left out."""

import numpy as np
import pytest

from mdp.fusion.fuse import Contribution, fuse, labels_held, sigmoid
from partitioner.export.several_labels import all_right
from partitioner.fusion.several_fit import fit_several_fusion
from partitioner.pilot.choice import choose
from partitioner.pilot.linear import PENALTIES, folds, ridge_weights
from partitioner.pilot.several import calibrate, fit_several, leave_out_several
from partitioner.pilot.truth import OneLabel, SeveralLabels, base_of

COUNT, SIZE = 240, 12


def drawn(seed: int = 0, noise: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, three labels that hold by themselves, and the set of each picture."""
    random = np.random.default_rng(seed)
    held = random.random((COUNT, 3)) < (0.5, 0.3, 0.15)
    directions = random.normal(size=(3, SIZE))
    features = held @ directions + noise * random.normal(size=(COUNT, SIZE))
    return features, held, held @ np.array([1, 2, 4])


def test_a_picture_left_out_is_answered_by_a_fit_to_the_others() -> None:
    features, held, targets = drawn()
    found = leave_out_several(features, held, targets, np.arange(COUNT))
    assert found.penalty in PENALTIES
    assert found.by_label is not None
    fold_of = folds(targets, np.arange(COUNT))
    # Standardised by all pictures, as the closed form is; scale and shift are of other parts.
    x = (features - features.mean(axis=0)) / features.std(axis=0)
    for fold in (0, 3):
        inside = fold_of == fold
        centred = x[~inside] - x[~inside].mean(axis=0)
        weight = np.linalg.solve(
            centred.T @ centred + found.penalty * np.eye(SIZE),
            centred.T @ (held[~inside] - held[~inside].mean(axis=0)),
        )
        score = (x[inside] - x[~inside].mean(axis=0)) @ weight + held[~inside].mean(axis=0)
        logits = found.logits[inside]
        # One line through scores and log-odds of the part, for each label.
        for label in range(3):
            line = np.polyfit(score[:, label], logits[:, label], 1)
            assert np.polyval(line, score[:, label]) == pytest.approx(logits[:, label], abs=0.05)
            assert line[0] > 0


def test_answers_are_calibrated_for_each_label_by_itself() -> None:
    features, held, targets = drawn()
    found = leave_out_several(features, held, targets, np.arange(COUNT))
    shares = 1 / (1 + np.exp(-found.logits))
    assert shares.mean(axis=0) == pytest.approx(held.mean(axis=0), abs=0.03)
    for label in range(3):
        told, has = shares[:, label], held[:, label]
        assert told[has].mean() > told[~has].mean() + 0.2


def test_the_fitted_classifier_gives_log_odds() -> None:
    features, held, targets = drawn()
    left_out = leave_out_several(features, held, targets, np.arange(COUNT))
    assert left_out.by_label is not None
    classifier = fit_several(features, held, left_out.penalty, left_out.by_label)
    plain = ridge_weights(features, held.astype(np.float64), left_out.penalty)
    assert classifier.logits(features) == pytest.approx(
        left_out.by_label.scale * plain.logits(features) + left_out.by_label.shift
    )
    assert ((classifier.logits(features) > 0) == held).mean() > 0.8


def test_scores_that_tell_a_label_without_error_stay_finite() -> None:
    held = np.arange(40)[:, None] < np.array([[20, 4]])
    scale, shift = calibrate(held.astype(np.float64), held)
    assert np.isfinite([scale, shift]).all()
    shares = 1 / (1 + np.exp(-(scale * np.array([[0.0], [1.0]]) + shift)))
    # As sure as so many pictures let it be, and no surer.
    assert (shares[0] < 0.1).all()
    assert ((shares[1] > 0.8) & (shares[1] < 1)).all()


def test_a_score_that_says_nothing_leaves_the_share_of_a_label() -> None:
    held = np.arange(100)[:, None] < np.array([[25, 50]])
    scale, shift = calibrate(np.zeros((100, 2)), held)
    assert 1 / (1 + np.exp(-(scale * 0 + shift))) == pytest.approx([0.25, 0.5], abs=0.01)


def test_evidence_adds_up_and_the_share_of_a_label_counts_once() -> None:
    held = np.array([[True, False]] * 1 + [[False, False]] * 8 + [[False, True]] * 1)
    truth = SeveralLabels.of(held)
    assert truth.base == pytest.approx(base_of(held))
    nothing = np.zeros(held.shape)
    # Of two networks that know nothing, as of one: what is rare is told of nobody.
    assert truth.right(nothing + nothing).tolist() == [False] + [True] * 8 + [False]
    sure = np.where(held, 4.0, -4.0)
    assert truth.right(sure).all()
    assert (truth.losses(sure) < truth.losses(nothing)).all()
    assert (truth.part(slice(0, 2)).losses(sure[:2]) == truth.losses(sure)[:2]).all()


def test_the_network_with_the_least_binary_cross_entropy_is_chosen() -> None:
    _, held, targets = drawn()
    random = np.random.default_rng(3)
    evidence = {
        row: 2 / noise**2 * (np.where(held, 1.0, -1.0) + noise * random.normal(size=held.shape))
        for row, noise in ((0, 3.0), (1, 0.7), (2, 3.0))
    }
    found = choose(
        {"alpha": [0, 1], "beta": [0, 2]},
        lambda _, row: evidence[row],
        targets,
        truth=SeveralLabels.of(held),
    )
    assert found.rows["alpha"] == 1
    assert found.alone["alpha"] > found.alone["beta"]
    assert found.together == pytest.approx(found.alone["alpha"], abs=0.15)
    assert found.without["alpha"] == found.alone["beta"]


def test_without_other_labels_the_choice_is_by_classes() -> None:
    targets = np.arange(30) % 3
    answers = np.log(np.where(np.eye(3)[targets] > 0, 0.8, 0.1))
    plain = choose({"alpha": [0]}, lambda *_: answers, targets)
    told = choose({"alpha": [0]}, lambda *_: answers, targets, truth=OneLabel(targets))
    assert plain == told
    assert plain.together == 1.0


@pytest.mark.parametrize("alike", [0.0, 0.6, 0.9])
def test_what_devices_are_right_on_together_is_predicted_as_it_is_then_fused(alike: float) -> None:
    """Members that err together: their sum would be far too sure of labels that do not hold."""

    def items(seed: int, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
        random = np.random.default_rng(seed)
        held = random.random((count, 4)) < 0.2
        common = random.normal(size=held.shape)
        seen = [
            np.where(held, 1.0, -1.0)
            + 1.3 * (alike**0.5 * common + (1 - alike) ** 0.5 * random.normal(size=held.shape))
            for _ in range(4)
        ]
        return held, [np.log(0.25) + 2 / 1.3**2 * one for one in seen]

    held, known = items(1, 1000)
    later, asked = items(2, 4000)
    choice = choose(
        {str(k): [0] for k in range(4)},
        lambda device, row: known[int(device)] - base_of(held),
        held @ (2 ** np.arange(4)),
        truth=SeveralLabels.of(held),
    )
    weights = fit_several_fusion(dict(enumerate(map(contribution, known))), held)

    def measured(size: int) -> float:
        parts = dict(enumerate(map(contribution, asked)))
        subsets = [one for one in weights.subsets if len(one.members) == size]
        told = [labels_held(sigmoid(fuse(parts, one)), one) for one in subsets]
        return float(np.mean([all_right(one, later) for one in told]))

    assert choice.together == pytest.approx(measured(4), abs=0.045)
    assert np.mean([*choice.without.values()]) == pytest.approx(measured(3), abs=0.045)


def contribution(logits: np.ndarray) -> Contribution:
    return Contribution(None, logits.astype(np.float32))
