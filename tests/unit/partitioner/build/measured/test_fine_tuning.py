"""Training of a measured network within a given time."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from mdp.errors import InputError
from partitioner.build.measured.fine_tuning import (
    FineTuned,
    FineTuningRecipe,
    fine_tune,
    rate,
    side_at,
)
from partitioner.data.live_views import Drawing, Pictures
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.run.progress import Progress
from partitioner.training.loop import TrainingDiverged, norms_of
from tests.support.clock import TickingClock

pytestmark = pytest.mark.torch
RECIPE = FineTuningRecipe(
    learning_rate=1e-3, classifier_rate=10.0, batch=8, drawing=Drawing(mixed=0.5), epochs=4
)


def pictures() -> Pictures:
    """Dark and bright pictures, 16 of each."""
    targets = torch.arange(32) % 2
    noise = torch.randint(0, 60, (32, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    return Pictures((noise + 150 * targets[:, None, None, None]).to(torch.uint8), targets, 2)


def member() -> FamilyMember:
    torch.manual_seed(0)
    return FamilyMember(Backbone("test_vit", 32, 1, "tokens"), 2)


def train(
    network: FamilyMember, checkpoint: Path, seconds: float, teacher: FamilyMember | None = None
) -> FineTuned:
    return fine_tune(
        network,
        pictures(),
        teacher,
        RECIPE,
        seconds=seconds,
        seed=1,
        checkpoint=checkpoint,
        what="training",
        progress=Progress(),
        clock=TickingClock(),
    )


def test_a_training_ends_with_its_time_or_with_its_epochs(tmp_path: Path) -> None:
    short = train(member(), tmp_path / "short.pt", seconds=12)
    assert short.epochs < RECIPE.epochs
    assert short.seconds <= 13
    whole = train(member(), tmp_path / "whole.pt", seconds=1000)
    assert whole.epochs == RECIPE.epochs
    assert whole.seconds < 100
    assert len(whole.losses) == RECIPE.epochs


def test_the_classes_are_learned(tmp_path: Path) -> None:
    network, seen = member(), pictures()
    train(network, tmp_path / "checkpoint.pt", seconds=1000)
    with torch.inference_mode():
        answers = network.eval()(seen.pixels.float()).bag.argmax(dim=1)
    assert float((answers == seen.targets).float().mean()) > 0.9


def test_statistics_of_batch_norms_stay_as_they_were_given(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = FamilyMember(Backbone("test_efficientnet", 32), 2)
    norms = norms_of(network)
    assert norms
    for number, norm in enumerate(norms):
        norm.running_mean = torch.full((norm.num_features,), 0.01 * number)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train(network, tmp_path / "checkpoint.pt", seconds=1000)
    after = network.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    statistics = {name for name in after if "running" in name or "num_batches" in name}
    assert changed == set(after) - statistics


def test_a_teacher_s_answers_are_learned_from(tmp_path: Path) -> None:
    """One that takes dark for bright, and has the larger share of the targets."""
    teacher = member()
    train(teacher, tmp_path / "teacher.pt", seconds=1000)
    with torch.no_grad():
        for value in (teacher.bag.weight, teacher.bag.bias):
            value.copy_(3 * value.flip(0))
    network, seen = member(), pictures()
    train(network, tmp_path / "checkpoint.pt", 1000, teacher)
    with torch.inference_mode():
        answers = network.eval()(seen.pixels.float()).bag.argmax(dim=1)
    assert float((answers != seen.targets).float().mean()) > 0.9


def test_a_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    checkpoint, first = tmp_path / "checkpoint.pt", member()
    once = train(first, checkpoint, seconds=1000)
    again = member()
    assert train(again, checkpoint, seconds=1000).steps == once.steps
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"checkpoint.pt: not a checkpoint of this build; remove"):
        train(member(), tmp_path / "checkpoint.pt", seconds=10)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    network = member()
    torch.nn.init.constant_(network.bag.weight, float("nan"))
    with pytest.raises(TrainingDiverged, match="the loss became nan in step 1"):
        train(network, tmp_path / "checkpoint.pt", seconds=10)


def test_the_step_size_rises_and_then_falls_to_nothing() -> None:
    rates = [rate(share / 100) for share in range(101)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < peak < 20
    assert rates[0] > 0
    assert rates[-1] == pytest.approx(0)


def test_training_begins_with_small_pictures_and_ends_with_the_network_s_own() -> None:
    recipe = FineTuningRecipe(
        learning_rate=1e-3, classifier_rate=1.0, drawing=Drawing(), small_until=0.5
    )
    sides = [side_at(share / 10, 160, recipe) for share in range(11)]
    assert sides == [96] * 5 + [160] * 6
    assert side_at(0.0, 160, RECIPE) == 160
    assert side_at(0.0, 32, recipe) == 32
