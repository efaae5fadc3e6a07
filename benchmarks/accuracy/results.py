"""accuracy.json: what it holds, and how two processes may write it side by side."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.timed import Task
from benchmarks.rivals.outcome import Subset
from mdp.errors import InputError
from mdp.files import Record, read_json, write_json
from mdp.formats.plan import SubModelSpec
from partitioner.run.settings import differences


class TeacherResult(Record, frozen=True):
    """The one teacher of all runs, on the test and calibration splits."""

    accuracy: float
    calibration: float
    sha256: str
    tasks: list[Task]


class Latency(Record, frozen=True):
    """Milliseconds of one picture in onnxruntime, one thread, by the shape's name."""

    machine: dict[str, Any]
    rounds: int
    teacher_ms: float
    shapes_ms: dict[str, float]


class Choice(Record, frozen=True):
    """What is tuned: the step size, and for a single model which candidate it is."""

    learning_rate: float
    candidate: int = 0


class Trial(Record, frozen=True):
    """One choice and how right it was, all in, on the calibration split with seed 0."""

    choice: Choice
    calibration: float


class Tuning(Record, frozen=True):
    """Every choice that was tried for a method; variations of ours take ours'."""

    method: str
    trials: list[Trial]

    @property
    def chosen(self) -> Choice:
        """The best on calibration; of equals the first."""
        return max(self.trials, key=lambda trial: trial.calibration).choice


class Run(Record, frozen=True):
    """One method with one seed; accuracies are fractions of the test split."""

    method: str
    seed: int
    choice: Choice
    #: Digest of everything that the outcome depends on.
    made_of: str
    settings: dict[str, Any]
    members: list[SubModelSpec]
    alone: list[float]
    subsets: list[Subset]
    headline: str
    calibration: float
    tasks: list[Task]
    #: Sum of the tasks: all that the method does beyond the seed's views and teacher's answers.
    train_s: float
    train_cpu_s: float
    #: Processor time of it all over that of the largest member's own training.
    cost_ratio: float | None
    notes: dict[str, str]


class Results(Record, frozen=True):
    machine: dict[str, Any]
    configuration: dict[str, Any]
    teacher: TeacherResult | None = None
    latency: Latency | None = None
    tuning: tuple[Tuning, ...] = ()
    runs: tuple[Run, ...] = ()

    def run(self, method: str, seed: int) -> Run | None:
        return next((r for r in self.runs if (r.method, r.seed) == (method, seed)), None)

    def chosen(self, method: str) -> Choice | None:
        return next((tuning.chosen for tuning in self.tuning if tuning.method == method), None)

    def with_run(self, run: Run) -> "Results":
        """With one more run, which takes the place of an older one."""
        others = [r for r in self.runs if (r.method, r.seed) != (run.method, run.seed)]
        return msgspec.structs.replace(self, runs=(*others, run))

    def with_trial(self, method: str, trial: Trial) -> "Results":
        """With one more trial of a method."""
        known = next((t.trials for t in self.tuning if t.method == method), [])
        trials = [t for t in known if t.choice != trial.choice] + [trial]
        others = [t for t in self.tuning if t.method != method]
        tuning = Tuning(method=method, trials=trials)
        return msgspec.structs.replace(self, tuning=(*others, tuning))


class ResultsFile:
    """accuracy.json of one configuration; others are refused."""

    def __init__(self, path: Path, lock: Path, configuration: dict[str, Any]) -> None:
        self.path, self._lock = path, lock
        self._new = Results(machine=describe_machine(), configuration=configuration)

    def read(self) -> Results:
        """The file, or an empty one; raises InputError if it is about something else."""
        if not self.path.is_file():
            return self._new
        there = read_json(self.path, Results)
        changed = differences(there.configuration, self._new.configuration)
        if changed:
            raise InputError(
                f"{self.path}: made with another configuration: {changed} (give another --out)"
            )
        return there

    def change(self, to: Callable[[Results], Results]) -> Results:
        """Read, change and write, while no other process does."""
        with locked(self._lock):
            changed = to(self.read())
            write_json(self.path, changed)
        return changed


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock `path`, and hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock `path` if nobody does; says whether."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
