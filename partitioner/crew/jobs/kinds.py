"""Kinds of jobs of a run: what each reads, makes and does.

A job's name says its kind, once: `kind_of`. Who does a job and after which others is the plan's
(`jobs_of`); a kind knows files, in the run folder, and how a trainer makes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from partitioner.crew.jobs.passes import (
    ANSWERS,
    EVALUATION,
    MODELS,
    OUTPUTS,
    Pass,
    answers,
    evaluation,
    members_to_share,
    model_of,
    outputs,
)
from partitioner.export.write import export_member
from partitioner.run.settings import Schedule
from partitioner.training.context import TrainingContext
from partitioner.training.members import output_files, train_members, twins
from partitioner.training.teacher import ensure_teacher, load_targets, target_files

#: Fetches a file that another trainer has made; tells whether it is another one now.
Fetch = Callable[[Path], bool]


@dataclass(slots=True)
class JobContext:
    """Further facts of a run that jobs read or write, beside its `TrainingContext`."""

    #: The user's teacher to start from.
    checkpoint: Path | None = None
    #: Name of the bundle that sub-models are exported for; only at the coordinator.
    bundle: str = ""
    #: Exported sub-models and their accuracy, by number: see `TrainingContext`.
    exported: dict[int, tuple[Path, float]] = field(default_factory=dict)


class JobKind(ABC):
    """Inputs, outputs and work of a job; files are those of a trainer's own run folder."""

    #: Whether files of networks that it does not read are of another run, and go.
    follows_others = True
    #: Whether it is done in every run, also where its files are there.
    each_time = False
    #: Whether its files are deleted once the jobs after it are done.
    until_used = False
    #: Whether stages of the teacher are of no use any more once it begins.
    ends_stages = True

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """Files that it reads, which another trainer may have made."""

    @abstractmethod
    def outputs(self, work: TrainingContext) -> list[Path]:
        """Files that it makes, for others to read."""


class NetworkKind(JobKind):
    """A job that one trainer does alone, or several with one network."""

    @abstractmethod
    def train(self, work: TrainingContext, context: JobContext) -> None:
        """Make the files; nothing where the folder has them."""


class FrozenKind(JobKind):
    """A job whose frozen passes trainers share out; the coordinator writes what they give."""

    @abstractmethod
    def passes(self, work: TrainingContext) -> Iterator[Pass]:
        """The passes, one after another; each is over before the next one is asked for.

        The folder has the networks.
        """


class TrainingKind(NetworkKind):
    """The training of one network, whose batches several trainers may share."""

    @abstractmethod
    def schedule(self, work: TrainingContext) -> Schedule:
        """Its epochs and batches."""

    @abstractmethod
    def rows(self, work: TrainingContext) -> slice:
        """The single training pictures that it sees."""


class TeacherKind(TrainingKind):
    """The teacher's training, or its loading."""

    ends_stages = False

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """Nothing."""
        return []

    def outputs(self, work: TrainingContext) -> list[Path]:
        """Its weights."""
        return [work.run.teacher]

    def train(self, work: TrainingContext, context: JobContext) -> None:
        """Train the teacher, or take the user's."""
        ensure_teacher(work, context.checkpoint)

    def schedule(self, work: TrainingContext) -> Schedule:
        """The teacher's."""
        return work.settings.teacher_schedule

    def rows(self, work: TrainingContext) -> slice:
        """All."""
        return slice(None)


class MemberKind(TrainingKind):
    """A sub-model's training."""

    def __init__(self, name: str, k: int) -> None:
        super().__init__(name)
        self.k = k

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """The teacher's answers, and earlier sub-models with their outputs."""
        fetch(work.run.teacher)  # the names of the answers follow from its content
        earlier, taught = _before(work, self.k)
        return [*target_files(work), *earlier, *taught]

    def outputs(self, work: TrainingContext) -> list[Path]:
        """Its weights."""
        return [work.run.member(self.k)]

    def train(self, work: TrainingContext, context: JobContext) -> None:
        """Train it on the kept answers."""
        teacher = ensure_teacher(work, None)
        train_members(work, teacher, load_targets(work), only=[self.k])

    def schedule(self, work: TrainingContext) -> Schedule:
        """Schedule of this sub-model."""
        return work.schedule_of(self.k)

    def rows(self, work: TrainingContext) -> slice:
        """Pictures of its camera, or all."""
        return work.training_rows(work.plan.assignments[self.k])


