"""Train one network for some epochs, with a checkpoint after each, so that it can go on later."""

import hashlib
import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdp.errors import InputError, MDPError
from mdp.files import write_bytes
from partitioner.progress import Progress
from partitioner.settings import Autocast, Schedule

WARMUP_SHARE = 0.1
MAX_GRADIENT_NORM = 1.0

Index = NDArray[np.int64]
#: (network to run, indices of a batch's pictures, epoch) -> named losses; `loss` is minimised.
BatchLoss = Callable[[nn.Module, Index, int], dict[str, Tensor]]
#: One mapping per finished epoch: the mean of every named loss, and `seconds`.
Curve = list[dict[str, float]]


class TrainingDiverged(MDPError):
    """The loss is no longer a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One network's training: what it is called, on how many pictures, how, and from where."""

    name: str
    pictures: int
    schedule: Schedule
    seed: int
    autocast: Autocast
    checkpoint: Path


def derived_seed(seed: int, *what: object) -> int:
    """A seed of its own for every purpose, 0 to 2**63 - 1."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth of `steps`, then a cosine to zero."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def fit(module: nn.Module, stage: Stage, loss_of: BatchLoss, progress: Progress) -> Curve:
    """Train `module` in place from its last finished epoch to the end.

    Every epoch's order of pictures follows from the seed and the epoch alone, so that a resumed
    training ends with the same weights as one that was never stopped. Raises TrainingDiverged.
    """
    optimiser = torch.optim.AdamW(
        _parameter_groups(module, stage.schedule.weight_decay), lr=0.0, fused=True
    )
    curve = _restore(module, optimiser, stage.checkpoint)
    epochs = stage.schedule.epochs
    per_epoch = math.ceil(stage.pictures / stage.schedule.batch_size)
    module.train()
    done = len(curve) * per_epoch
    with progress.task(stage.name, epochs * per_epoch, done=done) as advance:
        for epoch in range(len(curve), epochs):

            def said(loss: float, epoch: int = epoch) -> None:
                advance(1, f"epoch {epoch + 1} of {epochs}, loss {loss:.3f}")

            curve.append(_epoch(module, optimiser, stage, loss_of, epoch, said))
            _save(module, optimiser, curve, stage.checkpoint)
    module.eval()
    return curve


def _epoch(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    stage: Stage,
    loss_of: BatchLoss,
    epoch: int,
    said: Callable[[float], None],
) -> dict[str, float]:
    started_s = time.monotonic()
    torch.manual_seed(derived_seed(stage.seed, stage.name, epoch))
    order = torch.randperm(stage.pictures).numpy()
    batches = math.ceil(stage.pictures / stage.schedule.batch_size)
    steps, peak = stage.schedule.epochs * batches, stage.schedule.learning_rate or 0.0
    sums: dict[str, float] = {}
    for number, index in enumerate(np.array_split(order, batches)):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(epoch * batches + number, steps, peak)
        with torch.autocast("cpu", torch.bfloat16, enabled=stage.autocast == "bf16"):
            losses = loss_of(module, index, epoch)
        value = float(losses["loss"].detach())
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"{stage.name}: the loss became {value} in epoch {epoch + 1}, step {number + 1} of "
                f"{batches}; what was finished before is kept ({stage.checkpoint.parent}); "
                "try a smaller learning rate in another run folder"
            )
        optimiser.zero_grad(set_to_none=True)
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), MAX_GRADIENT_NORM)
        optimiser.step()
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + float(loss.detach()) / batches
        said(value)
    return {**sums, "seconds": time.monotonic() - started_s}


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices and kernels decay; biases, norms, positions and tokens do not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            still = parameter.ndim <= 1 or name.endswith(("pos_embed", "cls_token"))
            (free if still else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def _save(module: nn.Module, optimiser: torch.optim.Optimizer, curve: Curve, path: Path) -> None:
    buffer = io.BytesIO()
    state = {"module": module.state_dict(), "optimiser": optimiser.state_dict(), "curve": curve}
    torch.save(state, buffer)
    write_bytes(path, buffer.getvalue())


def _restore(module: nn.Module, optimiser: torch.optim.Optimizer, path: Path) -> Curve:
    """Take up the state of the last finished epoch, if there is one; raises InputError."""
    if not path.exists():
        return []
    try:
        state = torch.load(path, weights_only=True)
        module.load_state_dict(state["module"])
        optimiser.load_state_dict(state["optimiser"])
        return list(state["curve"])
    except Exception as error:
        # torch.load raises nearly anything for a damaged file; all of it means the same here.
        raise InputError(
            f"{path}: not a checkpoint of this run; remove it to start over"
        ) from error
