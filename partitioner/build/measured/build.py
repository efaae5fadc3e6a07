"""A build by measurement: measure, choose, fit, serve, train in the time that is left, serve."""

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from mdp.files import replacing_folder, write_json
from partitioner.assembly.chosen import LABELS, entries, origin_of
from partitioner.assembly.write import Assembly, LeftOutAnswers
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.planning import choose, predict_ms
from partitioner.build.measured.training import FittedMember, Taught, teacher_of, train_networks
from partitioner.build.settings import data_facts
from partitioner.build.steps import evaluate_step
from partitioner.data.scenes import remark_on
from partitioner.export.evaluate import Report
from partitioner.pilot.learning_curve import CurveMember, describe, learning_curve
from partitioner.pilot.measure import Pilot, PilotPictures, find_candidates, fit_member
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import MeasuredRun
from partitioner.training.compute import own_threads, use_threads
from partitioner.training.distributed import lock_run

#: PilotPictures, at most, that classifiers are fitted to, and that fusion is fitted to.
FITTED = 5000
#: Time that is kept for serving the trained networks, as a multiple of what it took before.
_AGAIN = 1.2
#: Prefix of the folder of members' weights in the run folder.
_MEMBERS = "members-"


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
        """The measurements and the trainings, beside the bundle's evaluation."""
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
    minutes, and those that are not surely worse on the calibration split replace it. Raises
    InputError.
    """
    started_s = clock()
    use_threads(inputs.threads or own_threads())
    if remark := remark_on(inputs.data):
        progress.note(remark)
    find_candidates(inputs.weights, inputs.devices, inputs.target_ms)
    with lock_run(run):
        _record(inputs, run)
        for left in run.path.glob(f"{_MEMBERS}*"):  # by a build that was killed
            shutil.rmtree(left)
        pilot = choose(inputs, run.cache, progress, run.path / "pilot")
        for device, row in pilot.choice.rows.items():
            progress.note(f"{device}: {pilot.measured[row].candidate.words}")
        progress.note(f"all together: {pilot.predict_words(len(inputs.data.test))}")
        with TemporaryDirectory(prefix=_MEMBERS, dir=run.path) as folder:
            pictures = PilotPictures.of(inputs.data, FITTED)
            build = _Build(inputs, run, name, out, Path(folder), pilot, progress, pictures)
            members = {row: build.fit(row) for row in build.rows}
            if inputs.data.sets is None:
                with progress.step("predicting what more pictures would bring"):
                    outlook = build.outlook(members)
                progress.note(outlook)
            begun_s = clock()
            frozen = report = build.serve(members, {})
            took_s = clock() - begun_s
            taught: dict[int, Taught] = {}
            if inputs.minutes:
                teachers = build.teachers(members)
                until_s = started_s + 60 * inputs.minutes - _AGAIN * took_s
                taught = train_networks(inputs, members, teachers, run, until_s, progress, clock)
            kept = {row: one.path for row, one in taught.items() if one.path is not None}
            if kept:
                report = build.serve(members, taught)
        run.remove_pictures()
    return MeasuredBuild(pilot, report, taught, frozen if kept else None)


def _record(inputs: BuildInputs, run: RunFolder) -> None:
    """Say in the run folder what it is of; raises InputError for a folder of another kind."""
    if not run.measured_file.exists():
        run.check_new()
    write_json(
        run.measured_file,
        MeasuredRun(
            data=data_facts(inputs.config.options, inputs.data),
            weights={name: str(path) for name, path in inputs.weights.items()},
            devices=list(inputs.profiles),
            latency_ms=inputs.target_ms,
        ),
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
    #: What classifiers are fitted to.
    pictures: PilotPictures

    @property
    def rows(self) -> list[int]:
        """The chosen candidates, each once."""
        return list(dict.fromkeys(self.pilot.choice.rows.values()))

    def fit(self, row: int) -> FittedMember:
        """Write a candidate's network with a fitted classifier."""
        inputs, one = self.inputs, self.pilot.measured[row].candidate
        path = self.folder / f"member-{row}.safetensors"
        features, left_out, blend = fit_member(
            one,
            inputs.weights[one.name],
            inputs.class_rows.get(one.name),
            self.pictures,
            len(inputs.data.labels),
            self.run.cache,
            self.progress,
            path,
            self.pilot.measured[row]
            if self.pilot.digest == self.pictures.pictures.digest
            else None,
        )
        return FittedMember(one, path, features, left_out, blend)

    def teachers(self, members: Mapping[int, FittedMember]) -> dict[int, FittedMember]:
        """The teacher of each of `members` that has one, by the member's row."""
        wanted = {row: teacher_of(self.pilot, row) for row in members}
        known = dict(members)
        for best in wanted.values():
            if best is not None and best not in known:
                known[best] = self.fit(best)
        return {row: known[best] for row, best in wanted.items() if best is not None}

    def outlook(self, members: Mapping[int, FittedMember]) -> str:
        """One line: what twice as many pictures or scenes would bring."""
        pictures = self.pictures
        seen = [
            CurveMember(
                features=members[row].features.read,
                rows=np.arange(len(pictures.groups))[
                    pictures.rows_of(self.inputs.cameras.get(device))
                ],
                penalty=members[row].left_out.penalty,
                sharpness=members[row].left_out.sharpness,
                blend=members[row].blend,
            )
            for device, row in self.pilot.choice.rows.items()
        ]
        with threadpool_limits(1, user_api="blas"):
            curve = learning_curve(
                seen, pictures.pictures.targets, pictures.groups, len(self.inputs.data.labels)
            )
        return describe(curve, "scenes" if self.inputs.cameras else "pictures")

    def answers_left_out(
        self, members: Mapping[int, FittedMember], trained: Collection[int]
    ) -> LeftOutAnswers | None:
        """Answers of the frozen networks to training pictures that are left out of their fits.

        `trained` are rows of the pilot. None for several labels an item where there are some.
        """
        if trained and self.inputs.data.sets is not None:
            return None
        cameras, rows = self.inputs.cameras, self.pilot.choice.rows
        first = self.pictures.rows_of(next(iter(cameras.values()), None))
        return LeftOutAnswers(
            answers={
                device: members[row].left_out.logits[self.pictures.rows_of(cameras.get(device))]
                for device, row in rows.items()
            },
            targets=self.pictures.pictures.targets[first],
            outdated=frozenset(device for device, row in rows.items() if row in trained),
        )

    def serve(self, members: Mapping[int, FittedMember], taught: Mapping[int, Taught]) -> Report:
        """Write the bundle of these networks, by row, and evaluate it.

        Weights of `taught` that are better replace the frozen ones.
        """
        inputs, data = self.inputs, self.inputs.data
        (self.folder / LABELS).write_text("".join(f"{label}\n" for label in data.labels))
        better = {row: one.path for row, one in taught.items() if one.path is not None}
        frozen = {
            device: members[row].features.distance[
                self.pictures.rows_of(inputs.cameras.get(device))
            ]
            for device, row in self.pilot.choice.rows.items()
            if row not in better
        }
        assembly = Assembly(
            self.folder,
            data,
            FITTED,
            self.run.cache,
            self.progress,
            inputs.target_ms,
            predicted_ms=predict_ms(self.pilot, inputs),
            origin={
                **origin_of(self.pilot, inputs.weights, inputs.digests),
                **{
                    f"trained_{self.pilot.measured[row].candidate.words}": one.words
                    for row, one in taught.items()
                },
            },
            left_out=self.answers_left_out(members, better),
            features=frozen,
        )
        paths = {row: better.get(row, member.path) for row, member in members.items()}
        models = entries(self.pilot, paths, inputs.cameras)
        rows = [(len(data.labels), list(range(len(data.labels))))] * len(models)
        # A bundle that was there stays until this one is measured.
        with replacing_folder(self.out) as folder:
            assembly.write(models, rows, inputs.profiles, folder, self.name)
            _, report = evaluate_step(folder, data, self.run, self.progress, teacher=False)
        return report
