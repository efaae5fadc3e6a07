"""Shares of answers with several labels an item."""

import numpy as np
import pytest

from mdp.fusion.fuse import Contribution
from mdp.testing.bundles import several_weights
from partitioner.export.several_labels import (
    all_right,
    label_shares,
    labels_calibration_error,
    measure_several,
    own_accuracy,
)

HELD = np.array([[1, 0], [1, 1], [0, 1], [0, 0]], dtype=bool)
TOLD = np.array([[1, 0], [1, 0], [0, 0], [1, 0]], dtype=bool)


def test_an_item_is_right_where_all_of_its_labels_are() -> None:
    assert all_right(TOLD, HELD) == 0.25
    assert own_accuracy(np.where(TOLD, 3.0, -3.0).astype(np.float32), HELD) == 0.25


def test_precision_and_recall_of_each_label() -> None:
    found = label_shares((0, 1), TOLD, HELD)
    assert found.precision[0] == pytest.approx(2 / 3)
    assert found.precision[1] is None, "the second is never told"
    assert found.recall == (1.0, 0.0)
    assert found.each == pytest.approx(5 / 8)


def test_calibration_error_is_of_every_label_by_itself() -> None:
    even = np.full((4, 2), 0.5, np.float32)
    assert labels_calibration_error(even, HELD, 15) == pytest.approx(0.0)
    sure = np.where(HELD, 0.9, 0.9).astype(np.float32)
    assert labels_calibration_error(sure, HELD, 15) == pytest.approx(0.4)


def test_every_subset_is_measured_by_each_rule() -> None:
    right = Contribution(None, np.where(HELD, 6.0, -6.0).astype(np.float32))
    wrong = Contribution(None, np.where(HELD, -1.0, 1.0).astype(np.float32))
    subsets, labels = measure_several(
        {0: right, 1: wrong}, several_weights([(0,), (1,), (0, 1)], 2), HELD, 15
    )
    assert [one.members for one in subsets] == [one.members for one in labels]
    assert [one.stacked for one in subsets] == [1.0, 0.25, 1.0]
    assert [one.bagged for one in subsets] == [1.0, 0.0, 1.0]
    assert all(one.boosted is None for one in subsets)
    assert labels[0].recall == (1.0, 1.0)
