"""Outputs of frozen networks, computed once and kept on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mdp.errors import InputError
from partitioner.data.memmaps import Array, Index, Views, new_array
from partitioner.run.progress import Advance
from partitioner.run.settings import Autocast
from partitioner.training.compute import training_device

#: Pictures per step where nothing is trained.
BATCH = 256


def batch(pixels: Views, index: Index, device: torch.device) -> Tensor:
    """Views `[N, S, S, 3]` -> float32 `[B, 3, S, S]` in 0..255 of the pictures `index`."""
    chosen = torch.from_numpy(np.ascontiguousarray(pixels[index]))
    return chosen.to(device).permute(0, 3, 1, 2).float()


def device_of(network: nn.Module) -> torch.device:
    """The device of a network's weights."""
    return next(network.parameters()).device


def keep_outputs(
    paths: Sequence[Path],
    outputs_of: Callable[[Index], Sequence[Tensor]],
    count: int,
    *,
    arithmetic: Autocast,
    dtype: type[np.floating],
    advance: Advance,
) -> None:
    """Write each output `[count, ...]` to one of `paths`; the files appear when all is done."""
    device = training_device()
    with ExitStack() as stack:
        arrays: list[Array] = []
        for start in range(0, count, BATCH):
            index = np.arange(start, min(start + BATCH, count))
            with (
                torch.inference_mode(),
                torch.autocast(device.type, torch.bfloat16, enabled=arithmetic == "bf16"),
            ):
                outputs = outputs_of(index)
            if not arrays:
                arrays = [
                    stack.enter_context(new_array(path, dtype, (count, *output.shape[1:])))
                    for path, output in zip(paths, outputs, strict=True)
                ]
            for path, array, output in zip(paths, arrays, outputs, strict=True):
                values = output.float().cpu().numpy()
                if not np.abs(values).max() <= np.finfo(dtype).max:  # which a NaN is not either
                    raise InputError(
                        f"{path.name}: expected finite answers within {np.finfo(dtype).max:g}, "
                        f"found others among pictures {index[0]} to {index[-1]}; "
                        "the network's weights are of no use"
                    )
                array[index] = values
            advance(len(index), "")
