"""The curve of accuracy against pictures, and its way on to twice as many."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from partitioner.pilot.blend import Blend
from partitioner.pilot.learning_curve import (
    CurveMember,
    LearningCurve,
    describe,
    extrapolate,
    learning_curve,
)
from partitioner.pilot.linear import Classifier, fit, leave_groups_out, log_softmax

CLASSES, WIDTH = 4, 60
Index = NDArray[np.int64]


def pictures(each: int, seed: int = 0, distance: float = 3.0) -> tuple[NDArray[np.float64], Index]:
    """Features `[N, D]` of `each` pictures of a class, some values of which say the class."""
    random = np.random.default_rng(seed)
    targets = np.tile(np.arange(CLASSES), each)
    features = (
        random.normal(size=(len(targets), WIDTH)) + distance * np.eye(CLASSES, WIDTH)[targets]
    )
    return features, targets


def member(features: NDArray[np.float64], rows: Index | None = None) -> CurveMember:
    seen = np.arange(len(features)) if rows is None else rows
    return CurveMember(features, seen, penalty=100.0, sharpness=8.0)


def curve_of(features: NDArray[np.float64], targets: Index) -> LearningCurve:
    found = learning_curve([member(features)], targets, np.arange(len(targets)), CLASSES)
    assert found is not None
    return found


def test_what_the_networks_own_rows_know_is_not_gained_by_more_pictures() -> None:
    features, targets = pictures(12, distance=1.5)
    own = Classifier(np.eye(CLASSES, WIDTH), np.zeros(CLASSES))
    groups = np.arange(len(targets))
    blended = replace(member(features), blend=Blend(own, own_factor=1.0, fitted_factor=0.0))
    known = learning_curve([blended], targets, groups, CLASSES)
    assert known is not None
    share = float((own.logits(features).argmax(axis=1) == targets).mean())
    assert known.measured == pytest.approx((share,) * 3)
    assert known.gain < curve_of(features, targets).gain


def test_twice_as_many_pictures_bring_about_what_was_predicted() -> None:
    asked, right = pictures(500, seed=99)

    def accuracy(each: int) -> float:
        found = []
        for seed in range(8):
            known, labels = pictures(each, seed)
            classifier = fit(known, labels, CLASSES, penalty=100.0, sharpness=8.0)
            found.append((classifier.logits(asked).argmax(axis=1) == right).mean())
        return float(np.mean(found))

    gained = accuracy(48) - accuracy(24)
    curves = [curve_of(*pictures(24, seed)) for seed in range(8)]
    assert gained > 0.05
    assert np.mean([curve.gain for curve in curves]) == pytest.approx(gained, rel=0.4)
    assert sum(curve.low <= gained <= curve.high for curve in curves) >= 7
    assert all(curve.measured[0] < curve.measured[-1] for curve in curves)
    assert {curve.groups for curve in curves} == {24.0}


def test_every_part_is_answered_by_classifiers_of_other_parts_alone() -> None:
    """Pictures that are copies within a scene give nothing away, as scenes are not cut."""
    features, _ = pictures(20)
    rows = np.repeat(np.arange(80), 3)
    drawn = np.random.default_rng(1).integers(0, CLASSES, 80)[rows]
    single = curve_of(features[rows], drawn)
    whole = learning_curve([member(features[rows])], drawn, rows, CLASSES)
    assert whole is not None
    assert max(whole.measured) < 0.45
    assert single.measured[-1] > 0.7
    assert whole.gain < 0.1


def test_members_answer_together_each_its_own_pictures() -> None:
    """Two cameras of one scene: a classifier of all pictures, the sum of what both say."""
    left, targets = pictures(24, seed=1, distance=1.0)
    right, _ = pictures(24, seed=2, distance=1.0)
    features, scenes = np.concatenate([left, right]), np.tile(np.arange(96), 2)
    both = np.tile(targets, 2)
    cameras = [member(features, np.arange(96) + 96 * side) for side in (0, 1)]
    together = learning_curve(cameras, both, scenes, CLASSES)
    alone = [learning_curve([camera], both, scenes, CLASSES) for camera in cameras]
    assert together is not None
    assert all(one is not None and one.measured < together.measured for one in alone)
    assert together.groups == 24
    # By hand: the first quarter of each class asks the other three, which is one of four such fits.
    one = learning_curve(cameras[:1], both, scenes, CLASSES)
    order = np.empty(96, dtype=np.int64)
    for target in range(CLASSES):
        order[targets == target] = (np.arange(24) + target) % 4
    wrong = []
    for part in range(4):
        fitted = np.tile(order != part, 2)
        classifier = fit(features[fitted], both[fitted], CLASSES, penalty=100.0, sharpness=8.0)
        answers = log_softmax(classifier.logits(left[order == part]))
        wrong += (answers.argmax(axis=1) != targets[order == part]).tolist()
    assert one is not None
    assert one.measured[-1] == pytest.approx(1 - np.mean(wrong))


def test_a_class_of_a_single_picture_does_not_count() -> None:
    features, targets = pictures(16)
    rare = targets.copy()
    rare[np.flatnonzero(targets == 3)[1:]] = 2
    kept = np.flatnonzero((targets != 3) | (rare == 3))
    found = learning_curve([member(features[kept])], rare[kept], kept, CLASSES)
    assert found is not None
    assert found.groups == 16
    assert found.measured[-1] > 0.6


@pytest.mark.parametrize("each", [1, 2, 4])
def test_too_few_pictures_of_every_class_give_no_curve(each: int) -> None:
    features, targets = pictures(each)
    found = learning_curve([member(features)], targets, np.arange(len(targets)), CLASSES)
    assert found is None
    assert describe(found, "scenes") == (
        "twice as many scenes: not predicted, expected 5 scenes of a class"
    )


def test_five_scenes_of_a_class_are_enough() -> None:
    features, targets = pictures(5, distance=4.0)
    curve = curve_of(features, targets)
    assert curve.groups == 5
    assert 0 <= curve.low <= curve.gain <= curve.high <= 1


def test_a_power_law_is_followed() -> None:
    """Errors of 0.4 / sqrt(share) for shares of 1/4, 1/2 and 3/4: 0.4 with all, 0.283 with two."""
    share = np.array([0.25, 0.5, 0.75])
    errors = np.tile(0.2 / np.sqrt(share)[:, None], (1, 500))
    gain, low, high = extrapolate(errors)
    assert gain == pytest.approx(0.2 * (1 - 2**-0.5))
    assert low < gain < high
    assert gain - low == pytest.approx(high - gain)
    random = np.random.default_rng(0)
    drawn = (random.random((3, 500)) < errors).astype(float)
    few, many = extrapolate(drawn[:, :60]), extrapolate(np.tile(drawn, (1, 10)))
    assert few[2] - few[1] > many[2] - many[1]


@pytest.mark.parametrize("errors", [np.zeros((3, 40)), np.full((3, 40), 0.3)])
def test_errors_that_do_not_fall_promise_nothing(errors: NDArray[np.float64]) -> None:
    gain, low, high = extrapolate(errors)
    assert (gain, low) == (0.0, 0.0)
    assert high < 0.01


def test_errors_that_rise_promise_nothing() -> None:
    wrong = np.zeros((3, 100))
    wrong[1, :2] = wrong[2, :5] = 1
    assert extrapolate(wrong)[:2] == (0.0, 0.0)


def test_one_line_says_the_gain_and_its_range() -> None:
    curve = LearningCurve(groups=20, measured=(0.7, 0.8, 0.83), gain=0.0153, low=0.005, high=0.0251)
    assert describe(curve, "scenes") == "with twice as many scenes about +1.5 points (0.5 to 2.5)"
    flat = replace(curve, gain=0.001, low=0.0, high=0.004)
    assert describe(flat, "pictures") == "with twice as many pictures no more than +0.4 points"


def test_predictions_left_out_are_needed_for_nothing_else() -> None:
    """The penalty and sharpness of a pilot's fit serve as they are."""
    features, targets = pictures(12)
    found = leave_groups_out(features, targets, np.arange(len(targets)), CLASSES)
    fitted = CurveMember(features, np.arange(len(features)), found.penalty, found.sharpness)
    assert learning_curve([fitted], targets, np.arange(len(targets)), CLASSES) is not None
