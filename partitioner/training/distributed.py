"""Processes that train one network together: rank, barriers, broadcasts and shared errors.

torchrun starts them and stops all if one dies, so nothing is supervised here. Without torchrun
there is one process, and every function below returns at once.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mdp.errors import MDPError
from partitioner.training.world import World, world

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

#: Wait for the first process while it fills caches, which may take hours. torchrun ends the wait
#: when a process dies.
PATIENCE = timedelta(days=30)


class StoppedElsewhere(MDPError):
    """Another process of this training failed and reports the error.

    Exit code 0: torchrun ends a training with the first other exit code, which has to be the failed
    process's, after it has printed its error.
    """

    exit_code = 0


def is_first() -> bool:
    """Whether this process owns the run folder, prints and writes."""
    return world().rank == 0


@contextmanager
def joined(backend: str | None = None) -> Iterator[World]:
    """Join torchrun's process group; without torchrun there is none.

    By default nccl carries tensors on GPUs and gloo all others.
    """
    here = world()
    if here.size == 1:
        yield here
        return
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        from partitioner.training.compute import training_device

        torch.cuda.set_device(training_device())
        backend = backend or "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend or "gloo", timeout=PATIENCE)
    try:
        yield here
        # A process that leaves early breaks the connections of the others.
        barrier()
    finally:
        # A wrapped network in a reference cycle keeps threads of the group alive, which end the
        # process with SIGABRT.
        gc.collect()
        distributed.destroy_process_group()


def barrier() -> None:
    """Wait until every process is here."""
    _highest(0)


@contextmanager
def together() -> Iterator[None]:
    """Fail on every process if the body fails on any.

    The first process that failed raises its own error, the others StoppedElsewhere.
    """
    here = world()
    failed: MDPError | None = None
    try:
        yield
    except MDPError as error:
        if here.size == 1:
            raise
        failed = error
    # The lowest rank with an error of its own wins; 0 stands for none.
    mine = here.size - here.rank if failed else 0
    if failed and not isinstance(failed, StoppedElsewhere):
        mine += here.size
    winner = _highest(mine)
    if winner == 0:
        return
    if failed and mine == winner:
        raise failed
    rank = here.size - 1 - (winner - 1) % here.size
    raise StoppedElsewhere(f"process {rank} of {here.size} stopped")


@contextmanager
def first_then_others() -> Iterator[None]:
    """Run the body on the first process, then on the others, which find its files.

    Where the first one fails the others raise StoppedElsewhere instead of running the body.
    """
    with together():
        if is_first():
            yield
    if not is_first():
        yield


def on_first(action: Callable[[], object]) -> None:
    """Run `action` on the first process alone; an MDPError of it ends all."""
    with together():
        if is_first():
            action()


def finished(*paths: Path) -> bool:
    """Whether all of `paths` exist for the first process: one answer on every process."""
    return bool(from_first(lambda: float(all(path.exists() for path in paths))))


def shared(error: MDPError) -> MDPError:
    """What to raise for an error that every process meets at once: the first reports it."""
    return error if is_first() else StoppedElsewhere(str(error))


def agreed(value: int) -> bool:
    """Whether `value` is the same on every process."""
    return _highest(value) == value and -_highest(-value) == value


def from_first(value_of: Callable[[], float]) -> float:
    """A number that the first process computes while the others wait; an MDPError ends all."""
    value = 0.0
    with together():
        if is_first():
            value = value_of()
    if world().size == 1:
        return value
    import torch
    from torch import distributed

    message = torch.tensor([value], dtype=torch.float64)
    distributed.broadcast(message, src=0)
    return float(message[0])


def _highest(value: int) -> int:
    """The largest of all processes' values."""
    if world().size == 1:
        return value
    import torch
    from torch import distributed

    message = torch.tensor([value])
    distributed.all_reduce(message, op=distributed.ReduceOp.MAX)
    return int(message[0])


def share_of(index: NDArray[np.int64], here: World) -> tuple[NDArray[np.int64], float]:
    """This process's pictures of a batch, and their share of it.

    Shares may be uneven. With fewer pictures than processes, some get one picture with share 0, as
    every process has to take part in averaging gradients.
    """
    share = np.array_split(index, here.size)[here.rank]
    if len(share) == 0:
        return index[:1], 0.0
    return share, len(share) / len(index)


def parallel(module: "nn.Module", device: "torch.device") -> "nn.Module":
    """`module` with gradients that are averaged over all processes; itself if there is one.

    Every trainable parameter has to take part in every batch's loss, if only times zero.
    """
    if world().size == 1:
        return module
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices)


def share_statistics(module: "nn.Module") -> None:
    """Broadcast the first process's running statistics of batch norms."""
    if world().size == 1:
        return
    from torch import distributed
    from torch.nn.modules.batchnorm import _BatchNorm

    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            for buffer in norm.buffers():
                distributed.broadcast(buffer, src=0)


def summed(values: "Tensor") -> "Tensor":
    """Sum of every process's `values`, in place."""
    if world().size > 1:
        from torch import distributed

        distributed.all_reduce(values)
    return values
