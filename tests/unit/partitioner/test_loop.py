"""Training can be stopped anywhere and ends with the same weights; a broken loss stops it."""

import io
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.loop import Stage, TrainingDiverged, derived_seed, fit, learning_rate  # noqa: E402
from partitioner.progress import Progress  # noqa: E402
from partitioner.settings import MemberSchedule  # noqa: E402

pytestmark = pytest.mark.torch
QUIET = Progress(io.StringIO())
X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 3.0, 0.5])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Dropout, so that the random state matters too.
        return nn.functional.dropout(self.layer(x), 0.1, self.training)[:, 0]


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def stage(path: Path, epochs: int = 6) -> Stage:
    schedule = MemberSchedule(epochs=epochs, batch_size=8, learning_rate=0.05)
    return Stage(
        name="fitting a line", pictures=50, schedule=schedule, seed=3, autocast="fp32",
        checkpoint=path / "checkpoint.pt",
    )  # fmt: skip


def loss_of(stop_at: int | None = None, bad_at: int | None = None):
    def loss(module: nn.Module, index, epoch: int) -> dict[str, torch.Tensor]:
        if epoch == stop_at:
            raise KeyboardInterrupt
        error = nn.functional.mse_loss(module(X[index]), Y[index])
        return {"loss": error * float("nan") if epoch == bad_at else error}

    return loss


def test_the_loss_falls_and_every_epoch_is_in_the_curve(tmp_path: Path):
    module = net()
    curve = fit(module, stage(tmp_path), loss_of(), QUIET)
    assert len(curve) == 6
    assert curve[-1]["loss"] < 0.6 * curve[0]["loss"]
    assert not module.training


def test_a_resumed_training_equals_one_that_never_stopped(tmp_path: Path):
    whole, parts = net(), net()
    fit(whole, stage(tmp_path / "whole"), loss_of(), QUIET)
    with pytest.raises(KeyboardInterrupt):
        fit(parts, stage(tmp_path / "parts"), loss_of(stop_at=3), QUIET)
    again = Net()
    curve = fit(again, stage(tmp_path / "parts"), loss_of(), QUIET)
    assert len(curve) == 6
    assert torch.equal(whole.layer.weight, again.layer.weight)
    assert torch.equal(whole.layer.bias, again.layer.bias)


def test_a_loss_that_is_no_number_names_where_and_keeps_the_last_good_state(tmp_path: Path):
    module = net()
    with pytest.raises(
        TrainingDiverged, match="fitting a line: the loss became nan in epoch 3, st"
    ):
        fit(module, stage(tmp_path), loss_of(bad_at=2), QUIET)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert len(kept["curve"]) == 2
    assert all(torch.isfinite(value).all() for value in kept["module"].values())


def test_a_damaged_checkpoint_is_named(tmp_path: Path):
    (tmp_path / "checkpoint.pt").write_bytes(b"damaged")
    module = net()
    with pytest.raises(InputError, match=r"checkpoint\.pt: not a checkpoint of this run"):
        fit(module, stage(tmp_path), loss_of(), QUIET)


def test_learning_rate_rises_then_falls():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    assert learning_rate(0, 1, 1.0) == 1.0


def test_seeds_differ_by_purpose():
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(0, "a"), derived_seed(1, "a"), derived_seed(0, "b")}) == 3
