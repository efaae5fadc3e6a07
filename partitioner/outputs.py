"""Outputs of frozen networks, computed once and kept on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdp.files import replacing
from mdp.plan import Region
from partitioner.augment import Geometry, augmented
from partitioner.progress import Advance
from partitioner.settings import Autocast
from partitioner.views import WHOLE

#: Pictures per step where nothing is trained.
BATCH = 256

Array = NDArray[np.floating]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seen:
    """A split as one network sees it: views `[N, S, S, 3]` of `region`."""

    pixels: NDArray[np.uint8]
    region: Region = WHOLE

    def batch(self, index: Index, shapes: Geometry) -> Tensor:
        """float32 `[B, 3, S, S]` in 0..255 of the pictures `index`, moved as `shapes[N, 4]` say."""
        return augmented(self.pixels[index], shapes[index], self.region)


def keep_outputs(
    paths: Sequence[Path],
    outputs_of: Callable[[Index], Sequence[Tensor]],
    count: int,
    *,
    autocast: Autocast,
    dtype: type[np.floating],
    advance: Advance,
) -> None:
    """Write each output `[count, ...]` to one of `paths`; the files appear when all is done."""
    with ExitStack() as stack:
        temporary = [stack.enter_context(replacing(path)) for path in paths]
        arrays: list[Array] = []
        for start in range(0, count, BATCH):
            index = np.arange(start, min(start + BATCH, count))
            with (
                torch.inference_mode(),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast == "bf16"),
            ):
                outputs = outputs_of(index)
            if not arrays:
                arrays = [
                    np.lib.format.open_memmap(
                        path, mode="w+", dtype=dtype, shape=(count, *output.shape[1:])
                    )
                    for path, output in zip(temporary, outputs, strict=True)
                ]
            for array, output in zip(arrays, outputs, strict=True):
                array[index] = output.float().numpy()
            advance(len(index), "")


def load(path: Path) -> Array:
    """A kept array, memory-mapped."""
    kept: Array = np.load(path, mmap_mode="r")
    return kept


def rows(kept: Array, index: Index) -> Tensor:
    """Rows `[B, ...]` of a kept array as float32."""
    return torch.from_numpy(np.asarray(kept[index], dtype=np.float32))
