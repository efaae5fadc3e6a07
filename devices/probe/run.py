"""Measures this device: plans the points, has each measured, keeps the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devices.probe import child, schedule
from devices.probe.encoders import Encoder, complete
from devices.probe.measure import EncoderRun, MeasuredPoint, SustainedLoad
from mdp.errors import AgentError
from mdp.extras import install
from mdp.formats.profile import LatencyPoint, NetworkPoint
from mdp.load import is_busy

#: Longer than any point takes on a slow board; a process without a reply for so long hangs.
LIMIT_S = 300.0

#: Providers that compile models can take minutes for each.
SLOW_START_MS = 5_000.0

#: Sends a request; returns its reply, or Failed after so many seconds.
RequestReply = Callable[[child.Request, float], child.Reply]
#: Gets points done, points planned, and the next step.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """The measurements to make, and for how long."""

    threads: Sequence[int]
    quick: bool = False
    #: Only so many of the quick shapes.
    shapes: int | None = None
    #: Seconds of running per point.
    point_s: float = 0.35
    #: Measurements of each point, whose median is kept.
    rounds: int = 1
    #: Seconds of sustained load.
    load_s: float = 5.0
    #: Seconds for repeating disturbed points.
    again_s: float = 60.0
    #: Other processes are meant to be busy, as agents on the same machine will be.
    shared: bool = False
    #: Threads spin while they wait for each other.
    spin: bool = False


@dataclass(slots=True)
class ProbeResult:
    """The results so far, also after an interruption."""

    planned: int = 0
    measured: dict[EncoderRun, MeasuredPoint] = field(default_factory=dict)
    #: Point, backend or encoder that is not in the table -> why.
    dropped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    load: SustainedLoad | None = None
    load_run: EncoderRun | None = None
    complete: bool = False
    shared: bool = False
    spin: bool = False

    @property
    def points(self) -> list[LatencyPoint]:
        """The table of encoders so far."""
        return [schedule.point_of(r, m) for r, m in self.measured.items() if r.submodel is not None]

    @property
    def networks(self) -> list[NetworkPoint]:
        """The table of networks so far."""
        return [
            schedule.network_point_of(r, m)
            for r, m in self.measured.items()
            if r.network is not None
        ]

    @property
    def busy(self) -> int:
        """Number of disturbed points, where other processes were not meant to be busy."""
        return (
            0
            if self.shared
            else sum(is_busy(measured.others_cores) for measured in self.measured.values())
        )


class EncoderModels:
    """Completed models on disk, one at a time: the largest has 343 MB."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the extracted graphs."""
        self._folder = folder
        self._there: str | None = None

    def path(self, encoder: Encoder) -> str:
        """The file of `encoder`, in the place of the last one."""
        path = self._folder / "model.onnx"
        if self._there != encoder.file:
            self._there = None
            path.unlink(missing_ok=True)
            complete(self._folder / encoder.file, path)
            self._there = encoder.file
        return str(path)


