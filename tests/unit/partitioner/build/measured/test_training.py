"""Estimates of the time that a training and its check take, and the choice of its weights."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mdp.formats.plan import NetworkSpec, SubModelSpec
from partitioner.build.measured import training
from partitioner.build.measured.fine_tuning import (
    FineTuningRecipe,
    epoch_seconds,
    expected_epoch_s,
    recipe_of,
    side_at,
)
from partitioner.build.measured.training import (
    ENOUGH,
    LEAST_S,
    FittedMember,
    choose_share,
    estimate_training,
    minutes_needed,
    train_networks,
)
from partitioner.data.live_views import Drawing
from partitioner.estimates.catalogue import catalogue
from partitioner.pilot.candidates import FrozenNetwork
from tests.support.clock import Clock

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


def test_calibration_and_the_features_of_the_bundle_are_counted() -> None:
    def budget_s(calibration: int, pictures: int = 400) -> float:
        return estimate_training(0.01, pictures, calibration, PLAIN).training_budget_s(100.0)

    assert budget_s(50) < 100
    assert budget_s(100) < budget_s(50)
    assert budget_s(50, pictures=200) > budget_s(50)


def test_the_minutes_that_are_named_leave_enough_time() -> None:
    found = estimate_training(0.05, 400, 50, PLAIN)
    assert not found.is_enough(LEAST_S)
    assert found.is_enough(found.epoch_s)
    minutes = minutes_needed(found.epoch_s, 5.0, 30.0, share=0.5)
    more_s = 60 * (minutes - 5.0) * 0.5
    assert 30.0 + more_s >= ENOUGH * found.epoch_s > 30.0 + more_s - 30


def test_time_is_shared_out_by_the_expected_time_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by their work alone: a plain ViT does more of it in a second than other networks."""
    shape = SubModelSpec(
        image_size=160, patch_size=16, embed_dim=192, depth=8, num_heads=3, mlp_ratio=4.0
    )
    work = 700_000_000
    lite = FrozenNetwork(
        "lite", NetworkSpec(name="lite", image_size=160, parameters=5_000_000, macs=work)
    )
    chosen = [lite, FrozenNetwork("vit", shape)]
    epochs_s = [expected_epoch_s(one, 10, 500) for one in chosen]
    assert epochs_s[0] == pytest.approx(
        epoch_seconds(work / 2e10, 500, recipe_of(lite, flips=True))
    )
    assert expected_epoch_s(lite, 10, 1000) == pytest.approx(2 * epochs_s[0])
    slots_s = []

    def run_until(self: Any, until_s: float, clock: Any) -> None:
        slots_s.append(until_s - clock.now_s)
        clock.now_s = until_s

    monkeypatch.setattr(training._NetworkTraining, "run_until", run_until)
    clock: Any = Clock()
    inputs: Any = SimpleNamespace(data=SimpleNamespace(labels=list("abcdefghij")))
    nothing: Any = None
    members = {
        row: FittedMember(one, Path("weights"), nothing, nothing, nothing)
        for row, one in enumerate(chosen)
    }
    assert train_networks(inputs, members, {}, nothing, 400.0, nothing, clock) == {}
    assert sum(slots_s) == pytest.approx(300.0)
    assert slots_s[0] / epochs_s[0] == pytest.approx(slots_s[1] / epochs_s[1])

    # A teacher answers each view of its pupil's.
    slots_s.clear()
    taught_s = expected_epoch_s(lite, 10, 500, chosen[1])
    assert taught_s > epochs_s[0]
    train_networks(inputs, members, {0: members[1]}, nothing, 1000.0, nothing, clock)
    assert slots_s[0] / taught_s == pytest.approx(slots_s[1] / epochs_s[1])


@pytest.mark.parametrize(
    ("frozen", "half", "whole", "expected"),
    [
        # Better, and half of the trained weights better than all.
        ((1.0, 1.2, 0.8), (0.5, 0.6, 0.4), (0.6, 0.7, 0.5), 0.5),
        ((1.0, 1.2, 0.8), (0.6, 0.7, 0.5), (0.5, 0.6, 0.4), 1.0),
        # Worse by less than the pictures differ: a mean of 0.1, with a standard error of 0.5.
        ((1.0, 1.0, 1.0), (1.1, 2.0, 0.2), (3.0, 3.0, 3.0), 0.5),
        # Worse on every picture.
        ((1.0, 1.0, 1.0), (1.1, 1.2, 1.1), (1.2, 1.2, 1.2), 0.0),
        ((1.0, 1.0, 1.0), (math.nan, 1.0, 1.0), (math.nan, 1.0, 1.0), 0.0),
        # One picture.
        ((1.0,), (0.5,), (0.6,), 0.5),
        ((1.0,), (1.1,), (1.2,), 0.0),
    ],
)
def test_frozen_weights_stay_where_trained_ones_are_surely_worse(
    frozen: tuple[float, ...], half: tuple[float, ...], whole: tuple[float, ...], expected: float
) -> None:
    losses = {0.0: frozen, 0.5: half, 1.0: whole}
    given = {share: torch.tensor(found).double() for share, found in losses.items()}
    assert choose_share(given) == expected


def test_a_network_of_one_size_is_not_trained_on_smaller_pictures() -> None:
    for name, small in (("levit_128s", False), ("tf_efficientnet_lite0", True)):
        network = catalogue()[name]
        one = FrozenNetwork(name, network.spec(network.image_size, 10))
        recipe = recipe_of(one, flips=True)
        assert (side_at(0.0, network.image_size, recipe) < network.image_size) == small
