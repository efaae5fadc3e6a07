"""Large arrays on disk: written whole or not at all, read back memory-mapped."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from mdp.errors import InputError
from mdp.files import replacing

Array = NDArray[np.floating]
Index = NDArray[np.int64]
#: uint8 views `[N, S, S, 3]` of a split.
Views = NDArray[np.uint8]


@contextmanager
def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """A writable array that appears at `path` when the block ends well; raises InputError.

    All of its room on the disk is taken at once: a memory-mapped file that runs out of disk later
    would end the process with a signal instead of an error.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        with replacing(path) as temporary:
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            with temporary.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
            yield array
            array.flush()
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error} (expected room for "
            f"{size_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB are free); "
            "make room and give the same command again"
        ) from error


def load(path: Path) -> NDArray[Any]:
    """A kept array, memory-mapped."""
    kept: NDArray[Any] = np.load(path, mmap_mode="r")
    return kept


def rows(kept: NDArray[Any], index: Index) -> Tensor:
    """Rows `[B, ...]` of a kept array as float32."""
    return torch.from_numpy(np.asarray(kept[index], dtype=np.float32))