class Probe:
    """Measures one device; `result` is current at any time."""

    def __init__(
        self,
        request: RequestReply,
        models: EncoderModels,
        clock: Callable[[], float],
        progress: Progress = lambda done, planned, words: None,
    ) -> None:
        self.result = ProbeResult()
        self._request = request
        self._models = models
        self._clock = clock
        self._progress = progress
        self._tasks: dict[EncoderRun, schedule.PlannedPoint] = {}
        #: What is still planned or was measured, less what turned out to be impossible.
        self._possible: list[schedule.PlannedPoint] = []

    def run(self, encoders: Sequence[Encoder], num_classes: int, options: ProbeOptions) -> None:
        """Measure everything; raises AgentError if nothing can be measured."""
        self.result.shared, self.result.spin = options.shared, options.spin
        here = self._capabilities()
        ways, skipped = schedule.backends(here.providers, here.openvino)
        self.result.versions = here.versions
        self.result.dropped |= skipped
        planned = schedule.tasks(
            encoders,
            ways,
            options.threads,
            num_classes,
            quick=options.quick,
            shapes=options.shapes,
            spin=options.spin,
        )
        self._plan(planned)
        for task in planned:
            if task in self._possible:
                self._report(_describe(task))
                self._take(task, options.point_s)
        if not self.result.measured:
            reasons = "; ".join(f"{what}: {why}" for what, why in self.result.dropped.items())
            raise AgentError(f"nothing could be measured on this device: {reasons}")
        self._repeat(options)
        if not options.shared:
            self._again(options)
        self._sustain(options.load_s)
        self.result.complete = True

    def _plan(self, possible: list[schedule.PlannedPoint]) -> None:
        self._possible = possible
        self.result.planned = len(possible)

    def _report(self, step: str) -> None:
        self._progress(len(self.result.measured), self.result.planned, step)

    def _capabilities(self) -> child.Capabilities:
        here = self._request(child.ListCapabilities(), LIMIT_S)
        if isinstance(here, child.Capabilities) and (here.providers or here.openvino):
            return here
        reason = f": {here.reason}" if isinstance(here, child.ChildFailed) else ""
        raise AgentError(
            "neither onnxruntime nor openvino can be used here"
            f"{reason}; {install('agent')} installs onnxruntime"
        )

    def _measure(
        self, task: schedule.PlannedPoint, seconds: float
    ) -> MeasuredPoint | child.ChildFailed:
        try:
            model = self._models.path(task.encoder)
        except OSError as error:
            return child.ChildFailed(
                reason=f"the model cannot be written: {error.strerror or error}"
            )
        reply = self._request(child.MeasureRun(run=task.run, model=model, seconds=seconds), LIMIT_S)
        if isinstance(reply, MeasuredPoint | child.ChildFailed):
            return reply
        return child.ChildFailed(reason="the measuring process sent an unexpected reply")

    def _take(self, task: schedule.PlannedPoint, seconds: float) -> None:
        reply = self._measure(task, seconds)
        earlier = [run for run in self.result.measured if self._tasks[run].backend == task.backend]
        if isinstance(reply, MeasuredPoint):
            self._tasks[task.run] = task
            self.result.measured[task.run] = reply
            # TensorRT compiles during the first run.
            started_ms = reply.start_up_ms + reply.first_run_ms
            if not earlier and started_ms > SLOW_START_MS:
                self._shorten(task.backend, started_ms)
            return
        if not earlier:
            self._drop(task.backend, reply.reason)
            return
        # Either the model is too large or the provider is gone: repeat a point that has worked.
        again = self._measure(self._tasks[earlier[0]], 0.0)
        if isinstance(again, MeasuredPoint):
            self._plan([other for other in self._possible if other != task])
            self.result.dropped[_describe(task)] = reply.reason
        else:
            self._drop(task.backend, f"was lost after {len(earlier)} points: {again.reason}")

    def _shorten(self, backend: schedule.Backend, start_up_ms: float) -> None:
        """Keep only the first tier of a backend that takes long to compile each model."""
        self._plan([t for t in self._possible if t.backend != backend or t.encoder.tier == "quick"])
        self.result.dropped[f"{backend.label}, beyond the quick encoders"] = (
            f"loading the smallest took {start_up_ms / 1e3:.0f} s"
        )

    def _drop(self, backend: schedule.Backend, reason: str) -> None:
        """Remove a backend and its points, as nothing could be served on it."""
        self._plan([task for task in self._possible if task.backend != backend])
        self.result.dropped[backend.label] = reason
        for run in [run for run in self.result.measured if self._tasks[run].backend == backend]:
            del self.result.measured[run]

    def _repeat(self, options: ProbeOptions) -> None:
        """Measure every point in further rounds, some minutes apart.

        Other load, on virtual machines also of other guests, slows runs down for a while: a single
        measurement is not representative.
        """
        repetitions = {run: [measured] for run, measured in self.result.measured.items()}
        for number in range(2, options.rounds + 1):
            for run in repetitions:
                self._report(f"{_describe(self._tasks[run])}, round {number} of {options.rounds}")
                reply = self._measure(self._tasks[run], options.point_s)
                if isinstance(reply, MeasuredPoint):
                    repetitions[run].append(reply)
                    self.result.measured[run] = schedule.representative(repetitions[run])

    def _again(self, options: ProbeOptions) -> None:
        """Measure disturbed points again, and keep the less disturbed of both."""
        until_s = self._clock() + options.again_s
        for run in [
            run for run, measured in self.result.measured.items() if is_busy(measured.others_cores)
        ]:
            if self._clock() >= until_s:
                return
            task = self._tasks[run]
            self._report(f"{_describe(task)}, again")
            reply = self._measure(task, options.point_s)
            if isinstance(reply, MeasuredPoint):
                self.result.measured[run] = schedule.quieter(self.result.measured[run], reply)

    def _sustain(self, seconds: float) -> None:
        """Run one encoder under sustained load on the profile's provider, with all threads."""
        provider = schedule.best_provider(self.result.points)
        own = {
            run: measured
            for run, measured in self.result.measured.items()
            if run.provider == provider and run.submodel is not None
        }
        run = _to_sustain(own)
        self._report(f"sustained load, {seconds:g} s")
        model = self._models.path(self._tasks[run].encoder)
        reply = self._request(child.SustainRun(run=run, model=model, seconds=seconds), LIMIT_S)
        if isinstance(reply, SustainedLoad):
            self.result.load, self.result.load_run = reply, run
        elif isinstance(reply, child.ChildFailed):
            self.result.dropped["sustained load"] = reply.reason


#: Milliseconds of the encoder for the sustained load: enough to keep all threads busy, and few
#: enough for many runs in each minute.
_SUSTAINED_MS = 10.0


def _to_sustain(measured: dict[EncoderRun, MeasuredPoint]) -> EncoderRun:
    threads = max(run.threads for run in measured)
    return min(
        (run for run in measured if run.threads == threads),
        key=lambda run: abs(measured[run].latency_ms - _SUSTAINED_MS),
    )


def _describe(task: schedule.PlannedPoint) -> str:
    run = task.run
    batch = f", {run.batch} pictures" if run.batch > 1 else ""
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
    return f"{schedule.describe_run(run)}: {task.backend.label}, {threads}{batch}"
