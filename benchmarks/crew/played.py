"""Processes that train a network together whose computing is played by sleeping.

They speak real gloo, under a real coordinator; only the seconds of forward and backward passes are
slept, so that many trainers fit on few cores. `python -m benchmarks.crew.played FOLDER RANK`, with
`cases.json` in the folder, is one of them.
"""

import hashlib
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, distributed, nn

from partitioner.crew.averaging.flat import Flat
from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.averaging.mean import Mean, Means, Meeting, Route, ShardSizes
from partitioner.crew.averaging.parameters import Rounds
from partitioner.crew.bus.control import Coordinator, CoordinatorClient
from partitioner.crew.bus.store import connect, serve_store
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.rounds import RoundLengths, growing_period
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.sizes import CodecName
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.messages import Accepted
from partitioner.crew.planning.facts import tournament
from partitioner.crew.worker.probe import line_speed
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule
from partitioner.training.distributed import Crew
from partitioner.training.loop import Index, TrainingStage, fit
from partitioner.training.synchroniser import EveryStep, Synchroniser

NETWORK = "member-0"
#: A training step is a forward pass and a backward pass of twice its work.
FORWARD = 1 / 3
#: Of slowness in slow periods: units of a period, share of slow ones, and how much slower.
PERIOD, SLOW, FACTOR = 20, 0.1, 5.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One training by all trainers."""

    name: str
    how: Literal["alone", "lines", "gradients", "rounds", "own_steps", "post_local_sgd"]
    #: Seconds of a picture, by rank.
    picture_s: tuple[float, ...]
    #: Pictures of a trainer's equal share of a step, and how many such steps of all together.
    pictures: int
    steps: int
    epochs: int = 1
    #: Linear layers, and their width.
    layers: int = 2
    width: int = 16
    #: Slow in slow periods of `PERIOD` equal shares.
    slow_periods: bool = False
    paces: tuple[float, ...] = ()
    #: Pictures of a round of all together, or own steps between means.
    every: int = 0
    #: Of rounds: lengths and step sizes that follow from the step, and AdamW's moments.
    grows: bool = False
    scales: bool = False
    moments: int = 0
    background: bool = False
    route: Route = "ring"
    shards: ShardSizes = "equal"
    codec: CodecName = "fp32"
    #: Of parameters only each so many-th number travels in a mean.
    stride: int = 1
    bucket_bytes: int = 25 * 2**20
    uplink: tuple[float, ...] = ()
    sites: tuple[str, ...] = ()


class Cases(msgspec.Struct, frozen=True, kw_only=True):
    """All trainings, one after another, in the same processes."""

    trainers: int
    #: Address of every trainer; the first one has store and coordinator.
    hosts: tuple[str, ...]
    port: int
    cases: tuple[Case, ...]


class _Played(torch.autograd.Function):
    """The identity; sleeps on the way, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Take the seconds of a layer's forward pass."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        """Take those of its backward pass."""
        time.sleep(ctx.backward_s)
        return grad[0], None, None


PLAYED: Callable[[Tensor, float, float], Tensor] = _Played.apply


class Network(nn.Module):
    """Linear layers; a step on B pictures takes `step_s` seconds, in equal parts a layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.step_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """`[B, width]` -> `[B, width]`."""
        part_s = self.step_s / len(self.layers)
        x = x.requires_grad_()
        for layer in self.layers:
            x = layer(PLAYED(x, FORWARD * part_s, (1 - FORWARD) * part_s))
        return x


def slow(rank: int, period: int) -> bool:
    """Tell whether a trainer is slow in a period; the same in every run."""
    digest = hashlib.sha256(repr((3, rank, period)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < SLOW


def step_s(case: Case, rank: int, pictures: int, at_s: float) -> float:
    """Seconds of a step that begins `at_s` after the start."""
    seconds = pictures * case.picture_s[rank]
    if not case.slow_periods:
        return seconds
    unit_s = case.pictures * min(case.picture_s)
    return seconds * (FACTOR if slow(rank, int(at_s / unit_s / PERIOD)) else 1.0)


def ideal_s(case: Case) -> float:
    """Seconds in which trainers that never wait for another do a case's pictures."""
    ends = [step_s(case, rank, case.pictures, 0.0) for rank in range(len(case.picture_s))]
    wanted = case.steps * len(ends)
    for _ in range(wanted - 1):
        rank = min(range(len(ends)), key=ends.__getitem__)
        done_s = ends[rank]
        ends[rank] += step_s(case, rank, case.pictures, ends[rank])
    return done_s


