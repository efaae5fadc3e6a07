"""Trainings of a tiny network by one process, or by several that have torchrun's variables.

Every process of a case writes what it ended with into the folder, for the test to compare.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from mdp.errors import InputError, MDPError
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule
from partitioner.training.distributed import first_then_others, from_first, join_group, together
from partitioner.training.loop import BatchLoss, Index, TrainingStage, Validate, fit
from partitioner.training.world import world

PICTURES = 50
X = torch.randn(PICTURES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X @ torch.linspace(-1.0, 1.0, 6)) + X[:, 0]


class Net(nn.Module):
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 6]` -> `[B]`, the mean of the branches."""
        return torch.stack([branch(x)[:, 0] for branch in self.branches]).mean(dim=0)


class Normed(nn.Module):
    """A batch norm, and a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 6]` -> `[B]`."""
        return self.last(self.norm(x))[:, 0]  # type: ignore[no-any-return]


def stage(folder: Path, *, epochs: int = 4, batch_size: int = 8, **more: Any) -> TrainingStage:
    """A training of the tiny network; 50 pictures in batches of 7 or 8 make uneven shares."""
    schedule = MemberSchedule(epochs=epochs, batch_size=batch_size, learning_rate=0.01)
    return TrainingStage(
        name="fitting", pictures=PICTURES, schedule=schedule, seed=3, autocast="fp32",
        checkpoint=folder / "checkpoint.pt", **more,
    )  # fmt: skip


def plain(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
    """Squared error, under two names."""
    error = (network(X[index]) - Y[index]).square().mean()
    return {"loss": error, "half": error / 2}


def stop_at(epoch_to_stop: int) -> BatchLoss:
    """Like `plain`, until someone presses Ctrl-C."""

    def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        if epoch == epoch_to_stop:
            raise KeyboardInterrupt
        return plain(network, index, epoch)

    return loss_of


def break_for(picture: int, epoch_to_break: int) -> BatchLoss:
    """Like `plain`, but no number for one picture, which only one process gets to see."""

    def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        losses = plain(network, index, epoch)
        bad = epoch == epoch_to_break and picture in index
        return {name: loss * float("nan") if bad else loss for name, loss in losses.items()}

    return loss_of


def play_values(values: list[float]) -> Validate:
    """One value per epoch; asked for more than once an epoch it would run out."""
    left = iter(values)
    return lambda network: next(left)


def train_and_write(
    out: Path,
    stage: TrainingStage,
    loss_of: BatchLoss = plain,
    validate: Validate | None = None,
    network: Callable[[], nn.Module] = Net,
) -> None:
    """Train and write weights and curve, or the error, of this process."""
    module, rank = network(), world().rank
    report: dict[str, object] = {"curve": [], "error": "", "kind": ""}
    try:
        report["curve"] = fit(module, stage, loss_of, Progress(io.StringIO()), validate=validate)
    except MDPError as error:
        report |= {"error": str(error), "kind": type(error).__name__, "code": error.exit_code}
    out.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), out / f"weights-{rank}.pt")
    (out / f"report-{rank}.json").write_bytes(msgspec.json.encode(report))


def _wait_for_others(out: Path) -> None:
    """Messages of the processes to each other without training anything."""
    here, said = world(), []
    with first_then_others():
        path = out / "cache"
        if path.exists():
            said.append(f"read {path.read_text()}")
        else:
            path.write_text("written")
            said.append("wrote")
    for failing in range(here.size):
        try:
            with together():
                if here.rank == failing:
                    raise InputError(f"only {failing} knows")
        except MDPError as error:
            said.append(f"{type(error).__name__}: {error}")
    try:
        with first_then_others():
            said.append("ran")
            raise InputError("no room")
    except MDPError as error:
        said.append(f"{type(error).__name__}: {error}, {error.exit_code}")
    said.append(str(from_first(lambda: 0.25 + here.rank)))
    (out / f"said-{here.rank}.json").write_bytes(msgspec.json.encode(said))


def cases(folder: Path) -> dict[str, Callable[[], None]]:
    """Everything that is compared, by name."""

    def case(name: str, **more: Any) -> tuple[Path, TrainingStage]:
        out = folder / name / str(world().size)
        return out, stage(out, **more)

    def resume() -> None:
        out = folder / "resumed"
        train_and_write(out, stage(out))

    return {
        "plain": lambda: train_and_write(*case("plain")),
        # So few pictures a process that a batch norm would see one of them alone.
        "normed": lambda: train_and_write(*case("normed"), network=Normed),
        "alone": lambda: train_and_write(*case("alone", batch_size=2), network=Normed),
        "empty": lambda: train_and_write(*case("empty", epochs=1, batch_size=1)),
        "resumed": resume,
        "early": lambda: train_and_write(
            *case("early", epochs=9, patience=2), plain, play_values([3.0, 1.0, 2.0, 1.0])
        ),
        "broken": lambda: train_and_write(*case("broken"), break_for(11, 2)),
        "damaged": lambda: train_and_write(*case("damaged")),
    }


def main(folder: Path) -> None:
    """Run all cases in processes that have torchrun's variables."""
    torch.set_num_threads(1)
    with join_group():
        for run in cases(folder).values():
            run()
        _wait_for_others(folder)
