"""Large arrays on disk: written whole or not at all, read back memory-mapped.

torch is imported where tensors are made: what only cuts pictures needs none (`inspect`).
"""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mdp.errors import InputError
from mdp.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

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
    with ExitStack() as stack:
        with _explain_write_errors(path, math.prod(shape) * np.dtype(dtype).itemsize):
            temporary = stack.enter_context(replacing(path))
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            with temporary.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
        # What goes wrong in here is not about the disk.
        yield array
        with _explain_write_errors(path, array.nbytes):
            array.flush()
            stack.close()


@contextmanager
def _explain_write_errors(path: Path, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error} (expected room for "
            f"{size_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB are free); "
            "make room and give the same command again"
        ) from error


def load(path: Path) -> NDArray[Any]:
    """A kept array, memory-mapped; raises InputError where it is damaged."""
    try:
        kept: NDArray[Any] = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: damaged; remove it to have it made anew") from error
    return kept


def load_weights(path: Path) -> "dict[str, Tensor]":
    """A finished network's weights; raises InputError where they are damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: damaged; remove it to have it made anew") from error


class IndexedRows(Protocol):
    """Rows `[N, ...]` that are read by their numbers."""

    def __getitem__(self, index: Index, /) -> NDArray[Any]:
        """Some of them."""


def rows(kept: IndexedRows, index: Index) -> "Tensor":
    """Rows `[B, ...]` of a kept array as float32."""
    import torch

    return torch.from_numpy(np.asarray(kept[index], dtype=np.float32))
