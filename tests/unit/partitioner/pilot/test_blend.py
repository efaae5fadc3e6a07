"""Blends of a fitted classifier with the rows of the network's own."""

import numpy as np
import pytest
from numpy.typing import NDArray

from partitioner.pilot.blend import find_blend
from partitioner.pilot.linear import Classifier, HeldOutPredictions, log_softmax

CLASSES, WIDTH, COUNT = 3, 6, 600
OWN = Classifier(weight=2 * np.eye(CLASSES, WIDTH), bias=np.array([0.1, -0.1, 0.0]))
TARGETS = np.arange(COUNT) % CLASSES


def held_out(logits: NDArray[np.float64]) -> HeldOutPredictions:
    return HeldOutPredictions(answers=log_softmax(logits), penalty=1.0, sharpness=1.0)


def noisy(noise: float, seed: int) -> NDArray[np.float64]:
    """Values `[COUNT, CLASSES]`, the right class's a little above the others'."""
    random = np.random.default_rng(seed)
    return np.eye(CLASSES)[TARGETS] + random.normal(0, noise, (COUNT, CLASSES))


def features(noise: float) -> NDArray[np.float64]:
    return np.hstack([noisy(noise, 1), np.random.default_rng(2).normal(size=(COUNT, CLASSES))])


def accuracy(predictions: HeldOutPredictions) -> float:
    return float((predictions.answers.argmax(axis=1) == TARGETS).mean())


def test_own_rows_take_the_place_of_a_classifier_of_too_few_pictures() -> None:
    found, blend = find_blend(held_out(noisy(50.0, 3)), OWN, features(0.2), TARGETS)
    assert blend is not None
    assert blend.fitted_factor == 0
    assert accuracy(found) > 0.95


def test_own_rows_that_know_nothing_have_no_part() -> None:
    fitted = held_out(6 * noisy(0.3, 3))
    found, blend = find_blend(fitted, OWN, features(50.0), TARGETS)
    assert blend is None
    assert found is fitted


def test_both_together_are_taken_where_they_err_on_different_pictures() -> None:
    fitted = held_out(2 * noisy(0.8, 3))
    found, blend = find_blend(fitted, OWN, features(0.8), TARGETS)
    assert blend is not None
    assert blend.own_factor > 0
    assert blend.fitted_factor > 0
    own = held_out(OWN.logits(features(0.8)))
    assert accuracy(found) > max(accuracy(fitted), accuracy(own)) + 0.03


def test_a_blend_is_one_linear_classifier() -> None:
    random = np.random.default_rng(4)
    fitted = Classifier(random.normal(size=(CLASSES, WIDTH)), random.normal(size=CLASSES))
    x = features(0.8)
    left_out = held_out(fitted.logits(x))
    found, blend = find_blend(left_out, OWN, x, TARGETS)
    assert blend is not None
    whole = log_softmax(blend.with_fitted(fitted).logits(x))
    assert whole == pytest.approx(log_softmax(found.answers))
