"""Checkpoints: one file, written atomically after every finished epoch."""

import io
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.files import write_bytes
from partitioner.run.curves import Curve


@dataclass(slots=True)
class TrainingState:
    """Progress of a training, beside the weights and the optimiser's state."""

    curve: Curve = field(default_factory=list)
    #: The weights of the epoch with the best validation, with early stopping.
    best: dict[str, Tensor] | None = None

    def keep_best(self, module: nn.Module) -> None:
        """Copy the weights of `module`."""
        self.best = {name: value.clone() for name, value in module.state_dict().items()}


def save(
    module: nn.Module, optimiser: torch.optim.Optimizer, state: TrainingState, path: Path
) -> None:
    """Write a checkpoint; raises InputError where it cannot be written."""
    buffer = io.BytesIO()
    torch.save(
        {
            "module": module.state_dict(),
            "optimiser": optimiser.state_dict(),
            "curve": state.curve,
            "best": state.best,
        },
        buffer,
    )
    write_bytes(path, buffer.getvalue())


def restore(module: nn.Module, optimiser: torch.optim.Optimizer, path: Path) -> TrainingState:
    """Load the state of the last finished epoch, if there is one; raises InputError."""
    if not path.exists():
        return TrainingState()
    try:
        kept = torch.load(path, weights_only=True, map_location="cpu")
        if kept["best"] is not None:
            # Loaded for the check alone; the last epoch's weights take their place.
            module.load_state_dict(kept["best"])
        module.load_state_dict(kept["module"])
        optimiser.load_state_dict(kept["optimiser"])
        return TrainingState(msgspec.convert(kept["curve"], Curve), kept["best"])
    except Exception as error:
        # torch.load raises errors of many types for a damaged file.
        raise InputError(
            f"{path}: not a checkpoint of this run; remove it to start over"
        ) from error


def epochs_of(path: Path) -> int:
    """Epochs that a checkpoint has behind it."""
    if not path.exists():
        return 0
    return len(torch.load(path, weights_only=True, map_location="cpu", mmap=True)["curve"])
