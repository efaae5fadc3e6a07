"""Memory of a real pipeline of three stages beside what is predicted, at two depths in flight.

    python -m benchmarks.crew.stages

Three processes on loopback train ViTs of 192 x 12 and 384 x 12 at 224 px, 64 and 32 random pictures
in 8 micro-batches, four blocks each, for two steps in bf16 and in fp32: with all micro-batches in
flight that never waits (3, 2, 1), and with one at each stage. Of each process the greatest resident
memory of its training is taken, less what it had before it made its stage: the kernel's own mark
(`VmHWM`), reset then. Predicted is what `crew plan` and the refusals of crew.toml count, whose
constants were fitted to the smaller network. Computing is real; no time is measured. Writes
benchmarks/results/crew-stages.json.
"""

import io
import subprocess
import sys
import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, TCPStore

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.formats.plan import TeacherSpec
from partitioner.crew.jobs.pipeline import (
    Cut,
    Pipeline,
    StageGroups,
    StagePictures,
    default_group,
    part_of,
    stage_of,
)
from partitioner.crew.planning.costs import Arithmetic, activation_bytes
from partitioner.crew.planning.work import NetworkWork
from partitioner.data.variants import Labels
from partitioner.networks.teacher import build_teacher, teacher_spec
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherSchedule
from partitioner.training.distributed import Crew
from partitioner.training.loop import TrainingStage, fit

RESULT = RESULTS / "crew-stages.json"
SIDE, PATCH, CLASSES = 224, 16, 10
BLOCKS, MICRO_BATCHES, STEPS = (4, 4, 4), 8, 2
IN_FLIGHT = ((3, 2, 1), (1, 1, 1))
AUTOCASTS: tuple[Arithmetic, ...] = ("bf16", "fp32")


class Sized(NamedTuple):
    """A network of 12 blocks, and its batch."""

    name: str
    width: int
    batch: int

    @property
    def spec(self) -> TeacherSpec:
        """The network as a teacher."""
        return teacher_spec(self.name, {})


NETWORKS = (Sized("vit_tiny_patch16_224", 192, 64), Sized("vit_small_patch16_224", 384, 32))


def network_work(sized: Sized, arithmetic: Arithmetic) -> NetworkWork:
    """The network as the planner has it."""
    network = build_teacher(sized.spec, CLASSES, pretrained=False)
    tokens = (SIDE // PATCH) ** 2 + 1
    return NetworkWork(
        name="teacher",
        size_bytes=4 * sum(p.numel() for p in network.parameters()),
        pictures=STEPS * sized.batch,
        epochs=1,
        batch=sized.batch,
        activation_bytes=activation_bytes(1, tokens, sized.width, sum(BLOCKS), arithmetic),
        blocks=sum(BLOCKS),
        picture_bytes=4 * 3 * SIDE**2,
        arithmetic=arithmetic,
    )


def resident(key: str) -> int:
    """Bytes of memory of this process, by a key of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def train(sized: Sized, rank: int, port: int, in_flight: int, autocast: Arithmetic) -> int:
    """Train one stage; bytes of its greatest memory above what was there before."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, len(BLOCKS), rank == 0, timedelta(seconds=600))
    group = ProcessGroupGloo(store, rank, len(BLOCKS), timedelta(seconds=600))
    crew = Crew(rank, len(BLOCKS), cast(ProcessGroup, group))
    cut = Cut(blocks=BLOCKS, index=rank, micro_batches=MICRO_BATCHES, in_flight=in_flight)
    torch.manual_seed(1)
    state = build_teacher(sized.spec, CLASSES, pretrained=False).state_dict()
    own = {name: value for name, value in state.items() if stage_of(name, BLOCKS) == rank}
    del state
    count = STEPS * sized.batch
    drawn = np.random.default_rng(0)
    pictures = StagePictures(
        pixels=[drawn.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)],
        labels=[Labels(drawn.integers(0, CLASSES, count), CLASSES, None)],
        batch_size=sized.batch, label_smoothing=0.1, classes=CLASSES, side=SIDE,
        autocast=autocast,
    )  # fmt: skip
    # Kernels and threads are set up by whatever is computed first.
    weights = torch.ones(8, 8, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.linear(torch.ones(8, 8), weights).sum())
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    module, between = part_of(sized.spec, CLASSES, cut, own)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint.pt")
        groups = StageGroups(crew=crew, pipeline=crew, ranks=tuple(range(len(BLOCKS))))
        sync = Pipeline(groups, cut, pictures, between, checkpoint)
        schedule = TeacherSchedule(epochs=1, batch_size=sized.batch, learning_rate=1e-4)
        stage = TrainingStage(
            name="teacher", pictures=count, schedule=schedule, seed=3,
            autocast=autocast,
            checkpoint=checkpoint, sync=sync,
        )  # fmt: skip
        with default_group(crew):
            fit(module, stage, sync.loss_of, Progress(io.StringIO()))
    return resident("VmHWM") - before


def main() -> None:
    """Measure and write."""
    rows = list[dict[str, Any]]()
    for number, (sized, autocast, limits) in enumerate(product(NETWORKS, AUTOCASTS, IN_FLIGHT)):
        started = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "benchmarks.crew.stages",
                    sized.name, str(rank), str(29600 + number), str(limit), autocast,
                ],
                stdout=subprocess.PIPE,
            )
            for rank, limit in enumerate(limits)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("a trainer failed")
        work = network_work(sized, autocast)
        rows += [
            {
                "network": sized.name,
                "autocast": autocast,
                "in flight": limits,
                "stage": rank,
                "measured": int(answer),
                "predicted": work.stage_bytes(blocks, limit, MICRO_BATCHES, is_first=rank == 0),
            }
            for rank, (answer, blocks, limit) in enumerate(zip(said, BLOCKS, limits, strict=True))
        ]
        print(*rows[-3:], sep="\n", flush=True)
    write_json(RESULT, {"machine": describe_machine(), "rows": msgspec.to_builtins(rows)})
    PAGE.write()


def figures() -> str:
    """A row for each training and stage."""
    return table(
        read_result(RESULT.stem)["rows"],
        ("network", "{network}"),
        ("computed in", "{autocast}"),
        ("in flight", lambda row: ", ".join(map(str, row["in flight"]))),
        ("stage", "{stage}"),
        ("predicted, MB", lambda row: f"{row['predicted'] / 1e6:.0f}"),
        ("measured, MB", lambda row: f"{row['measured'] / 1e6:.0f}"),
        ("predicted, of measured", lambda row: f"{row['predicted'] / row['measured']:.2f}"),
    )


PAGE = Page("benchmarks.crew.stages", figures)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        name, rank, port, limit, given = sys.argv[1:]
        sized = next(one for one in NETWORKS if one.name == name)
        arithmetic = msgspec.convert(given, Arithmetic)
        print(train(sized, int(rank), int(port), int(limit), arithmetic))
    else:
        main()
