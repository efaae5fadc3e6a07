"""Measure this device: plan the points, have each one measured, keep what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devices.probe.child import Failed, Here, Look, MeasureRun, Reply, Request, SustainRun
from devices.probe.encoders import Encoder, complete
from devices.probe.measure import Load, Measured, Run
from devices.probe.schedule import (
    Backend,
    Task,
    backends,
    best_provider,
    is_busy,
    network_point_of,
    point_of,
    quieter,
    tasks,
    typical,
    words_of,
)
from mdp.errors import AgentError
from mdp.extras import install
from mdp.formats.profile import LatencyPoint, NetworkPoint

#: Longer than any point takes, also on a slow board; a process silent for so long hangs.
LIMIT_S = 300.0

#: Providers that compile a model as they load it can take minutes for each.
SLOW_START_MS = 5_000.0

Ask = Callable[[Request, float], Reply]
#: Hears points done, points planned, and what comes next.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How thoroughly to measure."""

    threads: Sequence[int]
    quick: bool = False
    #: Take only so many shapes of the quick ones.
    shapes: int | None = None
    #: Seconds of running per point.
    point_s: float = 0.35
    #: How often every point is measured, the middle one counting, of two middle ones the quicker.
    rounds: int = 1
    #: Seconds of sustained load.
    load_s: float = 5.0
    #: Seconds that may be spent on measuring disturbed points anew.
    again_s: float = 60.0
    #: Others are meant to be busy meanwhile, as agents on the same machine will be.
    shared: bool = False
    #: Threads of one run wait for each other awake.
    spin: bool = False


@dataclass(slots=True)
class Taken:
    """What a probe has so far; an interruption leaves it as it is."""

    planned: int = 0
    measured: dict[Run, Measured] = field(default_factory=dict)
    #: What is not in the table -> why.
    dropped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    load: Load | None = None
    load_run: Run | None = None
    complete: bool = False
    shared: bool = False
    spin: bool = False

    @property
    def points(self) -> list[LatencyPoint]:
        """The table of encoders so far."""
        return [point_of(r, m) for r, m in self.measured.items() if r.submodel is not None]

    @property
    def networks(self) -> list[NetworkPoint]:
        """The table of networks so far."""
        return [network_point_of(r, m) for r, m in self.measured.items() if r.network is not None]

    @property
    def busy(self) -> int:
        """How many points others disturbed, where they were not meant to be busy."""
        return 0 if self.shared else sum(map(is_busy, self.measured.values()))


class Models:
    """Completed models on disk, one at a time: the largest has 343 MB."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the extracted graphs."""
        self._folder = folder
        self._there: str | None = None

    def path(self, encoder: Encoder) -> str:
        """The file of `encoder`; that of another one is gone afterwards."""
        path = self._folder / "model.onnx"
        if self._there != encoder.file:
            self._there = None
            path.unlink(missing_ok=True)
            complete(self._folder / encoder.file, path)
            self._there = encoder.file
        return str(path)


