"""Recorded runs, from which the accuracy of members that are not trained yet is predicted."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from mdp.errors import ConfigError
from mdp.files import Record, read_json
from mdp.formats.bundle import MANIFEST, Bundle, Evaluation, Manifest
from mdp.formats.plan import NetworkSpec, Plan, Region, Spec, SubModelSpec
from mdp.formats.profile import Fraction
from partitioner.estimates.accuracy_law import (
    PUBLISHED_CLASSES,
    AccuracyLaw,
    Task,
    Training,
    Untouched,
    capabilities,
)


class RecordedMember(Record, frozen=True):
    """A member's network and view: a plain ViT, `submodel`, or any other `network`."""

    submodel: SubModelSpec | None = None
    region: Region = Region()
    network: NetworkSpec | None = None
    #: None where it was trained for as long as it took; `untouched` public weights tell what fewer
    #: pixels and parts of the picture cost and what members add together, nothing of trainings.
    training: Training | Untouched | None = None

    def __post_init__(self) -> None:
        if (self.submodel is None) == (self.network is None):
            raise ValueError("expected either `submodel` or `network`")

    @property
    def spec(self) -> Spec:
        """The sub-model of whichever family."""
        spec = self.network if self.submodel is None else self.submodel
        assert spec is not None
        return spec


class RecordedSubset(Record, frozen=True):
    """Measured accuracy of some members, stacked; of one alone as it is."""

    members: Annotated[tuple[int, ...], Meta(min_length=1)]
    accuracy: Fraction


class RecordedRun(Record, frozen=True):
    """One training: teacher, members, and how right each measured subset was."""

    name: str
    #: Runs of one source share teacher, pictures and recipe.
    source: str
    teacher: SubModelSpec
    teacher_accuracy: Fraction
    members: Annotated[list[RecordedMember], Meta(min_length=1)]
    subsets: Annotated[list[RecordedSubset], Meta(min_length=1)]
    #: Pictures that accuracies were measured on.
    pictures: Annotated[int, Meta(ge=1)]
    num_classes: Annotated[int, Meta(ge=2)] = 1000

    def __post_init__(self) -> None:
        for subset in self.subsets:
            if max(subset.members) >= len(self.members) or min(subset.members) < 0:
                raise ValueError(f"`subsets` name members {list(subset.members)}, not all recorded")
        if not 0 < self.teacher_accuracy < 1:
            raise ValueError("`teacher_accuracy` has to be above 0 and below 1")

    @property
    def task(self) -> Task:
        """The task that the members were taught."""
        return Task(
            teacher=self.teacher, accuracy=self.teacher_accuracy, num_classes=self.num_classes
        )

    @property
    def taught(self) -> bool:
        """Tell whether members were taught by the teacher, and not published beside it."""
        known = any(member.training is not None for member in self.members)
        return known or self.num_classes < PUBLISHED_CLASSES or len(self.members) > 1


class Records(Record, frozen=True):
    """The file of recorded runs."""

    about: str
    runs: list[RecordedRun] = field(default_factory=list)


def read_runs(paths: Iterable[Path]) -> list[RecordedRun]:
    """The runs of evaluated bundles (folders) and of files of recorded runs.

    Bundles of several cameras tell nothing of members that see one picture, and are left out.
    Raises ConfigError naming the bundle that was never evaluated, or lacks its teacher's accuracy,
    and the folder that is no bundle; InputError for one of which several labels may hold, whose
    accuracies are of all labels of an item.
    """
    found: list[RecordedRun] = []
    for path in paths:
        if path.is_dir():
            if not (path / MANIFEST).is_file():
                raise ConfigError(
                    f"{path}: expected an evaluated bundle, a folder with {MANIFEST}, or a file of "
                    "recorded runs"
                )
            bundle = Bundle.open(path)
            bundle.require_one_label("--runs")
            if not bundle.manifest.plan.cameras:
                found.append(run_of_bundle(path, bundle.manifest))
        else:
            found += read_json(path, Records).runs
    return found


def read_scenes(paths: Iterable[Path]) -> list[list[RecordedSubset]]:
    """The measured subsets of each bundle of several cameras among bundles and files of runs.

    Raises ConfigError for such a bundle that was never evaluated.
    """
    found = []
    for path in paths:
        if path.is_dir() and (manifest := Bundle.open(path).manifest).plan.cameras:
            subsets = evaluation_of(path, manifest).subsets
            found.append(record_subsets((subset.members, subset.stacked) for subset in subsets))
    return found


def run_of_bundle(path: Path, manifest: Manifest) -> RecordedRun:
    """The record of an evaluated bundle; raises ConfigError where it has none."""
    evaluation = evaluation_of(path, manifest)
    if evaluation.teacher is None or evaluation.teacher.data is not None:
        raise ConfigError(
            f"{path / MANIFEST}: key `evaluation.teacher`: expected the teacher's accuracy on "
            "the evaluation's pictures, which evaluate --write measures where "
            "the run folder is at hand"
        )
    teacher = manifest.plan.require_teacher()
    return RecordedRun(
        name=manifest.name,
        source=f"{evaluation.data} {evaluation.data_digest[:8]}, {teacher.name}",
        teacher=teacher.shape,
        teacher_accuracy=min(max(evaluation.teacher.accuracy, 1e-6), 1 - 1e-6),
        members=members_of(manifest.plan),
        subsets=record_subsets((subset.members, subset.stacked) for subset in evaluation.subsets),
        pictures=evaluation.pictures,
        num_classes=len(manifest.labels),
    )


def evaluation_of(path: Path, manifest: Manifest) -> Evaluation:
    """A bundle's evaluation; raises ConfigError for one that was never evaluated."""
    if manifest.evaluation is None:
        raise ConfigError(
            f"{path / MANIFEST}: key `evaluation`: expected a measured bundle; run "
            "mdp-partition evaluate --write first"
        )
    return manifest.evaluation


def members_of(plan: Plan) -> list[RecordedMember]:
    """The plan's members by k."""
    return [
        RecordedMember(submodel=a.submodel, network=a.network, region=a.region)
        for a in plan.assignments
    ]


def record_subsets(subsets: Iterable[tuple[Sequence[int], float]]) -> list[RecordedSubset]:
    """Subsets from (members, accuracy)."""
    return [RecordedSubset(members=tuple(m), accuracy=accuracy) for m, accuracy in subsets]


def predict_capabilities(law: AccuracyLaw, run: RecordedRun) -> dict[int, float]:
    """Predicted capability of a run's members, by k."""
    values = capabilities(
        law.alone,
        run.task,
        [member.spec for member in run.members],
        [member.region for member in run.members],
        [member.training for member in run.members],
    )
    return dict(enumerate(values.tolist()))


def alone_of(run: RecordedRun) -> dict[int, float]:
    """Accuracy of the members that were measured alone, kept off the ends."""
    return {
        subset.members[0]: min(max(subset.accuracy, 1e-6), 1 - 1e-6)
        for subset in run.subsets
        if len(subset.members) == 1
    }
