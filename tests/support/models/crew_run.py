"""One process of a training together: `desk FOLDER DATA` or `join ADDRESS NAME FOLDER DATA`.

`dying` joins and is interrupted before it writes its second checkpoint.
"""

from pathlib import Path
from unittest import mock

from msgspec.structs import replace

from mdp.formats.plan import Plan
from partitioner.crew.desk import join
from partitioner.crew.folder import token_of
from partitioner.pipeline import owned, train_step
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run_setup import open_pictures
from partitioner.training import checkpoint
from partitioner.training.compute import use_threads
from tests.support.models.runs import asked, tiny_plan

DEPTH = 3


def deeper_plan() -> Plan:
    """The tiny plan with a teacher of three blocks."""
    plan = tiny_plan()
    teacher = plan.require_teacher()
    shape = replace(teacher.shape, depth=DEPTH)
    deeper = replace(teacher, args={**teacher.args, "depth": DEPTH}, shape=shape)
    return replace(plan, teacher=deeper)


def interrupt(*args: object) -> None:
    """End as with Ctrl-C."""
    raise KeyboardInterrupt


def main(kind: str, *args: str) -> None:
    """Be the desk, or join it."""
    use_threads(1)
    if kind == "desk":
        folder, data = Path(args[0]), args[1]
        wanted = asked(data, seed=1)
        run = RunFolder(folder / "run")
        with owned(run):
            train_step(
                run, deeper_plan(), open_pictures(wanted), wanted, Progress(), crew=folder / "crew"
            )
    else:
        address, name, run_folder, data = args
        token = token_of(Path(run_folder).parent / "crew" / "crew.key")
        if kind == "dying":
            saved = mock.Mock(side_effect=[checkpoint.save, interrupt])
            mock.patch("partitioner.training.loop.save", lambda *given: saved()(*given)).start()
        join(address, name, token, data, Path(run_folder), Progress(), wait_s=180.0)
