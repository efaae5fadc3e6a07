"""The weights of a build's teacher, and the share of pictures that given ones are right on."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import TeacherSpec
from partitioner.assembly.members import read_map, read_names, rows_of
from partitioner.build.views import cut_views
from partitioner.data.datasets import Dataset
from partitioner.networks.teacher_weights import count_classes
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherFacts, TrainingConfig
from partitioner.training.distributed import first_then_others, lock_run
from partitioner.training.teacher import GivenTeacher


@dataclass(frozen=True)
class TeacherSource:
    """A teacher's shape, and where its weights come from; files are read once."""

    spec: TeacherSpec
    config: TrainingConfig
    #: The data's classes.
    labels: tuple[str, ...]

    @cached_property
    def checkpoint(self) -> Path | None:
        """The user's file of weights, if any; raises InputError where it is missing."""
        if self.config.options.teacher_checkpoint is None:
            return None
        path = Path(self.config.options.teacher_checkpoint)
        if not path.is_file():
            raise InputError(f"{path}: expected a teacher checkpoint, found no file")
        return path

    @cached_property
    def facts(self) -> TeacherFacts:
        """The source of the weights, and the mapping of their classes to the data's.

        Raises InputError for weights that do not fit the teacher, or names that do not fit the
        classes.
        """
        options, labels = self.config.options, self.config.options.teacher_labels
        self._check_options()
        checkpoint = self.checkpoint
        facts = TeacherFacts(
            name=self.spec.name,
            pretrained=options.pretrained,
            checkpoint=sha256_of(checkpoint) if checkpoint else None,
            args=self.spec.args,
            file=checkpoint.name if checkpoint else None,
        )
        if not self.config.has_teacher_weights:
            return facts
        known = count_classes(self.spec, checkpoint)
        if labels is None:
            kept = known == len(self.labels)
            return msgspec.structs.replace(facts, classes="kept" if kept else "probe")
        names = read_names(Path(labels))
        if len(names) != known:
            raise InputError(
                f"{labels}: names {len(names)} classes, expected {known}: as many as the "
                f"classifier of {checkpoint or self.spec.name} has rows"
            )
        rows = rows_of(
            names,
            self.labels,
            read_map(Path(options.teacher_map)) if options.teacher_map else {},
            labels,
            "give --teacher-map FILE with their names there, or no --teacher-labels for a linear "
            "probe",
        )
        return msgspec.structs.replace(facts, classes="names", rows=rows)

    def _check_options(self) -> None:
        """Raise InputError for options that do not go together."""
        options = self.config.options
        if options.pretrained and options.teacher_checkpoint is not None:
            raise InputError(
                "--pretrained and --teacher-checkpoint: expected one of the two, got both"
            )
        if options.teacher_labels is not None and not self.config.has_teacher_weights:
            raise InputError(
                "--teacher-labels: expected --teacher-checkpoint or --pretrained beside it"
            )
        if options.teacher_map is not None and options.teacher_labels is None:
            raise InputError("--teacher-map: expected --teacher-labels beside it")
        if not self.config.has_teacher_weights and not self.config.teacher_schedule.epochs:
            raise InputError(
                f"--teacher: {self.spec.name!r} does not know these {len(self.labels)} classes: "
                "give --teacher-epochs N to train it, --teacher-checkpoint FILE or --pretrained"
            )

    def accuracy(self, run: RunFolder, data: Dataset, progress: Progress) -> float:
        """Share of the calibration pictures of `data` that given weights are right on.

        As they are before they are trained further. What is measured is kept in `run`. Raises
        InputError.
        """
        given = GivenTeacher(run, self.spec, self.facts, data, self.checkpoint, progress)
        with lock_run(run), first_then_others():
            if not given.is_measured:
                cut_views(given.pixels, progress)
            share = given.accuracy()
        if self.config.teacher_schedule.epochs:
            progress.note(
                f"teacher: {share:.1%} of the calibration pictures before more training, assumed "
                "by the plan; plan.teacher_accuracy of the --config file overrides it"
            )
        return share