class Probe:
    """One measuring of a device; `taken` is what there is of it at any time."""

    def __init__(
        self,
        ask: Ask,
        models: Models,
        clock: Callable[[], float],
        progress: Progress = lambda done, planned, words: None,
    ) -> None:
        self.taken = Taken()
        self._ask = ask
        self._models = models
        self._clock = clock
        self._progress = progress
        self._tasks: dict[Run, Task] = {}
        #: What is still planned or was measured, less what turned out to be impossible.
        self._possible: list[Task] = []

    def run(self, encoders: Sequence[Encoder], num_classes: int, wishes: Wishes) -> None:
        """Measure everything; raises AgentError when nothing can be measured at all."""
        self.taken.shared, self.taken.spin = wishes.shared, wishes.spin
        here = self._look()
        ways, skipped = backends(here.providers, here.openvino)
        self.taken.versions = here.versions
        self.taken.dropped |= skipped
        planned = tasks(
            encoders,
            ways,
            wishes.threads,
            num_classes,
            quick=wishes.quick,
            shapes=wishes.shapes,
            spin=wishes.spin,
        )
        self._plan(planned)
        for task in planned:
            if task in self._possible:
                self._say(_words(task))
                self._take(task, wishes.point_s)
        if not self.taken.measured:
            reasons = "; ".join(f"{what}: {why}" for what, why in self.taken.dropped.items())
            raise AgentError(f"nothing could be measured on this device: {reasons}")
        self._repeat(wishes)
        if not wishes.shared:
            self._again(wishes)
        self._sustain(wishes.load_s)
        self.taken.complete = True

    def _plan(self, possible: list[Task]) -> None:
        self._possible = possible
        self.taken.planned = len(possible)

    def _say(self, words: str) -> None:
        self._progress(len(self.taken.measured), self.taken.planned, words)

    def _look(self) -> Here:
        here = self._ask(Look(), LIMIT_S)
        if isinstance(here, Here) and (here.providers or here.openvino):
            return here
        reason = f": {here.reason}" if isinstance(here, Failed) else ""
        raise AgentError(
            "neither onnxruntime nor openvino can be used here"
            f"{reason}; {install('agent')} brings onnxruntime"
        )

    def _measure(self, task: Task, seconds: float) -> Measured | Failed:
        try:
            model = self._models.path(task.encoder)
        except OSError as error:
            return Failed(reason=f"the model cannot be written: {error.strerror or error}")
        reply = self._ask(MeasureRun(run=task.run, model=model, seconds=seconds), LIMIT_S)
        if isinstance(reply, Measured | Failed):
            return reply
        return Failed(reason="the measuring process answered another question")

    def _take(self, task: Task, seconds: float) -> None:
        reply = self._measure(task, seconds)
        earlier = [run for run in self.taken.measured if self._tasks[run].backend == task.backend]
        if isinstance(reply, Measured):
            self._tasks[task.run] = task
            self.taken.measured[task.run] = reply
            # TensorRT compiles in the first run.
            started_ms = reply.start_up_ms + reply.first_run_ms
            if not earlier and started_ms > SLOW_START_MS:
                self._shorten(task.backend, started_ms)
            return
        if not earlier:
            self._drop(task.backend, reply.reason)
            return
        # The model may be too much for this device, or the provider gone: what ran before tells.
        again = self._measure(self._tasks[earlier[0]], 0.0)
        if isinstance(again, Measured):
            self._plan([other for other in self._possible if other != task])
            self.taken.dropped[_words(task)] = reply.reason
        else:
            self._drop(task.backend, f"was lost after {len(earlier)} points: {again.reason}")

    def _shorten(self, backend: Backend, start_up_ms: float) -> None:
        """Keep only the first tier of a backend that compiles each model for long."""
        self._plan([t for t in self._possible if t.backend != backend or t.encoder.tier == "quick"])
        self.taken.dropped[f"{backend.words}, beyond the quick encoders"] = (
            f"loading the smallest one took {start_up_ms / 1e3:.0f} s"
        )

    def _drop(self, backend: Backend, reason: str) -> None:
        """Forget a backend and its points: what is planned on it could not be served."""
        self._plan([task for task in self._possible if task.backend != backend])
        self.taken.dropped[backend.words] = reason
        for run in [run for run in self.taken.measured if self._tasks[run].backend == backend]:
            del self.taken.measured[run]

    def _repeat(self, wishes: Wishes) -> None:
        """Measure every point in further rounds, some minutes apart.

        What else a processor does, on a virtual machine also for others, slows runs down for a
        while: no single look tells what is typical.
        """
        looks = {run: [measured] for run, measured in self.taken.measured.items()}
        for number in range(2, wishes.rounds + 1):
            for run in looks:
                self._say(f"{_words(self._tasks[run])}, round {number} of {wishes.rounds}")
                reply = self._measure(self._tasks[run], wishes.point_s)
                if isinstance(reply, Measured):
                    looks[run].append(reply)
                    self.taken.measured[run] = typical(looks[run])

    def _again(self, wishes: Wishes) -> None:
        """Measure disturbed points once more, and keep the quieter of the two."""
        until_s = self._clock() + wishes.again_s
        # Points of one model file stand together.
        for run in [run for run, measured in self.taken.measured.items() if is_busy(measured)]:
            if self._clock() >= until_s:
                return
            task = self._tasks[run]
            self._say(f"{_words(task)}, again")
            reply = self._measure(task, wishes.point_s)
            if isinstance(reply, Measured):
                self.taken.measured[run] = quieter(self.taken.measured[run], reply)

    def _sustain(self, seconds: float) -> None:
        """Run one encoder without a pause where the profile says, on as many threads as it has."""
        provider = best_provider(self.taken.points)
        own = {
            run: measured
            for run, measured in self.taken.measured.items()
            if run.provider == provider and run.submodel is not None
        }
        run = _to_sustain(own)
        self._say(f"sustained load, {seconds:g} s")
        model = self._models.path(self._tasks[run].encoder)
        reply = self._ask(SustainRun(run=run, model=model, seconds=seconds), LIMIT_S)
        if isinstance(reply, Load):
            self.taken.load, self.taken.load_run = reply, run
        elif isinstance(reply, Failed):
            self.taken.dropped["sustained load"] = reply.reason


#: Milliseconds of the encoder that is run without a pause: long enough to keep all threads busy,
#: short enough for many runs in each minute.
_SUSTAINED_MS = 10.0


def _to_sustain(measured: dict[Run, Measured]) -> Run:
    threads = max(run.threads for run in measured)
    return min(
        (run for run in measured if run.threads == threads),
        key=lambda run: abs(measured[run].latency_ms - _SUSTAINED_MS),
    )


def _words(task: Task) -> str:
    run = task.run
    batch = f", {run.batch} pictures" if run.batch > 1 else ""
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
    return f"{words_of(run)}: {task.backend.words}, {threads}{batch}"
