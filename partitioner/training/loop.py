"""Train one network for some epochs, with a checkpoint after each, from which it can resume.

A stage's synchroniser says what this process computes of a batch and what it exchanges with
others. Under torchrun every process takes its share of each batch. The batches, and so the outcome,
are those of one process: see tests/integration/commands/test_torchrun.py for how closely.
"""

import copy
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdp.errors import InputError, MDPError
from partitioner.run.curves import Curve
from partitioner.run.progress import Progress
from partitioner.run.settings import Autocast, Schedule
from partitioner.run.step_size import learning_rate
from partitioner.training.checkpoint import TrainingState, restore, save
from partitioner.training.compute import training_device
from partitioner.training.distributed import (
    all_agree,
    common_error,
    first_then_others,
    on_first,
    together,
)
from partitioner.training.synchroniser import EveryStep, Synchroniser

#: Pictures, at most, from which the statistics of batch norms are taken at the end.
STATISTICS = 2048

M = TypeVar("M", bound=nn.Module)
Index = NDArray[np.int64]
#: (network to run, indices of a batch's pictures, epoch) -> named losses, each a mean over these
#: pictures; `loss` is minimised. Under torchrun the pictures are this process's share of a batch
#: and the network is wrapped; torch's random state is then the same on every process.
BatchLoss = Callable[[nn.Module, Index, int], dict[str, Tensor]]
#: Loss of a network in evaluation mode on pictures that it is not trained on.
Validate = Callable[[nn.Module], float]
#: Called after each own step, with its loss and the number of own pictures in it.
StepReport = Callable[[float, int], None]


class TrainingDiverged(MDPError):
    """A loss, a gradient or a weight is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStage:
    """One network's training: its name in messages, pictures, schedule and checkpoint."""

    name: str
    pictures: int
    schedule: Schedule
    seed: int
    autocast: Autocast
    checkpoint: Path
    #: Epochs without a better validation after which to stop, with the best epoch's weights;
    #: 0 trains to the end and takes the last ones.
    patience: int = 0
    #: Used for one training, which it is made for.
    sync: Synchroniser = field(default_factory=EveryStep)


@dataclass(frozen=True, slots=True)
class _Training:
    """The constants of all steps."""

    module: nn.Module
    #: The module, wrapped where several processes train it.
    network: nn.Module
    optimiser: torch.optim.Optimizer
    stage: TrainingStage
    loss_of: BatchLoss
    device: torch.device

    @property
    def batches(self) -> int:
        """Steps per epoch."""
        return self.stage.sync.parts * math.ceil(
            self.stage.pictures / self.stage.schedule.batch_size
        )


