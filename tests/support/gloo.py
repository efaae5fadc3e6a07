"""Trainers of a crew that speak gloo on loopback: threads of one process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from partitioner.crew.averaging.mean import Meeting

R = TypeVar("R")


def in_threads(size: int, run: Callable[[int], R]) -> list[R]:
    """Results of `run(rank)` in each of `size` threads at once."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


class PlainGroups:
    """Groups of one rank; `store` is the same for all."""

    def __init__(self, store: Store, rank: int, timeout_s: float = 20.0) -> None:
        self.store, self.rank, self.timeout = store, rank, timedelta(seconds=timeout_s)

    def of(self, network: str, seq: int, members: Sequence[int]) -> ProcessGroupGloo:
        """The group of a meeting."""
        store = PrefixStore(f"{network}/{seq}", self.store)
        place = list(members).index(self.rank)
        return ProcessGroupGloo(store, place, len(members), self.timeout)


def meeting_of_equals(store: Store, rank: int, count: int) -> Meeting:
    """A meeting of `count` trainers that count alike."""
    members = tuple(range(count))
    group = cast(ProcessGroup, PlainGroups(store, rank).of("net", 0, members))
    return Meeting(group=group, members=members, weights=(1.0,) * count, rank=rank)


def vector(count: int, seed: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
