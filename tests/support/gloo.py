"""Trainers of a crew as threads of one process, which speak gloo on loopback."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty, Queue
from threading import Lock
from typing import TypeVar, cast

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from partitioner.crew.machine.events import (
    AnyAction,
    AnyEvent,
    Finished,
    GoOn,
    Meet,
    Ready,
    Schedule,
    Waiting,
)

R = TypeVar("R")


def in_threads(size: int, run: Callable[[int], R]) -> list[R]:
    """What `run(rank)` returns in each of `size` threads at once."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


class ThreadGroups:
    """Groups of one rank; `store` is the same of all threads."""

    def __init__(self, store: Store, rank: int, timeout_s: float = 20.0) -> None:
        self.store, self.rank, self.timeout = store, rank, timedelta(seconds=timeout_s)

    def of(self, network: str, seq: int, members: Sequence[int]) -> ProcessGroup:
        """The group of a meeting."""
        store = PrefixStore(f"{network}/{seq}", self.store)
        place = list(members).index(self.rank)
        group = ProcessGroupGloo(store, place, len(members), self.timeout)
        return cast(ProcessGroup, group)


class Desk:
    """A schedule that threads report to, and their mailboxes."""

    def __init__(self, schedule: Schedule, size: int) -> None:
        self.schedule, self.lock = schedule, Lock()
        self.boxes: list[Queue[AnyAction]] = [Queue() for _ in range(size)]
        self.counters: dict[str, int] = defaultdict(int)
        self.log: list[AnyEvent | AnyAction] = []

    def append(self, event: AnyEvent) -> None:
        """Handle an event and post what follows."""
        with self.lock:
            self.log.append(event)
            for action in self.schedule.handle(event):
                self.log.append(action)
                self.boxes[action.rank].put(action)

    @property
    def meetings(self) -> list[Meet]:
        """Those of the first trainer."""
        return [a for a in self.log if isinstance(a, Meet) and a.rank == a.members[0]]


class ThreadTrainer:
    """One thread's end of the desk; notes claims done, as a report wants them."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self.desk, self.rank = desk, rank
        self._claimed: list[int] = []
        self._given: list[int] = []

    def report(self, event: AnyEvent) -> None:
        """Append to the log."""
        if isinstance(event, Ready | Waiting | Finished):
            event = replace(event, claims=tuple(self._claimed))
            self._claimed = []
        self.desk.append(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action."""
        try:
            action = self.desk.boxes[self.rank].get(block=timeout_s > 0, timeout=timeout_s or None)
        except Empty:
            return None
        if isinstance(action, GoOn):
            self._given += action.claims
        return action

    def claim(self, counter: str) -> int:
        """The next batch."""
        if self._given:
            number = self._given.pop(0)
        else:
            with self.desk.lock:
                number = self.desk.counters[counter]
                self.desk.counters[counter] += 1
        self._claimed.append(number)
        return number


def vector(count: int, seed: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