def derive_seed(seed: int, *what: object) -> int:
    """The seed of one purpose, 0 to 2**63 - 1."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def train_stage(
    stage: TrainingStage,
    prepare: Callable[[], tuple[M, BatchLoss, Validate | None]],
    keep: Callable[[M, Curve], None],
    progress: Progress,
) -> M:
    """Train one network on every process; with 0 epochs it stays as prepared.

    `prepare` runs on the first process, which fills caches, then on the others; `keep` writes the
    outcome, on the first.
    """
    crew = stage.sync.crew
    with first_then_others(crew):
        module, loss_of, validate = prepare()
    curve: Curve = []
    if stage.schedule.epochs:
        curve = fit(module, stage, loss_of, progress, validate=validate)
    on_first(lambda: keep(module, curve), crew)
    on_first(lambda: stage.checkpoint.unlink(missing_ok=True), crew)
    return module


def fit(
    module: nn.Module,
    stage: TrainingStage,
    loss_of: BatchLoss,
    progress: Progress,
    *,
    validate: Validate | None = None,
) -> Curve:
    """Train `module` in place, on the training device, from its last finished epoch to the end.

    Every epoch's order of pictures follows from the seed and the epoch alone, so that a resumed
    training ends with the same weights as one that was never stopped. `validate` is asked after
    every epoch, by the first process. Raises TrainingDiverged, and InputError for a checkpoint
    that cannot be resumed.
    """
    if stage.patience and validate is None:
        raise ValueError("patience needs `validate`")
    device = training_device()
    check_batches(module, stage)
    module.to(device)
    optimiser = _new_optimiser(module, stage)
    state = _take_up(module, optimiser, stage)
    network = stage.sync.wrap(module, optimiser, device)
    training = _Training(module, network, optimiser, stage, loss_of, device)
    _train(training, state, progress, validate)
    if state.best is not None:
        module.load_state_dict(state.best)
    _settle_statistics(training)
    return state.curve


def take_steps(
    module: nn.Module, stage: TrainingStage, loss_of: BatchLoss, report: StepReport
) -> None:
    """Train `module` for one epoch as `fit` does, without a checkpoint, to see how long steps take.

    `report` is called before an own step's parameters are averaged.
    """
    device = training_device()
    check_batches(module, stage)
    module.to(device)
    optimiser = _new_optimiser(module, stage)
    network = stage.sync.wrap(module, optimiser, device)
    stage.sync.begin(0)
    _epoch(_Training(module, network, optimiser, stage, loss_of, device), 0, report)


def _new_optimiser(module: nn.Module, stage: TrainingStage) -> torch.optim.Optimizer:
    groups = parameter_groups(module, stage.schedule.weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, fused=True)


def check_batches(module: nn.Module, stage: TrainingStage) -> None:
    """Raise InputError where a batch norm would have the statistics of one picture."""
    batches = stage.sync.parts * math.ceil(stage.pictures / stage.schedule.batch_size)
    least = stage.pictures // batches // stage.sync.crew.size
    if least < 2 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        raise common_error(
            InputError(
                f"{stage.name}: expected batches of at least 2 pictures for each process, for its "
                f"batch norms, got {least}: give a larger batch size"
            ),
            stage.sync.crew,
        )


def _take_up(
    module: nn.Module, optimiser: torch.optim.Optimizer, stage: TrainingStage
) -> TrainingState:
    """The state of the last finished epoch, the same on every process."""
    crew = stage.sync.crew
    with together(crew):
        state = restore(module, optimiser, stage.checkpoint)
    if not all_agree(len(state.curve), crew):
        raise common_error(
            InputError(f"{stage.checkpoint}: not the same file on every machine of this training"),
            crew,
        )
    return state


def _train(
    training: _Training, state: TrainingState, progress: Progress, validate: Validate | None
) -> None:
    stage, curve = training.stage, state.curve
    epochs, per_epoch = stage.schedule.epochs, training.batches
    begin = stage.sync.begin(len(curve))
    # Epochs that others trained: they count as none of the best.
    curve += [{} for _ in range(begin - len(curve))]
    if begin < len(curve):  # others have begun again from an earlier one
        if _best_epoch(curve) >= begin:
            # Its weights are of an epoch that counts no more.
            state.best = None
            for one in curve[:begin]:
                one.pop("validation", None)
        del curve[begin:]
    with progress.task(stage.name, epochs * per_epoch, done=len(curve) * per_epoch) as advance:
        for epoch in range(len(curve), epochs):
            if stage.patience and stage.sync.all_stop(epoch - _best_epoch(curve) > stage.patience):
                break

            own = 0

            def report(loss: float, pictures: int, epoch: int = epoch) -> None:
                nonlocal own
                own += 1
                progress.count(pictures)
                advance(1, f"epoch {epoch + 1} of {epochs}, loss {loss:.3f}")

            curve.append(_epoch(training, epoch, report))
            if own < per_epoch:
                advance(per_epoch - own, "")
            _check_weights(training, epoch)
            if validate is not None:
                curve[-1]["validation"] = _validation(training, epoch, validate)
            if stage.patience and _best_epoch(curve) == epoch:
                state.keep_best(training.module)
            on_first(
                lambda: save(training.module, training.optimiser, state, stage.checkpoint),
                stage.sync.crew,
            )
    if len(curve) < epochs:
        progress.note(
            f"{stage.name}: stopped after epoch {len(curve)} of {epochs}, "
            f"epoch {_best_epoch(curve) + 1} was the best"
        )


def _best_epoch(curve: Curve) -> int:
    """The first epoch, from 0, with the lowest validation; -1 before the first."""
    values = [epoch.get("validation", math.inf) for epoch in curve]
    return values.index(min(values)) if values else -1


def _epoch(training: _Training, epoch: int, report: StepReport) -> dict[str, float]:
    started_s = time.monotonic()
    stage, batches = training.stage, training.batches
    training.module.train()
    torch.manual_seed(derive_seed(stage.seed, stage.name, epoch))
    order = torch.randperm(stage.pictures).numpy()
    steps, peak = stage.schedule.epochs * batches, stage.schedule.learning_rate or 0.0
    sums: dict[str, float] = {}
    for number, share, part in stage.sync.shares(np.array_split(order, batches), epoch):
        for group in training.optimiser.param_groups:
            group["lr"] = learning_rate(epoch * batches + number, steps, peak)
        # Uneven shares consume the random state unevenly: it is seeded anew for every batch.
        torch.manual_seed(derive_seed(stage.seed, stage.name, epoch, number))
        losses = _step(training, share, part, epoch, number)
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss / batches
        pictures = len(share) if part else 0
        report(losses["loss"], pictures)
        stage.sync.after_step(pictures)
    settled = stage.sync.settle(torch.tensor(list(sums.values()), dtype=torch.float64))
    means = dict(zip(sums, settled.tolist(), strict=True))
    return {**means, "seconds": time.monotonic() - started_s}


def _settle_statistics(training: _Training) -> None:
    """Recompute the statistics of batch norms with the final weights, on every process alike."""
    module, stage = training.module, training.stage
    seed = derive_seed(stage.seed, stage.name, "statistics")
    rows = np.random.default_rng(seed).permutation(stage.pictures)[:STATISTICS]

    def see() -> None:
        torch.manual_seed(seed)
        with torch.autocast(training.device.type, torch.bfloat16, enabled=stage.autocast == "bf16"):
            for index in np.array_split(rows, math.ceil(len(rows) / stage.schedule.batch_size)):
                training.loss_of(module, index, stage.schedule.epochs - 1)

    retake_statistics(module, see)


def norms_of(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms of a network that keep statistics."""
    return [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]