class Trainer:
    """One process in one case."""

    def __init__(self, case: Case, cases: Cases, rank: int, folder: Path) -> None:
        self.case, self.cases, self.rank, self.folder = case, cases, rank, folder
        self.module = Network(case.layers, case.width)
        self.first_s: float | None = None

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        """Take the time of these pictures."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
        module = self.module
        module.step_s = step_s(self.case, self.rank, len(index), now_s - self.first_s)
        return {"loss": network(torch.ones(len(index), self.case.width)).square().mean()}

    def run(self) -> dict[str, Any]:
        """Train; what it took."""
        return getattr(self, f"_{self.case.how}")()  # type: ignore[no-any-return]

    def _fit(self, sync: Synchroniser) -> dict[str, Any]:
        case = self.case
        count = case.steps * case.pictures * len(case.picture_s)
        schedule = MemberSchedule(
            epochs=case.epochs, batch_size=case.pictures * len(case.picture_s), learning_rate=1e-4
        )
        stage = TrainingStage(
            name=case.name, pictures=count, schedule=schedule, seed=3, autocast="fp32",
            checkpoint=self.folder / f"{case.name}-{self.rank}.pt", sync=sync,
        )  # fmt: skip
        fit(self.module, stage, self.loss_of, Progress(io.StringIO()))
        return self._took()

    def _took(self) -> dict[str, Any]:
        return {"first_s": self.first_s, "end_s": time.monotonic()}

    def _lines(self) -> dict[str, Any]:
        """No training: the line to every other trainer, measured as `crew probe` does."""
        host, n, found = self.cases.hosts[0], self.cases.trainers, {}
        if self.rank == 0:
            self.store = serve_store(host, self.cases.port + 1, "")
        distributed.barrier()
        store = connect(host, self.cases.port + 1, "", timeout=timedelta(seconds=60))
        groups = TrainerGroups(
            store, self.rank, self.cases.hosts[self.rank], lambda network, seq: False, 60.0
        )
        for pairs in tournament(list(map(str, range(n)))):
            pair = next(sorted(map(int, one)) for one in pairs if str(self.rank) in one)
            group = groups.of("{}-{}".format(*pair), 0, pair)
            speed = line_speed(group, pair.index(self.rank))
            if pair[0] == self.rank:
                found[str(pair[1])] = speed
        distributed.barrier()
        groups.close()
        return {"lines": found}

    def _alone(self) -> dict[str, Any]:
        return self._fit(EveryStep(Crew())) if self.rank == 0 else {}

    def _means(self) -> Means:
        case = self.case
        return Means(
            route=case.route, shards=case.shards, uplink=case.uplink.__getitem__,
            site=case.sites.__getitem__,
        )  # fmt: skip

    def _codec_of(self, tensor: str) -> CodecName:
        return self.case.codec

    def _gradients(self) -> dict[str, Any]:
        case = self.case
        crew = Crew(self.rank, len(case.picture_s))
        sync = Gradients(
            crew, self._means(), self._codec_of, paces=case.paces, bucket_bytes=case.bucket_bytes
        )
        return self._fit(sync) | {"sent_bytes": sync.bytes_sent}

    def _rounds(self) -> dict[str, Any]:
        case, n = self.case, self.cases.trainers
        host = self.cases.hosts[0]
        port = self.cases.port + 2 + self.cases.cases.index(case)
        if self.rank == 0:
            store = serve_store(host, port, "")
            period = growing_period(case.every, case.epochs * case.steps * n)
            everyone = LocalSgdSchedule(
                NETWORK,
                RoundLengths(
                    case.every, case.steps * n, case.epochs, period=period if case.grows else None
                ),
                expected=range(n),
                background=case.background,
            )
            machine = MembershipMachine(
                "d", {NETWORK: tuple(map(str, range(n)))}, {NETWORK: everyone}
            )
            self.coordinator = Coordinator(
                store, machine, Watch(600.0, 600.0), self.folder / "log.jsonl"
            )
        joined = connect(host, port, "", wait_s=60.0)
        client = CoordinatorClient(joined)
        client.join(str(self.rank), "d")
        while not isinstance(client.poll(1.0), Accepted):
            pass
        groups = TrainerGroups(
            joined.another(timedelta(seconds=600)), client.rank,
            self.cases.hosts[self.rank], client.has_committed, 600.0,
        )  # fmt: skip
        sync = Rounds(
            NETWORK, client, groups, n, first=self.rank == 0, means=self._means(),
            codec_of=self._codec_of, scales=case.scales, moments=case.moments, stride=case.stride,
        )  # fmt: skip
        said = self._fit(sync) | {"sent_bytes": sync.bytes_sent + sync.settling_bytes}
        distributed.barrier()
        client.close()
        return said

    def _own_steps(self) -> dict[str, Any]:
        """Local SGD by own steps, averaged with this package's mean."""
        flat = Flat(self.module, self._codec_of)
        mean, n = Mean(flat.segments, self._means()), self.cases.trainers
        group = Crew(self.rank, n).require_group()
        meeting = Meeting(group=group, members=tuple(range(n)), weights=(1.0,) * n, rank=self.rank)
        optimiser = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

        def step(number: int) -> None:
            optimiser.step()
            if number % self.case.every == 0:
                flat.write(mean.of(flat.read(), meeting))

        return self._stepwise(step, optimiser)

    def _post_local_sgd(self) -> dict[str, Any]:
        """torch's own, with its averager."""
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        averager = PeriodicModelAverager(period=self.case.every, warmup_steps=0)
        inner = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        optimiser = PostLocalSGDOptimizer(inner, averager)
        return self._stepwise(lambda number: optimiser.step(), inner)  # type: ignore[no-untyped-call]

    def _stepwise(self, step: Any, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        distributed.barrier()
        index: Any = range(self.case.pictures)
        for number in range(1, self.case.steps + 1):
            optimiser.zero_grad()
            torch.autograd.backward(self.loss_of(self.module, index, 0)["loss"])
            step(number)
        return self._took()


def take_part(kind: type[Cases] = Cases, trainer: type[Trainer] = Trainer) -> None:
    """Run all cases as one trainer; `said-RANK.json` has what they took."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    cases = msgspec.json.decode((folder / "cases.json").read_bytes(), type=kind)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{cases.hosts[0]}:{cases.port}", rank=rank,
        world_size=cases.trainers, timeout=timedelta(seconds=600),
    )  # fmt: skip
    said = {}
    for case in cases.cases:
        distributed.barrier()
        said[case.name] = trainer(case, cases, rank, folder).run()
        (folder / f"said-{rank}.json").write_bytes(msgspec.json.encode(said))
        if rank == 0:
            print(case.name, flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def seconds(name: str, said: Sequence[Mapping[str, Any]]) -> float:
    """From the first step of any trainer to the end of the last."""
    took = [trainer[name] for trainer in said if trainer[name]]
    return float(max(one["end_s"] for one in took) - min(one["first_s"] for one in took))


if __name__ == "__main__":
    take_part()
