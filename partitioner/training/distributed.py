"""Processes that train one network together: rank, barriers, broadcasts and shared errors.

By default they are torchrun's, which starts them and stops all if one dies, so nothing is
supervised here. Of one process alone every function below returns at once.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from mdp.errors import MDPError
from partitioner.run.folder import RunFolder
from partitioner.training.world import World, world

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

T = TypeVar("T")
#: Wait for the first process while it fills caches, which may take hours. torchrun ends the wait
#: when a process dies.
PATIENCE = timedelta(days=30)


class StoppedElsewhere(MDPError):
    """Another process of this training failed and reports the error.

    Exit code 0: torchrun ends a training with the first other exit code, which has to be the failed
    process's, after it has printed its error.
    """

    exit_code = 0


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes of one network: the own rank, how many, and their group.

    Without a group they are those of torch's default group.
    """

    rank: int = 0
    size: int = 1
    group: "ProcessGroup | None" = None
    #: Whether each process keeps files of its own, instead of the first for all.
    own_files: bool = False

    def require_group(self) -> "ProcessGroup":
        """The group of more than one process."""
        from torch import distributed

        group = self.group or distributed.group.WORLD
        assert group is not None
        return group


def all_started(crew: Crew | None = None) -> Crew:
    """`crew`, by default the processes that torchrun started."""
    if crew is not None:
        return crew
    here = world()
    return Crew(here.rank, here.size)


def is_first(crew: Crew | None = None) -> bool:
    """Tell whether this process owns the run folder, prints and writes."""
    return all_started(crew).rank == 0


@contextmanager
def join_group(backend: str | None = None) -> Iterator[World]:
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
    _highest(0, all_started())


@contextmanager
def together(crew: Crew | None = None) -> Iterator[None]:
    """Fail on every process if the body, or the decorated function, fails on any.

    The first process that failed raises its own error, the others StoppedElsewhere.
    """
    here = all_started(crew)
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
    winner = _highest(mine, here)
    if winner == 0:
        return
    if failed and mine == winner:
        raise failed
    rank = here.size - 1 - (winner - 1) % here.size
    raise StoppedElsewhere(f"process {rank} of {here.size} stopped")


@contextmanager
def first_then_others(crew: Crew | None = None) -> Iterator[None]:
    """Run the body, or a decorated function, on the first process, then on the others.

    These find the files of the first.
    Where the first one fails the others raise StoppedElsewhere instead of running the body.
    """
    writes = _writes(crew)
    with together(crew):
        if writes:
            yield
    if not writes:
        yield


def on_first(action: Callable[[], T], crew: Crew | None = None) -> T | None:
    """The value of `action`, which the first process alone runs; an MDPError of it ends all.

    The other processes wait, and get None.
    """
    value: T | None = None
    with together(crew):
        if _writes(crew):
            value = action()
    return value


@contextmanager
def lock_run(run: RunFolder) -> Iterator[None]:
    """Lock a run folder, by the first process for all."""
    with ExitStack() as held:
        on_first(lambda: held.enter_context(run.lock()))
        yield


def _writes(crew: Crew | None) -> bool:
    return is_first(crew) or all_started(crew).own_files


def all_exist(*paths: Path) -> bool:
    """Tell whether all of `paths` exist for the first process: one answer on every process."""
    return bool(from_first(lambda: float(all(path.exists() for path in paths))))


def common_error(error: MDPError, crew: Crew | None = None) -> MDPError:
    """The error to raise for one that all of a crew meet at once: the first reports it."""
    here = all_started(crew)
    return error if here.rank == 0 or here.size == 1 else StoppedElsewhere(str(error))


def all_agree(value: int, crew: Crew | None = None) -> bool:
    """Tell whether `value` is the same on every process."""
    here = all_started(crew)
    return _highest(value, here) == value and -_highest(-value, here) == value


def from_first(value_of: Callable[[], float], crew: Crew | None = None) -> float:
    """A number that the first process computes while the others wait; an MDPError ends all."""
    here = all_started(crew)
    value = 0.0
    with together(here):
        if is_first(here):
            value = value_of()
    if here.size == 1:
        return value
    import torch

    message = torch.tensor([value], dtype=torch.float64)
    _broadcast(message, here)
    return float(message[0])


def _highest(value: int, crew: Crew) -> int:
    """The largest of all processes' values."""
    if crew.size == 1:
        return value
    import torch
    from torch import distributed

    options = distributed.AllreduceOptions()
    options.reduceOp = distributed.ReduceOp(distributed.ReduceOp.MAX)
    message = torch.tensor([value])
    crew.require_group().allreduce([message], options).wait()
    return int(message[0])


def _broadcast(values: "Tensor", crew: Crew) -> None:
    """Replace `values` by the first process's."""
    crew.require_group().broadcast(values, 0).wait()


def share_of(index: NDArray[np.int64], here: World | Crew) -> tuple[NDArray[np.int64], float]:
    """This process's pictures of a batch, and their share of it.

    Shares may be uneven. With fewer pictures than processes, some get one picture with share 0, as
    every process has to take part in averaging gradients.
    """
    share = np.array_split(index, here.size)[here.rank]
    if len(share) == 0:
        return index[:1], 0.0
    return share, len(share) / len(index)


def share_statistics(module: "nn.Module", crew: Crew | None = None) -> None:
    """Broadcast the first process's running statistics of batch norms."""
    here = all_started(crew)
    if here.size == 1:
        return
    from torch.nn.modules.batchnorm import _BatchNorm

    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            for buffer in norm.buffers():
                _broadcast(buffer, here)


def sum_over_all(values: "Tensor", crew: Crew | None = None) -> "Tensor":
    """Sum of every process's `values`, in place."""
    here = all_started(crew)
    if here.size > 1:
        here.require_group().allreduce([values]).wait()
    return values
