"""Seconds of a step of a real pipeline of three stages, beside what is predicted.

    sudo python -m benchmarks.crew.stage_seconds

Three trainers in the namespaces of `benchmarks.crew.net`, 20 Mbit/s a cable, train a ViT of 12
blocks of width 48 at 128 px, 64 random pictures in 8 micro-batches, for six steps. Computing is
played: after each block a trainer sleeps its seconds of a picture, forward, and twice these
backward. What is sent between the stages, their order and their waiting are real. Trainers of one
pace with four blocks each, and one of twice the others' pace with six; all micro-batches in flight
that never wait, and one at each stage. A step is the mean of all but the first. Predicted is what
`crew plan` predicts from each trainer's pace, measured alone in one process, and the rate of the
cables. Needs root and iproute2. Writes benchmarks/results/crew-stage-seconds.json.
"""

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, TCPStore
from torch.nn import functional as F

from benchmarks.crew.net import MBIT, namespaces
from benchmarks.crew.played import PLAYED
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.jobs.pipeline import (
    Cut,
    Pipeline,
    StageGroups,
    StagePictures,
    default_group,
    part_of,
    stage_of,
)
from partitioner.crew.planning.facts import Facts, Line, Trainer
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.syncplan import NetworkSync, Stage
from partitioner.crew.planning.work import NetworkWork
from partitioner.data.variants import Labels
from partitioner.networks.teacher import Teacher, build_teacher, teacher_spec
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherSchedule
from partitioner.training.distributed import Crew
from partitioner.training.loop import TrainingStage, fit

RESULT = RESULTS / "crew-stage-seconds.json"
NAMES = ("desktop", "tower", "nuc")
SIDE, WIDTH, TOKENS, CLASSES = 128, 48, 65, 10
BATCH, MICRO_BATCHES, STEPS, PORT = 64, 8, 6, 29500
SPEC = teacher_spec("vit_tiny_patch16_224", {"img_size": SIDE, "embed_dim": WIDTH, "num_heads": 1})
#: Seconds that a block's forward pass of a picture takes a trainer of pace 1.
FORWARD_S = 0.0025


class Paced(NamedTuple):
    """Paces of the trainers, and the blocks of each."""

    paces: tuple[float, ...]
    blocks: tuple[int, ...]


CASES = (Paced((1.0, 1.0, 1.0), (4, 4, 4)), Paced((2.0, 1.0, 1.0), (6, 3, 3)))
IN_FLIGHT = ((3, 2, 1), (1, 1, 1))


def play(teacher: Teacher, pace: float) -> None:
    """Sleep after each block, in both passes."""

    def slept(_: nn.Module, __: Any, tokens: Tensor) -> Tensor:
        seconds = FORWARD_S / pace * len(tokens)
        return PLAYED(tokens, seconds, 2 * seconds)

    network: Any = teacher.network
    for block in network.blocks:
        if not isinstance(block, nn.Identity):
            block.register_forward_hook(slept)


class Timed(Pipeline):
    """A stage that notes when its steps end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: list[float] = []

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Take a step."""
        norm = super().update(optimiser)
        self.ended.append(time.monotonic())
        return norm


def stage_pictures() -> StagePictures:
    """Random pictures and labels."""
    drawn, count = np.random.default_rng(0), STEPS * BATCH
    return StagePictures(
        pixels=[drawn.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)],
        labels=[Labels(drawn.integers(0, CLASSES, count), CLASSES, None)],
        batch_size=BATCH, label_smoothing=0.1, classes=CLASSES, side=SIDE, autocast="fp32",
    )  # fmt: skip


def alone_s(pace: float) -> float:
    """Seconds of a step of the whole network in one process."""
    teacher = build_teacher(SPEC, CLASSES, pretrained=False)
    play(teacher, pace)
    pictures, took = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE)).float(), list[float]()
    optimiser = torch.optim.AdamW(teacher.parameters(), lr=1e-4)
    for _ in range(3):
        begun_s = time.monotonic()
        loss = F.cross_entropy(teacher(pictures), torch.zeros(BATCH, dtype=torch.long))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        took.append(time.monotonic() - begun_s)
    return sum(took[1:]) / len(took[1:])


