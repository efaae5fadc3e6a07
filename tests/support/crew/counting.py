"""Trainers as processes: a trainer's parameters count how often each batch was trained.

A mean is the sum of what its members have counted since the last one, so that a batch that is
lost or done twice shows in the result.

python -m tests.support.crew.counting LOG LINES BATCHES EPOCHS

starts the coordinator and four trainers, of which one kills itself in a mean, and one that comes
when the log has LINES. Prints their process ids, what each of them has counted, and their exit
codes.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mdp import console
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.bus.control import Coordinator, CoordinatorClient
from partitioner.crew.bus.store import connect, serve_store
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.messages import (
    Close,
    Commit,
    Done,
    Finished,
    GoOn,
    Meet,
    MeetingFailed,
    Ready,
    Refused,
    TrainerReport,
    Waiting,
    cursor,
)

NAMES = ("coordinator", "fails", "t1", "t2", "t3", "late")
#: The meeting in which the trainer `fails` kills itself.
LAST_MEETING = 4
NETWORK, DIGEST, TOKEN, HOST = "member-0", "digest", "token", "127.0.0.1"
EVERY, STEP_S = 60, 0.005
GROUP_S, SILENT_S = 4.0, 3.0


def machine(batches: int, epochs: int) -> MembershipMachine:
    """Machine that the coordinator asks."""
    return MembershipMachine(
        DIGEST,
        {NETWORK: NAMES},
        {NETWORK: LocalSgdSchedule(NETWORK, RoundLengths(EVERY, batches, epochs))},
    )


class Counting:
    """One trainer, from joining to the end or to being refused."""

    def __init__(self, port: int, name: str, batches: int, epochs: int) -> None:
        store = connect(HOST, port, TOKEN, wait_s=20.0, timeout=timedelta(seconds=GROUP_S))
        self.client = CoordinatorClient(store)
        self.client.join(name, DIGEST)
        self.groups = TrainerGroups(
            store, self.client.rank, HOST, self.client.has_committed, GROUP_S
        )
        self.name, self.meetings = name, 0
        self.batches, self.epochs, self.epoch = batches, epochs, 0
        self.counts = torch.zeros(epochs * batches)
        self.since = torch.zeros(epochs * batches)
        self.mean = self.counts

    def report(self, kind: type[TrainerReport]) -> None:
        pictures = int(self.since.sum())
        self.client.report(kind(rank=self.client.rank, network=NETWORK, pictures=pictures))  # type: ignore[arg-type]

    def train(self) -> str:
        """Take part until the end; why it was refused, or nothing."""
        self.report(Waiting)
        reason = self.rest()
        while not reason and self.epoch < self.epochs:
            claim = self.client.claim(cursor(NETWORK, self.epoch))
            if claim >= self.batches:
                self.report(Finished)
                reason = self.rest()
                continue
            time.sleep(STEP_S)
            self.since[self.epoch * self.batches + claim] += 1
            self.report(Ready)
            action = self.client.poll()
            if isinstance(action, Refused):
                return action.reason
            if isinstance(action, Close):
                self.report(Waiting)
                reason = self.rest()
        return reason

    def rest(self) -> str:
        while True:
            action = self.client.poll(0.5)
            match action:
                case Refused():
                    return action.reason
                case Meet():
                    self.meet(action)
                case Commit():
                    self.counts, self.epoch = self.mean, action.epoch
                    self.since = torch.zeros_like(self.since)
                    return ""
                case GoOn():
                    self.epoch = action.epoch
                    return ""

    def meet(self, meet: Meet) -> None:
        rank, seq = self.client.rank, meet.seq
        weight = meet.weights[meet.members.index(rank)]
        givers = [member for member, part in zip(meet.members, meet.weights, strict=True) if part]
        part = self.since * bool(weight)
        base = self.counts * (rank == givers[0])
        try:
            total = torch.stack([base, part])
            group: Any = self.groups.of(NETWORK, seq, meet.members)
            self.meetings += 1
            if self.name == "fails" and self.meetings == LAST_MEETING:
                os.kill(os.getpid(), signal.SIGKILL)
            group.allreduce([total]).wait()
        except RuntimeError:
            self.groups.drop(NETWORK, meet.members)
            self.client.report(MeetingFailed(rank=rank, network=NETWORK, seq=seq))
        else:
            self.mean = total.sum(0)
            self.client.report(Done(rank=rank, network=NETWORK, seq=seq))

    def close(self) -> None:
        self.groups.close()
        self.client.close()


def coordinator(path: Path, batches: int, epochs: int, told: Connection) -> None:
    """The coordinator's process, which trains too."""
    store = serve_store(HOST, 0, TOKEN)
    watch = Watch(GROUP_S, SILENT_S, SILENT_S)
    coordinator = Coordinator(store, machine(batches, epochs), watch, path)
    told.send(store.port)
    trainer("coordinator", store.port, batches, epochs)
    while coordinator.states:
        time.sleep(0.01)
    coordinator.close()


def trainer(name: str, port: int, batches: int, epochs: int) -> None:
    """A trainer's process; one that was taken for lost joins again."""
    joined, reason = 0, "join again"
    while "join again" in reason:
        counting = Counting(port, name, batches, epochs)
        joined += 1
        try:
            reason = counting.train()
        finally:
            counting.close()
    counted = sorted(set(counting.counts.tolist()))
    told = {"name": name, "joined": joined, "reason": reason, "counted": counted}
    # One write of a whole line: several processes write to one pipe.
    sys.stdout.write(json.dumps(told | {"groups": counting.groups.made}) + "\n")
    sys.stdout.flush()


def late(path: Path, lines: int, port: int, batches: int, epochs: int) -> None:
    """A trainer that comes when the log has so many lines."""
    while path.read_bytes().count(b"\n") < lines:
        time.sleep(0.01)
    trainer("late", port, batches, epochs)


def fork(target: Callable[..., None], *args: object) -> int:
    """A child process, which has all modules already."""
    pid = os.fork()
    if not pid:
        console.run(lambda: target(*args), str(args[0]))
    return pid


def main() -> None:
    path, lines, *numbers = sys.argv[1:]
    batches, epochs = map(int, numbers)
    mine, told = Pipe()
    pids = {"coordinator": fork(coordinator, Path(path), batches, epochs, told)}
    port = mine.recv()
    for name in NAMES[1:-1]:
        pids[name] = fork(trainer, name, port, batches, epochs)
    pids["late"] = fork(late, Path(path), int(lines), port, batches, epochs)
    print(json.dumps(pids), flush=True)
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
