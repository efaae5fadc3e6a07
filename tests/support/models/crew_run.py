"""One process of a training together: `coordinator FOLDER DATA` or `join ADDRESS NAME FOLDER DATA`.

`dying` joins and is interrupted before it writes its second checkpoint. Beside a file `by-two`
no pass of two variants is computed by one process alone.
"""

import os
from pathlib import Path
from unittest import mock

from msgspec.structs import replace

from mdp.formats.plan import Plan
from mdp.testing.processes import until
from partitioner.build.inputs import TrainingInputs
from partitioner.build.train import train_plan
from partitioner.crew.folder import token_of
from partitioner.crew.jobs.answers import FrozenPass
from partitioner.crew.messages import Chunk
from partitioner.crew.run import join
from partitioner.data.memmaps import Array
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.training import checkpoint
from partitioner.training.compute import use_threads
from partitioner.training.distributed import lock_run
from tests.support.models.runs import CHAINED, config_of, tiny_plan

DEPTH = 3


def deeper_plan(data: Path) -> Plan:
    """The tiny plan with a teacher of three blocks; of a camera each for `write_scenes`."""
    plan = tiny_plan()
    if any(data.glob("*/*/left.png")):
        pairs = zip(plan.assignments, ("left", "right"), strict=True)
        plan = replace(plan, assignments=[replace(a, camera=camera) for a, camera in pairs])
    teacher = plan.require_teacher()
    shape = replace(teacher.shape, depth=DEPTH)
    deeper = replace(teacher, args={**teacher.args, "depth": DEPTH}, shape=shape)
    return replace(plan, teacher=deeper)


def compute_by_two(folder: Path) -> None:
    """Hold a process's chunk of a pass until another one has a chunk, too."""
    compute = FrozenPass.rows

    def rows(work: FrozenPass, chunk: Chunk) -> list[Array]:
        if len(work.variants) > 1:
            (folder / f"{work.name}-{os.getpid()}").touch()
            until(lambda: len([*folder.glob(f"{work.name}-*")]) > 1, "another process", 180.0)
        return compute(work, chunk)

    mock.patch.object(FrozenPass, "rows", rows).start()


def training(run: RunFolder, data: Path, progress: Progress, crew: Path | None = None) -> None:
    """Train the plan in `run`, alone or as the coordinator of a crew."""
    plan = deeper_plan(data)
    chained = {"teacher_views": "fused"} if plan.cameras else CHAINED
    wanted = config_of(data, seed=1, schedule={"chain": "star", **chained})
    with lock_run(run):
        train_plan(TrainingInputs.of_plan(wanted, plan), plan, run, progress, crew=crew)


def interrupt(*args: object) -> None:
    """End as with Ctrl-C."""
    raise KeyboardInterrupt


def main(kind: str, *args: str) -> None:
    """Be the coordinator, or join it."""
    use_threads(1)
    shared = Path(args[0]) if kind == "coordinator" else Path(args[2]).parent
    if (shared / "by-two").exists():
        compute_by_two(shared)
    if kind == "coordinator":
        folder = Path(args[0])
        training(RunFolder(folder / "run"), Path(args[1]), Progress(), folder / "crew")
    else:
        address, name, run_folder, data = args
        token = token_of(Path(run_folder).parent / "crew" / "crew.key")
        if kind == "dying":
            saved = mock.Mock(side_effect=[checkpoint.save, interrupt])
            mock.patch("partitioner.training.loop.save", lambda *given: saved()(*given)).start()
        join(address, name, token, data, Path(run_folder), Progress(), wait_s=180.0)
