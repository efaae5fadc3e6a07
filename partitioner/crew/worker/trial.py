"""Trials of a tuning: a few real steps of each candidate, by the crew that it is for.

The training's own loop, synchronisers, groups and meetings, with the network's loss on random
pictures of one batch; no picture of the user is read, and nothing is kept of what is trained.
"""

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.formats.plan import Plan
from partitioner.crew.averaging.generations import train_in_generations
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.averaging.parameters import CrewEnded
from partitioner.crew.bus.control import CoordinatorClient, RunRefused
from partitioner.crew.bus.store import SignedStore
from partitioner.crew.messages import AnyAction, AnyEvent, Commit, Made, Ready, TrainerControl
from partitioner.crew.planning.costs import member_index
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import NetworkSync, SyncPlan
from partitioner.crew.planning.tuning import TIMED, WARM_UP, Part, RoundTime, StepTime, trial_name
from partitioner.crew.worker.crews import Crews
from partitioner.crew.worker.progress import ControlAround, WorkAccount
from partitioner.crew.worker.worker import next_job
from partitioner.data.memmaps import Views
from partitioner.data.variants import Labels
from partitioner.networks.members import build_member
from partitioner.networks.teacher import build_teacher
from partitioner.run.settings import Autocast, Schedule, Settings
from partitioner.training.cached_outputs import batch, device_of
from partitioner.training.distributed import Crew
from partitioner.training.loop import BatchLoss, Index, TrainingStage, derive_seed, take_steps
from partitioner.training.student import DistillationTargets, MemberLoss, Student
from partitioner.training.synchroniser import Synchroniser

Clock = Callable[[], float]
#: Peak step size, at which weights stay what they are.
_RATE = 1e-6


class RoundClock(ControlAround):
    """A trainer's end of the control that notes its rounds."""

    def __init__(self, control: TrainerControl, clock: Clock) -> None:
        super().__init__(control)
        self._clock = clock
        #: Times at which means were committed, each with the own pictures before it and the time of
        #: the last of them.
        self._commits: list[tuple[float, int, float]] = []
        self._pictures, self._stepped_s = 0, 0.0

    def report(self, event: AnyEvent) -> None:
        """Append to the log."""
        if isinstance(event, Ready):
            self._pictures, self._stepped_s = event.pictures, self._clock()
        super().report(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action for this trainer, None when there is none within `timeout_s`."""
        action = super().poll(timeout_s)
        if isinstance(action, Commit):
            self._commits.append((self._clock(), self._pictures, self._stepped_s))
            self._pictures = 0
        return action

    def last_round(self) -> RoundTime:
        """The last round; where steps are too short to be told when to meet, that is the first."""
        (began_s, *_), (ended_s, pictures, stepped_s) = self._commits[-2:]
        busy_s = stepped_s - began_s if pictures else 0.0
        return RoundTime(pictures, busy_s, ended_s - began_s)


class Drawn(NamedTuple):
    """A network with new weights, its loss on random pictures, and its schedule."""

    module: nn.Module
    loss_of: BatchLoss
    schedule: Schedule
    autocast: Autocast = "fp32"


def try_candidates(
    trials: Sequence[NetworkSync],
    facts: Facts,
    control: CoordinatorClient,
    groups: TrainerGroups,
    store: SignedStore,
    draw: Callable[[str], Drawn],
    clock: Clock = time.perf_counter,
) -> None:
    """Do the jobs of a tuning as the coordinator gives them out; raises RunRefused.

    draw: makes a network by its name, the same on all trainers.
    """
    account = WorkAccount(lambda: control.bytes_sent)
    control.state = account.state
    of_job = {trial_name(number): sync for number, sync in enumerate(trials)}
    while (start := next_job(control)) is not None:
        said = "{}"
        if (sync := of_job.get(start.network)) is not None:
            crews = Crews(
                plan=SyncPlan(network=(sync,)), facts=facts, control=control, groups=groups,
                store=store, account=account, job=start.network,
            )  # fmt: skip
            account.begin(start.network)
            try:
                part = _try(sync, crews, draw(sync.name), clock)
            except CrewEnded as ended:
                raise RunRefused(str(ended)) from ended
            account.end()
            groups.close()
            gc.collect()  # a wrapped network is in a cycle: its memory is the next one's
            said = msgspec.json.encode(part).decode()
        control.report(Made(rank=control.rank, network=start.network, said=said))


def _try(sync: NetworkSync, crews: Crews, drawn: Drawn, clock: Clock) -> Part:
    """Take the steps of one candidate; raises CrewEnded."""
    schedule = drawn.schedule
    with tempfile.TemporaryDirectory() as folder:
        never = Path(folder, "checkpoint.pt")

        def steps(to_meet: Synchroniser) -> list[float]:
            """Times at the ends of the own steps."""
            stage = TrainingStage(
                name=f"tuning {sync.name}",
                pictures=(WARM_UP + TIMED) * schedule.batch_size,
                schedule=replace(schedule, epochs=1, learning_rate=_RATE),
                seed=0,
                autocast=drawn.autocast,
                checkpoint=never,
                sync=to_meet,
            )
            ends: list[float] = []

            def report(loss: float, pictures: int) -> None:
                ends.append(clock())
                crews.account.step(len(ends) / (WARM_UP + TIMED), sync.name)

            take_steps(drawn.module, stage, drawn.loss_of, report)
            return ends

        if sync.what == "parameters":
            clocked = RoundClock(crews.control, clock)
            steps(dataclasses.replace(crews, control=clocked).rounds(sync.name))
            return clocked.last_round()
        ends: list[float] = []

        def train(crew: Crew, members: tuple[int, ...]) -> None:
            ends[:] = steps(crews.gradients(sync.name, crew, members))

        train_in_generations(crews.job, crews.control, crews.groups, never, train)
    took = np.diff(ends)[WARM_UP - 1 :]
    return StepTime(statistics.median(took.tolist()))


def draw_network(plan: Plan, settings: Settings, name: str) -> Drawn:
    """A network of a plan.

    Sub-models learn as the first one does, from labels and a teacher's answers.
    """
    torch.manual_seed(derive_seed(settings.seed, "tuning"))
    classes, k = settings.data.classes, member_index(name)
    if k is None:
        spec, teaching = plan.require_teacher(), settings.teacher_schedule
        pixels = _pixels(teaching.batch_size, spec.shape.image_size)
        labels = Labels(np.zeros(teaching.batch_size, dtype=np.int64), classes)

        def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
            here, device = index % len(pixels), device_of(network)
            logits = network(batch(pixels, here, device)).float()
            smoothing = teaching.label_smoothing
            wanted = labels[here].to(device)
            return {"loss": F.cross_entropy(logits, wanted, label_smoothing=smoothing)}

        teacher = build_teacher(spec, classes, pretrained=False)
        return Drawn(teacher, loss_of, teaching, settings.autocast)
    schedule, member = settings.schedule, plan.assignments[k].spec
    count = schedule.batch_size
    targets = DistillationTargets(
        pixels=[_pixels(count, member.image_size)],
        labels=[Labels(np.zeros(count, dtype=np.int64), classes)],
        teacher=[np.zeros((count, classes), dtype=np.float16)],
        before=[],
        imitated=[],
    )
    of_batch = MemberLoss(targets, schedule)
    student = Student(build_member(member, classes, boosting=schedule.boosting))

    def of_any(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        return of_batch(network, index % count, epoch)

    return Drawn(student, of_any, schedule, settings.autocast)


def _pixels(count: int, side: int) -> Views:
    """Random pictures `[count, side, side, 3]`, the same on all trainers."""
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
