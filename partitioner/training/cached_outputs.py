"""Outputs of frozen networks, computed once and kept on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdp.errors import InputError
from partitioner.data.memmaps import Index, Views, new_array
from partitioner.run.progress import Advance
from partitioner.run.settings import Autocast
from partitioner.training.compute import training_device
from partitioner.training.largest_logits import Keep, largest

#: Pictures per step where nothing is trained.
BATCH = 256


def batch(pixels: Views, index: Index, device: torch.device) -> Tensor:
    """Views `[N, S, S, 3]` -> float32 `[B, 3, S, S]` in 0..255 of the pictures `index`.

    Channel after channel in memory: from a view in the order of the file, oneDNN's bf16 gradient of
    a patch embedding spins at its barriers, which on busy cores takes up to a hundred times as long
    (benchmarks/training/layout.py).
    """
    chosen = torch.from_numpy(np.ascontiguousarray(pixels[index]))
    seen = chosen.to(device).permute(0, 3, 1, 2)
    return seen.to(torch.float32, memory_format=torch.contiguous_format)


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
    keep: Keep | None = None,
) -> None:
    """Write each output `[count, ...]` to one of `paths`; the files appear when all is done.

    With `keep` the rows of `largest` instead.
    """
    names = [path.name for path in paths]
    with ExitStack() as stack:
        arrays: list[NDArray[Any]] = []
        for start in range(0, count, BATCH):
            index = np.arange(start, min(start + BATCH, count))
            outputs = finite_rows(
                names, outputs_of, index, arithmetic=arithmetic, dtype=dtype, keep=keep
            )
            arrays = arrays or [
                stack.enter_context(new_array(path, output.dtype, (count, *output.shape[1:])))
                for path, output in zip(paths, outputs, strict=True)
            ]
            for array, output in zip(arrays, outputs, strict=True):
                array[index] = output
            advance(len(index), "")


def finite_rows(
    names: Sequence[str],
    outputs_of: Callable[[Index], Sequence[Tensor]],
    index: Index,
    *,
    arithmetic: Autocast,
    dtype: type[np.floating],
    keep: Keep | None = None,
) -> list[NDArray[Any]]:
    """Outputs `[B, ...]` of the pictures `index`, by `names` in messages; raises InputError.

    With `keep` the rows of `largest` instead.
    """
    device, found = training_device(), list[NDArray[Any]]()
    with (
        torch.inference_mode(),
        torch.autocast(device.type, torch.bfloat16, enabled=arithmetic == "bf16"),
    ):
        outputs = outputs_of(index)
    for name, output in zip(names, outputs, strict=True):
        values = output.float().cpu().numpy()
        if not np.abs(values).max() <= np.finfo(dtype).max:  # which a NaN is not either
            raise InputError(
                f"{name}: expected finite answers within {np.finfo(dtype).max:g}, "
                f"found others among pictures {index[0]} to {index[-1]}; "
                "the network's weights are of no use"
            )
        rows = values.astype(dtype)
        found.append(rows if keep is None else largest(rows, keep))
    return found
