"""Training can be stopped anywhere and ends with the same weights; a broken loss stops it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.run.progress import Progress  # noqa: E402
from partitioner.run.settings import MemberSchedule  # noqa: E402
from partitioner.run.step_size import learning_rate  # noqa: E402
from partitioner.training.loop import TrainingDiverged, TrainingStage, fit  # noqa: E402

pytestmark = pytest.mark.torch
QUIET = Progress(io.StringIO())
X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 3.0, 0.5])


Loss = Callable[[Any, Any, int], dict[str, Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        # Dropout, so that the random state matters too.
        return nn.functional.dropout(self.layer(x), 0.1, self.training)[:, 0]


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def stage(path: Path, epochs: int = 6, **more: Any) -> TrainingStage:
    schedule = MemberSchedule(epochs=epochs, batch_size=8, learning_rate=0.05)
    return TrainingStage(
        name="fitting a line", pictures=50, schedule=schedule, seed=3, autocast="fp32",
        checkpoint=path / "checkpoint.pt", **more,
    )  # fmt: skip


def loss_of(stop_at: int | None = None, bad_at: int | None = None) -> Loss:
    def loss(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
        if epoch == stop_at:
            raise KeyboardInterrupt
        error = nn.functional.mse_loss(module(X[index]), Y[index])
        return {"loss": error * float("nan") if epoch == bad_at else error}

    return loss


def test_the_loss_falls_and_every_epoch_is_in_the_curve(tmp_path: Path) -> None:
    module = net()
    curve = fit(module, stage(tmp_path), loss_of(), QUIET)
    assert len(curve) == 6
    assert curve[-1]["loss"] < 0.6 * curve[0]["loss"]
    assert not module.training


def test_a_resumed_training_equals_one_that_never_stopped(tmp_path: Path) -> None:
    whole, parts = net(), net()
    fit(whole, stage(tmp_path / "whole"), loss_of(), QUIET)
    with pytest.raises(KeyboardInterrupt):
        fit(parts, stage(tmp_path / "parts"), loss_of(stop_at=3), QUIET)
    again = Net()
    curve = fit(again, stage(tmp_path / "parts"), loss_of(), QUIET)
    assert len(curve) == 6
    assert torch.equal(whole.layer.weight, again.layer.weight)
    assert torch.equal(whole.layer.bias, again.layer.bias)


def test_a_loss_that_is_no_number_names_where_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    module = net()
    with pytest.raises(
        TrainingDiverged, match="fitting a line: the loss became nan in epoch 3, st"
    ):
        fit(module, stage(tmp_path), loss_of(bad_at=2), QUIET)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert len(kept["curve"]) == 2
    assert all(torch.isfinite(value).all() for value in kept["module"].values())


def test_the_first_epoch_may_be_the_broken_one(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match="in epoch 1, step 1 of 7; nothing had been finish"):
        fit(net(), stage(tmp_path), loss_of(bad_at=0), QUIET)
    assert not (tmp_path / "checkpoint.pt").exists()


def steep(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
    """A finite loss whose gradient is not: the slope of a root at zero."""
    return {"loss": (module.layer.weight * 0).abs().sum().sqrt() + module.layer.bias.sum() * 0}


def test_a_gradient_that_is_no_number_stops_before_the_step(tmp_path: Path) -> None:
    module = net()
    before = module.layer.weight.detach().clone()
    with pytest.raises(TrainingDiverged, match="the gradient's norm became nan in epoch 1, step 1"):
        fit(module, stage(tmp_path), steep, QUIET)
    assert torch.equal(module.layer.weight, before)


def test_a_weight_that_is_no_number_is_not_kept(tmp_path: Path) -> None:
    def poisoned(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
        losses = loss_of()(module, index, epoch)
        if epoch == 1:
            module.unused[0] = float("inf")
        return losses

    module = net()
    module.register_buffer("unused", torch.zeros(2))
    said = r"the weight unused became inf in epoch 2, step 7 of 7; the state after epoch 1 is kept"
    with pytest.raises(TrainingDiverged, match=said):
        fit(module, stage(tmp_path), poisoned, QUIET)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert len(kept["curve"]) == 1
    assert kept["module"]["unused"].isfinite().all()


def damage(path: Path) -> bytes:
    return b"damaged"


def save(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def of_another_shape(path: Path) -> bytes:
    fit(net(), stage(path), loss_of(), QUIET)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    state["module"]["layer.weight"] = torch.zeros(1, 5)
    return save(state)


def with_another_best(path: Path) -> bytes:
    fit(net(), stage(path), loss_of(), QUIET)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    return save({**state, "best": {"layer.weight": torch.zeros(1, 5)}})


def with_code_in_it(path: Path) -> bytes:
    return save(Net())


@pytest.mark.parametrize("content", [damage, of_another_shape, with_another_best, with_code_in_it])
def test_a_broken_checkpoint_is_named_with_what_to_do(
    tmp_path: Path, content: Callable[[Path], bytes]
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content(tmp_path))
    said = r"checkpoint\.pt: not a checkpoint of this run; remove it to start over$"
    with pytest.raises(InputError, match=said):
        fit(net(), stage(tmp_path), loss_of(), QUIET)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"checkpoint\.pt: cannot be written: File exists"):
        fit(net(), stage(tmp_path / "file"), loss_of(), QUIET)


class Scripted:
    """Validation values by epoch, and the weights that were there to validate."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.seen: list[Tensor] = []

    def __call__(self, module: Any) -> float:
        assert not module.training
        self.seen.append(module.layer.weight.detach().clone())
        return self.values[len(self.seen) - 1]


