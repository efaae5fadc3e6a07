"""Estimates of the time that a training and its check take."""

import pytest

pytest.importorskip("torch")

from partitioner.build.measured.fine_tuning import FineTuningRecipe, epoch_seconds
from partitioner.build.measured.training import ENOUGH, LEAST_S, estimate_training
from partitioner.data.live_views import Drawing

pytestmark = pytest.mark.torch
PLAIN = FineTuningRecipe(learning_rate=1e-4, classifier_rate=1.0, drawing=Drawing(), step=3.0)
SMALL_FIRST = FineTuningRecipe(
    learning_rate=1e-3, classifier_rate=1.0, drawing=Drawing(), small_until=0.5, small=0.5, step=3.0
)


def test_an_epoch_takes_its_steps_and_the_forward_passes_of_the_teacher() -> None:
    assert epoch_seconds(0.01, 500, PLAIN) == pytest.approx(15)
    assert epoch_seconds(0.01, 500, PLAIN, teacher_share=2.0) == pytest.approx(25)
    # Half of the time in pictures of half the side.
    assert epoch_seconds(0.01, 500, SMALL_FIRST) == pytest.approx(15 * 0.75)


def test_norms_and_calibration_are_counted() -> None:
    def budget_s(calibration: int, *, norms: bool) -> float:
        found = estimate_training(0.01, 400, calibration, PLAIN, norms=norms)
        return found.training_budget_s(100.0)

    assert budget_s(50, norms=False) < 100
    assert budget_s(100, norms=False) < budget_s(50, norms=False)
    assert budget_s(50, norms=True) < budget_s(50, norms=False)


def test_the_minutes_that_are_named_leave_enough_time() -> None:
    found = estimate_training(0.05, 400, 50, PLAIN, norms=False)
    assert not found.is_enough(LEAST_S)
    assert found.is_enough(found.epoch_s)
    minutes = found.minutes_needed(5.0, 30.0, share=0.5)
    more_s = 60 * (minutes - 5.0) * 0.5
    assert 30.0 + more_s >= ENOUGH * found.epoch_s > 30.0 + more_s - 30
