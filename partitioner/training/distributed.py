"""Several processes that train one network: who this one is, and how they wait for each other.

torchrun starts them and stops all if one dies, so nothing here supervises anything. Without
torchrun there is one process, and every function below returns at once.
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

#: The others wait while the first one fills caches, which may take hours. torchrun ends the wait
#: when a process dies, so that the only purpose of a limit would be to break long runs.
PATIENCE = timedelta(days=30)


class StoppedElsewhere(MDPError):
    """Another process of this training stopped and says why.

    Fine for this one: torchrun ends a training with the first exit code other than 0, which has
    to be that of the process that failed, and only once that one had the time to speak.
    """

    exit_code = 0


def is_first() -> bool:
    """Whether this process owns the run folder, prints and writes."""
    return world().rank == 0


@contextmanager
def joined(backend: str | None = None) -> Iterator[World]:
    """Join torchrun's other processes; one process alone joins nobody.

    By default messages about tensors on GPUs go through nccl and all others through gloo.
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
        # Whoever leaves first would be a broken connection to those who still talk.
        barrier()
    finally:
        # A wrapped network that is still held by a cycle keeps threads of the group alive, which
        # then end the process with SIGABRT.
        gc.collect()
        distributed.destroy_process_group()


def barrier() -> None:
    """Wait until every process is here."""
    _highest(0)


@contextmanager
def together() -> Iterator[None]:
    """Fail everywhere if the body fails on any process, so that none is waited for in vain.

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
    # The lowest rank that has something to say wins, and 0 stands for none.
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
    """Run the body on the first process, then on the others, which find what it wrote.

    Where the first one fails the others raise StoppedElsewhere instead of running the body.
    """
    with together():
        if is_first():
            yield
    if not is_first():
        yield


def finished(*paths: Path) -> bool:
    """Whether the first process finds all of `paths` there: one answer for every process."""
    return bool(from_first(lambda: float(all(path.exists() for path in paths))))


def shared(error: MDPError) -> MDPError:
    """What to raise for an error that every process meets at the same time: one of them speaks."""
    return error if is_first() else StoppedElsewhere(str(error))


def agreed(value: int) -> bool:
    """Whether `value` is the same on every process."""
    return _highest(value) == value and -_highest(-value) == value


def from_first(value_of: Callable[[], float]) -> float:
    """A number that the first process works out while the others wait; MDPErrors reach all."""
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
    """This process's pictures of a batch, and which part of the batch they are.

    Shares may be uneven. Where there are fewer pictures than processes some get one that counts
    nothing, since every process has to take part in every averaging of gradients.
    """
    share = np.array_split(index, here.size)[here.rank]
    if len(share) == 0:
        return index[:1], 0.0
    return share, len(share) / len(index)


def parallel(module: "nn.Module", device: "torch.device", *, in_parts: bool) -> "nn.Module":
    """`module` with gradients that are averaged over all processes; itself if there is one.

    Unless a batch may run it `in_parts`, every trainable parameter has to take part in every
    batch's loss, if only times zero.
    """
    if world().size == 1:
        return module
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=in_parts)


def share_statistics(module: "nn.Module") -> None:
    """Give every process the running statistics of the first one.

    Each batch starts from those; what the last one changed is each process's own until then.
    """
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
