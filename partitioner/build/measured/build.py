"""A build by measurement: measure, choose, fit, serve, train in the time that is left, serve."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mdp.files import write_json
from partitioner.assembly.chosen import LABELS, entries, origin_of
from partitioner.assembly.write import Assembly
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.planning import choose
from partitioner.build.measured.training import FittedMember, Taught, train_networks
from partitioner.build.steps import evaluate_step
from partitioner.data.scenes import remark_on
from partitioner.export.evaluate import Report
from partitioner.pilot.measure import Pictures, Pilot, fit_member
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, use_threads
from partitioner.training.distributed import owned

#: Pictures, at most, that classifiers are fitted to, and that fusion is fitted to.
FITTED = 5000
#: Time that is kept for serving the trained networks, as a multiple of what it took before.
_AGAIN = 1.2
#: The file of a run folder that says what it is of.
_RECORD = "measured.json"


@dataclass(frozen=True, slots=True)
class MeasuredBuild:
    """The outcome of a build by measurement."""

    pilot: Pilot
    report: Report
    #: By row of the pilot; empty where none was trained.
    taught: Mapping[int, Taught] = field(default_factory=dict)
    #: The report of the bundle before training; None where nothing was trained, or nothing kept.
    frozen: Report | None = None

    def to_json(self) -> dict[str, Any]:
        """What is beside the bundle's evaluation."""
        return {
            "pilot": self.pilot.to_json(self.report.evaluation.pictures),
            "trained": {
                self.pilot.measured[row].candidate.words: one.to_json()
                for row, one in self.taught.items()
            },
        }


def build_measured(
    inputs: BuildInputs,
    out: Path,
    run: RunFolder,
    name: str,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> MeasuredBuild:
    """Build the bundle `out`; what is done is kept in `run`, and not done again.

    A bundle of frozen networks stands first. Then the networks are trained in what is left of the
    minutes, and those that are better on the calibration split replace it. Raises InputError.
    """
    started_s, threads = clock(), inputs.threads or own_threads()
    use_threads(threads)
    if remark := remark_on(inputs.data):
        progress.note(remark)
    with owned(run):
        _record(inputs, run)
        pilot = choose(inputs, run.cache, progress, run.path / "pilot")
        with TemporaryDirectory(prefix="members-", dir=run.path) as folder:
            build = _Build(inputs, run, name, out, Path(folder), pilot, progress, threads)
            members = build.fit()
            begun_s = clock()
            frozen_paths = {row: one.path for row, one in members.items()}
            frozen = report = build.serve(frozen_paths, {})
            took_s = clock() - begun_s
            left_s = 60 * inputs.minutes - (clock() - started_s) - _AGAIN * took_s
            taught: dict[int, Taught] = {}
            if inputs.minutes:
                taught = train_networks(inputs, pilot, members, run, left_s, progress, clock)
            kept = {row: one.path for row, one in taught.items() if one.path is not None}
            if kept:
                report = build.serve({**frozen_paths, **kept}, taught)
        run.remove_pictures()
    return MeasuredBuild(pilot, report, taught, frozen if kept else None)


def _record(inputs: BuildInputs, run: RunFolder) -> None:
    """Say in the run folder what it is of; raises InputError for a folder of another kind."""
    record = run.path / _RECORD
    if not record.exists():
        run.check_new()
    write_json(
        record,
        {
            "data": str(Path(inputs.data.source).resolve()),
            "weights": {name: str(path) for name, path in inputs.weights.items()},
            "devices": list(inputs.profiles),
            "latency_ms": inputs.target_ms,
        },
    )


@dataclass(frozen=True, slots=True)
class _Build:
    """The steps of one build over the same inputs."""

    inputs: BuildInputs
    run: RunFolder
    name: str
    out: Path
    #: Keeps the members' weights until the build ends.
    folder: Path
    pilot: Pilot
    progress: Progress
    threads: int

    @property
    def rows(self) -> list[int]:
        """The chosen candidates, each once."""
        return list(dict.fromkeys(self.pilot.choice.rows.values()))

    def fit(self) -> dict[int, FittedMember]:
        """Write the chosen networks with fitted classifiers; they are given by row."""
        inputs, found = self.inputs, {}
        pictures = Pictures.of(inputs.data, FITTED)
        for row in self.rows:
            one = self.pilot.measured[row].candidate
            path = self.folder / f"member-{row}.safetensors"
            left_out = fit_member(
                one,
                inputs.weights[one.name],
                inputs.class_rows.get(one.name),
                pictures,
                len(inputs.data.labels),
                self.run.cache,
                self.progress,
                path,
            )
            found[row] = FittedMember(path, pictures, left_out)
        return found

    def serve(self, members: Mapping[int, Path], taught: Mapping[int, Taught]) -> Report:
        """Write the bundle of these weights, by row, and evaluate it."""
        inputs, data = self.inputs, self.inputs.data
        (self.folder / LABELS).write_text("".join(f"{label}\n" for label in data.labels))
        assembly = Assembly(
            self.folder,
            data,
            FITTED,
            self.run.cache,
            self.progress,
            inputs.target_ms,
            origin={
                **origin_of(self.pilot, inputs.weights, inputs.digests),
                **{
                    f"trained_{self.pilot.measured[row].candidate.words}": one.words
                    for row, one in taught.items()
                },
            },
        )
        models = entries(self.pilot, members, inputs.cameras)
        rows = [(len(data.labels), list(range(len(data.labels))))] * len(models)
        # Its models are timed on one thread.
        use_threads(1)
        assembly.write(models, rows, inputs.profiles, self.out, self.name)
        _, report = evaluate_step(self.out, data, self.run, self.progress, teacher=False)
        use_threads(self.threads)
        return report