class ModelsKind(NetworkKind):
    """The export of what is evaluated together; made anew in every run."""

    each_time = True

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """Weights of all sub-models."""
        return [work.run.member(a.k) for a in work.plan.assignments]

    def outputs(self, work: TrainingContext) -> list[Path]:
        """The exported models."""
        return [model_of(work, a.k) for a in members_to_share(work.plan)]

    def train(self, work: TrainingContext, context: JobContext) -> None:
        """Write the models that are evaluated together."""
        for a in members_to_share(work.plan):
            path = model_of(work, a.k)
            path.parent.mkdir(parents=True, exist_ok=True)
            context.exported[a.k] = path, export_member(work, a, path, context.bundle)


class AnswersKind(FrozenKind):
    """The teacher's answers to what is trained on, and to the held-out pictures."""

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """The teacher."""
        return [work.run.teacher]

    def outputs(self, work: TrainingContext) -> list[Path]:
        """The answers, whose names follow from the teacher's content."""
        return target_files(work) if work.run.teacher.exists() else []

    def passes(self, work: TrainingContext) -> Iterator[Pass]:
        """The teacher's passes."""
        return answers(work)


class OutputsKind(FrozenKind):
    """The outputs of a sub-model that its successors learn from; deleted after these."""

    until_used = True

    def __init__(self, name: str, k: int) -> None:
        super().__init__(name)
        self.k = k

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """The sub-model, those before it, and their outputs."""
        earlier, taught = _before(work, self.k)
        return [*earlier, work.run.member(self.k), *taught]

    def outputs(self, work: TrainingContext) -> list[Path]:
        """Sums of outputs, and features."""
        return _outputs_of(work, self.k)

    def passes(self, work: TrainingContext) -> Iterator[Pass]:
        """One pass."""
        return outputs(work, self.k)


class EvaluationKind(FrozenKind):
    """The exported sub-models' logits for the held-out pictures."""

    follows_others = False

    def inputs(self, work: TrainingContext, fetch: Fetch) -> list[Path]:
        """The exported models."""
        return ModelsKind(MODELS).outputs(work)

    def outputs(self, work: TrainingContext) -> list[Path]:
        """Nothing for others: the coordinator keeps the logits."""
        return []

    def passes(self, work: TrainingContext) -> Iterator[Pass]:
        """A pass for each split."""
        return evaluation(work)


def kind_of(name: str) -> JobKind:
    """The kind of a job of a run, by its name; raises KeyError for another one."""
    what, dash, number = name.partition("-")
    if dash:
        return {"member-": MemberKind, OUTPUTS: OutputsKind}[what + dash](name, int(number))
    plain: dict[str, type[JobKind]] = {
        "teacher": TeacherKind,
        ANSWERS: AnswersKind,
        MODELS: ModelsKind,
        EVALUATION: EvaluationKind,
    }
    return plain[name](name)


def _outputs_of(work: TrainingContext, k: int) -> list[Path]:
    return [path for paths in output_files(work, k).values() for path in paths]


def _before(work: TrainingContext, k: int) -> tuple[list[Path], list[Path]]:
    """The sub-models that one learns from or is a copy of, and the outputs of the last of them."""
    before = work.schedule_of(k).predecessors(k)
    same = twins(work.plan, work.settings.schedule)
    earlier = [work.run.member(one) for one in sorted({*before, same.get(k, k)} - {k})]
    return earlier, _outputs_of(work, before[-1]) if before else []