def retake_statistics(module: nn.Module, see: Callable[[], None]) -> None:
    """Replace the statistics of batch norms by those of the batches that `see` runs.

    Moving averages lag behind weights that move, which shows in short trainings (docs/lab-log.md).
    After Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021 (arXiv 2105.07576). `module` is in
    evaluation mode afterwards.
    """
    norms = norms_of(module)
    module.eval()
    if not norms:
        return
    before = [(norm.momentum, copy.deepcopy(norm.state_dict())) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
        norm.train()
    with torch.no_grad():
        see()
    for norm, (momentum, known) in zip(norms, before, strict=True):
        norm.momentum = momentum
        if not norm.num_batches_tracked:  # in a part of the network that no batch ran
            norm.load_state_dict(known)
    module.eval()


def _step(
    training: _Training, share: Index, part: float, epoch: int, number: int
) -> dict[str, float]:
    """One step on the pictures `share`, which are `part` of its batch; returns the named losses.

    These are means over the pictures of every process that takes the step.
    """
    stage = training.stage
    training.optimiser.zero_grad(set_to_none=True)
    with torch.autocast(training.device.type, torch.bfloat16, enabled=stage.autocast == "bf16"):
        losses = training.loss_of(training.network, share, epoch)
    # Gradients are averaged over processes; this makes it the mean over the batch's pictures.
    (losses["loss"] * (part * stage.sync.crew.size)).backward()  # type: ignore[no-untyped-call]
    norm = stage.sync.update(training.optimiser)
    weighted = torch.stack([loss.detach().float() * part for loss in losses.values()])
    means = dict(zip(losses, stage.sync.step_losses(weighted).tolist(), strict=True))
    for what, value in (("loss", means["loss"]), ("gradient's norm", norm)):
        if not math.isfinite(value):
            raise _divergence(training, what, value, epoch, number)
    return means


def _check_weights(training: _Training, epoch: int) -> None:
    """Raise TrainingDiverged for weights that are not finite, before they are kept."""
    for name, value in training.module.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            odd = float(value[~value.isfinite()].flatten()[0])
            raise _divergence(training, f"weight {name}", odd, epoch, training.batches - 1)


def _divergence(training: _Training, what: str, value: float, epoch: int, number: int) -> MDPError:
    """The error, which every process raises in the same step."""
    stage = training.stage
    kept = f"the state after epoch {epoch} is kept in {stage.checkpoint}" if epoch else ""
    return common_error(
        TrainingDiverged(
            f"{stage.name}: the {what} became {value} in epoch {epoch + 1}, step {number + 1} of "
            f"{training.batches}; {kept or 'nothing had been finished before'}; "
            "try a smaller learning rate in another run folder"
        ),
        stage.sync.crew,
    )


def _validation(training: _Training, epoch: int, validate: Validate) -> float:
    training.module.eval()
    with torch.no_grad():
        value = training.stage.sync.from_first(lambda: validate(training.module))
    if not math.isfinite(value):
        raise _divergence(training, "validation", value, epoch, training.batches - 1)
    return value


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices and kernels decay; biases, norms, positions and tokens do not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            still = parameter.ndim <= 1 or name.endswith(("pos_embed", "_token"))
            (free if still else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