def train(rank: int, paced: Paced, in_flight: int) -> float:
    """Train one stage; seconds of a step."""
    torch.set_num_threads(1)
    count = len(NAMES)
    store = TCPStore("10.77.0.1", PORT, count, rank == 0, timedelta(seconds=600))
    group = ProcessGroupGloo(store, rank, count, timedelta(seconds=600))
    crew = Crew(rank, count, cast(ProcessGroup, group))
    cut = Cut(blocks=paced.blocks, index=rank, micro_batches=MICRO_BATCHES, in_flight=in_flight)
    torch.manual_seed(1)
    state = build_teacher(SPEC, CLASSES, pretrained=False).state_dict()
    own = {name: value for name, value in state.items() if stage_of(name, cut.blocks) == rank}
    module, between = part_of(SPEC, CLASSES, cut, own)
    play(module, paced.paces[rank])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint.pt")
        groups = StageGroups(crew=crew, pipeline=crew, ranks=tuple(range(count)))
        sync = Timed(groups, cut, stage_pictures(), between, checkpoint)
        schedule = TeacherSchedule(epochs=1, batch_size=BATCH, learning_rate=1e-4)
        stage = TrainingStage(
            name="teacher", pictures=STEPS * BATCH, schedule=schedule, seed=3, autocast="fp32",
            checkpoint=checkpoint, sync=sync,
        )  # fmt: skip
        with default_group(crew):
            fit(module, stage, sync.loss_of, Progress(io.StringIO()))
    return (sync.ended[-1] - sync.ended[0]) / (STEPS - 1)


def predicted_s(paced: Paced, in_flight: Sequence[int], alone: dict[float, float]) -> float:
    """Seconds of a step as `crew plan` predicts them."""
    rate = MBIT * 1e6 / 8
    trainers = tuple(
        Trainer(
            name=name,
            address=f"10.77.0.{place}",
            pictures_per_s={"teacher": BATCH / alone[pace]},
            memory_bytes=10**10,
        )
        for place, (name, pace) in enumerate(zip(NAMES, paced.paces, strict=True), 1)
    )
    lines = tuple(
        Line(a=a, b=b, latency_s=0.0, bytes_per_s=rate, back_bytes_per_s=rate)
        for place, a in enumerate(NAMES)
        for b in NAMES[place + 1 :]
    )
    network = NetworkWork(
        name="teacher", size_bytes=1e6, pictures=STEPS * BATCH, epochs=1, batch=BATCH,
        boundary_bytes=4 * TOKENS * WIDTH, blocks=sum(paced.blocks),
    )  # fmt: skip
    stages = tuple(
        Stage(blocks=blocks, by=name, in_flight=limit)
        for blocks, name, limit in zip(paced.blocks, NAMES, in_flight, strict=True)
    )
    sync = NetworkSync(name="teacher", micro_batches=MICRO_BATCHES, stage=stages)
    method = Methods(Facts(trainer=trainers, line=lines)).predict(network, sync)
    assert method is not None
    return BATCH / method.pictures_per_s


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    alone = {pace: alone_s(pace) for pace in (1.0, 2.0)}
    rows = list[dict[str, Any]]()
    with namespaces(len(NAMES)) as names:
        for paced, limits in product(CASES, IN_FLIGHT):
            started = [
                subprocess.Popen(
                    [
                        "ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=eth0",
                        sys.executable, "-m", "benchmarks.crew.stage_seconds",
                        str(rank), str(CASES.index(paced)), str(limit),
                    ],
                    stdout=subprocess.PIPE,
                )
                for rank, (name, limit) in enumerate(zip(names, limits, strict=True))
            ]  # fmt: skip
            said = [process.communicate()[0] for process in started]
            if any(process.returncode for process in started):
                raise SystemExit("a trainer failed")
            rows.append({
                "paces": paced.paces,
                "blocks": paced.blocks,
                "in flight": limits,
                "alone_s": [alone[pace] for pace in paced.paces],
                "measured_s": max(map(float, said)),
                "predicted_s": predicted_s(paced, limits, alone),
            })  # fmt: skip
            print(rows[-1], flush=True)
    machine = describe_machine()
    write_json(RESULT, {"machine": machine, "link_mbit_per_s": MBIT, "rows": rows})
    PAGE.write()


def figures() -> str:
    """A row for each training."""
    return table(
        read_result(RESULT.stem)["rows"],
        ("paces", lambda row: " : ".join(f"{pace:g}" for pace in row["paces"])),
        ("blocks", lambda row: ", ".join(map(str, row["blocks"]))),
        ("in flight", lambda row: ", ".join(map(str, row["in flight"]))),
        ("each alone, s", lambda row: ", ".join(f"{one:.1f}" for one in row["alone_s"])),
        ("predicted, s", "{predicted_s:.2f}"),
        ("measured, s", "{measured_s:.2f}"),
        ("predicted, of measured", lambda row: f"{row['predicted_s'] / row['measured_s']:.2f}"),
    )


PAGE = Page("benchmarks.crew.stage_seconds", figures)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank, place, limit = map(int, sys.argv[1:])
        print(train(rank, CASES[place], limit))
    else:
        main()
