"""Progress that also keeps how long each task took, over all the times that it was taken up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mdp.files import Record, read_json, write_json
from partitioner.run.progress import Advance, Progress

#: Seconds between two writings while a task runs: at most as much is lost to a killed process.
_EVERY_S = 10.0


class Task(Record, frozen=True):
    """Seconds of one task: on the wall, and of the processor in all threads of the process."""

    what: str
    wall_s: float
    cpu_s: float


class _Kept(Record, frozen=True):
    tasks: list[Task]


class TimedProgress(Progress):
    """Adds up the time of every task in a file, so that interrupted work counts in full."""

    def __init__(self, path: Path, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._path = path
        kept = read_json(path, _Kept).tasks if path.is_file() else []
        self._tasks = {task.what: task for task in kept}

    @property
    def tasks(self) -> list[Task]:
        """Everything that was done so far, in order."""
        return list(self._tasks.values())

    @contextmanager
    def task(self, what: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """Follow a task and add its time to what it took before."""
        before = self._tasks.get(what, Task(what=what, wall_s=0.0, cpu_s=0.0))
        wall_s, cpu_s = time.monotonic(), time.process_time()
        written_s = wall_s

        def keep() -> None:
            self._tasks[what] = Task(
                what=what,
                wall_s=before.wall_s + time.monotonic() - wall_s,
                cpu_s=before.cpu_s + time.process_time() - cpu_s,
            )
            write_json(self._path, _Kept(tasks=self.tasks))

        try:
            with super().task(what, total, done=done) as advance:

                def keeping(more: int, said: str) -> None:
                    nonlocal written_s
                    advance(more, said)
                    if time.monotonic() - written_s >= _EVERY_S:
                        written_s = time.monotonic()
                        keep()

                yield keeping
        finally:
            keep()
