"""Measures the facts that a plan of a crew needs: paces of trainers, latency and rate of links.

Real optimiser steps on random pictures, and real messages; no picture of the user is read.
Paces are measured by all at once, lines one after another.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mdp.formats.plan import Plan
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.bus.address import own_address
from partitioner.crew.bus.control import CoordinatorClient
from partitioner.crew.bus.store import SignedStore
from partitioner.crew.coordinator.jobs import Job
from partitioner.crew.messages import Made
from partitioner.crew.planning.facts import ANSWERS, Facts, Line, Trainer, tournament
from partitioner.crew.worker.worker import next_job
from partitioner.networks.members import build_member
from partitioner.networks.submodel import Member
from partitioner.networks.teacher import Teacher, build_teacher
from partitioner.run.settings import Autocast, Settings
from partitioner.training.cached_outputs import batch
from partitioner.training.compute import memory_bytes, training_device

Clock = Callable[[], float]
#: Steps that are not timed, and those that are.
WARM_UP, TIMED = 3, 5
#: Messages for the latency and the rate of a link.
PINGS, PING_BYTES, LOADS, LOAD_BYTES = 20, 8, 3, 1_000_000


class LineSpeed(NamedTuple):
    """One link as seen from one end: seconds of a message one way, bytes a second out and in."""

    latency_s: float
    out_bytes_s: float
    in_bytes_s: float


def training_pace(
    network: Member | Teacher, image_size: int, batch_size: int, autocast: Autocast,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Pictures a second of forward, backward and AdamW on batches of `batch_size`."""
    network = network.to(training_device()).train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-6)
    pixels = _pixels(batch_size, image_size)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=pixels.device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with _arithmetic(autocast):
            loss = F.cross_entropy(_logits(network, pixels).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return batch_size / _seconds(step, clock)


def answering_pace(
    network: Member | Teacher, image_size: int, batch_size: int, autocast: Autocast,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Pictures a second of a frozen network."""
    network = network.to(training_device()).eval()
    pixels = _pixels(batch_size, image_size)

    def step() -> None:
        with torch.inference_mode(), _arithmetic(autocast):
            _logits(network, pixels)

    return batch_size / _seconds(step, clock)


def _logits(network: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    if isinstance(network, Member):
        return network.of_normalised(network.normalise(pixels)).bag
    logits: torch.Tensor = network(pixels)
    return logits


def _pixels(batch_size: int, image_size: int) -> torch.Tensor:
    """Random pictures as a training gets them: their layout decides which kernels are timed."""
    shape = (batch_size, image_size, image_size, 3)
    drawn = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return batch(drawn, np.arange(batch_size), training_device())


def _arithmetic(autocast: Autocast) -> torch.autocast:
    return torch.autocast(training_device().type, torch.bfloat16, enabled=autocast == "bf16")


def _seconds(step: Callable[[], None], clock: Clock) -> float:
    """Median seconds of a step."""
    device = training_device()

    def step_s() -> float:
        started_s = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - started_s

    return statistics.median([step_s() for _ in range(WARM_UP + TIMED)][WARM_UP:])


def line_speed(group: Any, rank: int, clock: Clock = time.perf_counter) -> LineSpeed:
    """The link of the two trainers of a gloo `group`; both call it, `rank` is the own one in it."""
    ping, load = (torch.zeros(count, dtype=torch.uint8) for count in (PING_BYTES, LOAD_BYTES))

    def trip(out: torch.Tensor, back: torch.Tensor) -> float:
        started_s = clock()
        for mine, message in ((rank == 0, out), (rank != 0, back)):
            if mine:
                group.send([message], 1 - rank, 0).wait()
            else:
                group.recv([message], 1 - rank, 0).wait()
        return clock() - started_s

    pings_s = [trip(ping, ping) for _ in range(PINGS)]
    latency_s = statistics.median(pings_s) / 2
    rates = []
    for out, back in ((load, ping), (ping, load)):
        trip_s = min(trip(out, back) for _ in range(LOADS))
        # Of a busy machine any trip may be quicker than another one of an empty message.
        rates.append(LOAD_BYTES / max(trip_s - min(pings_s), trip_s / 10))
    return LineSpeed(latency_s, *(rates if rank == 0 else reversed(rates)))


class TrainerSaid(msgspec.Struct, frozen=True):
    """A trainer's measurements of itself."""

    address: str
    memory_bytes: int
    pictures_per_s: dict[str, float]


def probe_jobs(names: Sequence[str]) -> list[Job]:
    """Paces, by each trainer; then the line of every two, in the rounds of a tournament."""
    jobs = [Job(name=f"pace:{name}", by=(name,)) for name in names]
    before = tuple(job.name for job in jobs)
    for pairs in tournament(names):
        for a, b in pairs:
            jobs.append(Job(name=f"line:{a}:{b}", by=(a, b), after=before))
            before = (jobs[-1].name,)
    return jobs


def measure(
    control: CoordinatorClient,
    groups: TrainerGroups,
    store: SignedStore,
    plan: Plan,
    settings: Settings,
) -> None:
    """Do the jobs of a probe as the coordinator gives them out; raises RunRefused."""
    while (start := next_job(control)) is not None:
        _, *names = start.network.split(":")
        said = b"null"
        keys = [f"rank/{name}" for name in names]
        ranks = [int(store.get(key)) for key in keys] if store.check(keys) else []
        if ranks == [control.rank]:
            address, _, _ = own_address(*control.address).partition("%")
            memory = memory_bytes(training_device())
            said = msgspec.json.encode(TrainerSaid(address, memory, paces_of(plan, settings)))
        elif control.rank in ranks:
            with suppress(RuntimeError):  # of gloo: the other one is lost
                group = groups.of(start.network, 0, ranks)
                said = msgspec.json.encode(line_speed(group, ranks.index(control.rank)))
            if control.rank == ranks[1]:
                said = b""  # the first one's view counts
        control.report(Made(rank=control.rank, network=start.network, said=said.decode()))


def paces_of(plan: Plan, settings: Settings) -> dict[str, float]:
    """Pictures a second of this device for every network that is trained, and for answers."""
    classes, autocast = settings.data.classes, settings.autocast
    spec = plan.require_teacher()
    teacher = build_teacher(spec, classes, pretrained=False)
    side, batch = spec.shape.image_size, settings.teacher_schedule.batch_size
    found = {ANSWERS: answering_pace(teacher, side, batch, autocast)}
    if settings.teacher_schedule.epochs:
        found["teacher"] = training_pace(teacher, side, batch, autocast)
    del teacher
    for a in plan.assignments:
        member = build_member(a.spec, classes, boosting=settings.schedule.boosting)
        side, batch = a.spec.image_size, settings.schedule.batch_size
        found[f"member-{a.k}"] = training_pace(member, side, batch, autocast)
    return found


def facts_of(names: Sequence[str], address: str, said: Mapping[str, str]) -> Facts:
    """The facts of what was said of a probe's jobs; the coordinator listens on `address`."""
    trainers: list[Trainer] = []
    for name in names:
        own = msgspec.json.decode(said.get(f"pace:{name}", "null"), type=TrainerSaid | None)
        if own is None:
            continue
        where = address if name == names[0] else own.address
        trainers.append(
            Trainer(
                name=name,
                address=where,
                memory_bytes=own.memory_bytes,
                pictures_per_s={what: _round(rate) for what, rate in own.pictures_per_s.items()},
            )
        )
    lines = []
    known = {trainer.name for trainer in trainers}
    for job, text in said.items():
        kind, *pair = job.split(":")
        if kind == "line" and known.issuperset(pair):
            a, b = pair
            speed = msgspec.json.decode(text, type=LineSpeed | None)
            if speed is None:
                continue
            lines.append(
                Line(
                    a=a,
                    b=b,
                    latency_s=_round(speed.latency_s),
                    bytes_per_s=_round(speed.out_bytes_s),
                    back_bytes_per_s=_round(speed.in_bytes_s),
                )
            )
    return Facts(trainer=tuple(trainers), line=tuple(lines))


def _round(value: float) -> float:
    """Round to four digits, as the file is read by people."""
    return float(f"{value:.4g}")