VALUES = [5.0, 3.0, 3.0, 4.0, 2.0, 1.0]


def test_training_stops_when_validation_no_longer_falls_and_takes_the_best(tmp_path: Path) -> None:
    module, validate = net(), Scripted(VALUES)
    said = io.StringIO()
    curve = fit(module, stage(tmp_path, patience=2), loss_of(), Progress(said), validate=validate)
    assert [epoch["validation"] for epoch in curve] == VALUES[:4]
    assert torch.equal(module.layer.weight, validate.seen[1])
    assert not torch.equal(module.layer.weight, validate.seen[3])
    assert "fitting a line: stopped after epoch 4 of 6, epoch 2 was the best\n" in said.getvalue()


def test_without_patience_validation_is_only_written_down(tmp_path: Path) -> None:
    module, validate = net(), Scripted(VALUES[::-1])
    curve = fit(module, stage(tmp_path), loss_of(), QUIET, validate=validate)
    assert [epoch["validation"] for epoch in curve] == VALUES[::-1]
    assert torch.equal(module.layer.weight, validate.seen[-1])
    alone = net()
    fit(alone, stage(tmp_path / "alone"), loss_of(), QUIET)
    assert torch.equal(module.layer.weight, alone.layer.weight)


def test_with_patience_left_at_the_end_the_best_is_taken_too(tmp_path: Path) -> None:
    module, validate = net(), Scripted([5.0, 4.0, 3.0, 1.0, 2.0, 2.0])
    assert len(fit(module, stage(tmp_path, patience=9), loss_of(), QUIET, validate=validate)) == 6
    assert torch.equal(module.layer.weight, validate.seen[3])


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_resumed_training_stops_as_early_and_with_the_same_weights(
    tmp_path: Path, stop_at: int
) -> None:
    whole, again = net(), net()
    curve = fit(
        whole, stage(tmp_path / "whole", patience=2), loss_of(), QUIET, validate=Scripted(VALUES)
    )
    patient = stage(tmp_path / "parts", patience=2)
    with pytest.raises(KeyboardInterrupt):
        fit(net(), patient, loss_of(stop_at), QUIET, validate=Scripted(VALUES))
    rest = Scripted(VALUES[stop_at:])
    resumed = fit(again, patient, loss_of(), QUIET, validate=rest)
    assert [epoch["loss"] for epoch in resumed] == [epoch["loss"] for epoch in curve]
    assert torch.equal(whole.layer.weight, again.layer.weight)
    # Once more after the end: nothing is trained, and the best is still the best.
    once_more = net()
    assert fit(once_more, patient, loss_of(0), QUIET, validate=Scripted([])) == resumed
    assert torch.equal(whole.layer.weight, once_more.layer.weight)


def test_a_validation_that_is_no_number_stops_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match="the validation became nan in epoch 2"):
        fit(net(), stage(tmp_path), loss_of(), QUIET, validate=Scripted([1.0, float("nan")]))


def test_patience_needs_a_validation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience needs `validate`"):
        fit(net(), stage(tmp_path, patience=1), loss_of(), QUIET)


def test_the_curve_holds_the_mean_of_every_loss(tmp_path: Path) -> None:
    def numbered(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
        found = loss_of()(module, index, epoch)
        return {**found, "epoch": torch.tensor(float(epoch)), "first": torch.tensor(0.25)}

    curve = fit(net(), stage(tmp_path), numbered, QUIET)
    assert [epoch["epoch"] for epoch in curve] == pytest.approx([0, 1, 2, 3, 4, 5])
    assert [epoch["first"] for epoch in curve] == pytest.approx([0.25] * 6)
    assert all(epoch["seconds"] > 0 for epoch in curve)


def test_arithmetic_is_as_asked(tmp_path: Path) -> None:
    kinds = []

    def watched(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
        kinds.append(module.layer(X[index]).dtype)
        return loss_of()(module, index, epoch)

    for autocast in ("fp32", "bf16"):
        schedule = MemberSchedule(epochs=1, batch_size=50, learning_rate=0.002)
        path = tmp_path / autocast / "checkpoint.pt"
        asked = TrainingStage(
            name="x", pictures=50, schedule=schedule, seed=3, autocast=autocast, checkpoint=path
        )
        fit(net(), asked, watched, QUIET)
    assert kinds == [torch.float32, torch.bfloat16]


def test_every_picture_is_seen_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}

    def watched(module: Any, index: Any, epoch: int) -> dict[str, Tensor]:
        seen.setdefault(epoch, []).extend(index.tolist())
        return loss_of()(module, index, epoch)

    fit(net(), stage(tmp_path, epochs=2), watched, QUIET)
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(50))
    assert seen[0] != seen[1]


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    assert learning_rate(0, 1, 1.0) == 1.0
