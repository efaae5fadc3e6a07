"""Recorded runs, from which the accuracy of members that are not trained yet is predicted."""

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field, json

from mdp.errors import ConfigError
from mdp.files import Record, read_json
from mdp.formats.bundle import MANIFEST, Bundle, Manifest
from mdp.formats.plan import Plan, Region, SubModelSpec
from mdp.formats.profile import Fraction

_SHIPPED = "accuracy_records.json"


class RecordedMember(Record, frozen=True):
    """What one member is and sees."""

    submodel: SubModelSpec
    region: Region = Region()


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

    def __post_init__(self) -> None:
        for subset in self.subsets:
            if max(subset.members) >= len(self.members) or min(subset.members) < 0:
                raise ValueError(f"`subsets` name members {list(subset.members)}, not all recorded")
        if not 0 < self.teacher_accuracy < 1:
            raise ValueError("`teacher_accuracy` has to be above 0 and below 1")


class Records(Record, frozen=True):
    """The file of recorded runs."""

    about: str
    runs: list[RecordedRun] = field(default_factory=list)


def shipped_records() -> list[RecordedRun]:
    """The runs that come with MDP."""
    content = (resources.files("partitioner.estimates") / _SHIPPED).read_bytes()
    return json.decode(content, type=Records).runs


def read_runs(paths: Iterable[Path]) -> list[RecordedRun]:
    """The runs of evaluated bundles (folders) and of files of recorded runs.

    Raises ConfigError naming the bundle that was never evaluated, or lacks its teacher's accuracy.
    """
    found: list[RecordedRun] = []
    for path in paths:
        if path.is_dir():
            manifest = Bundle.open(path).manifest
            found.append(run_of_bundle(path, manifest))
        else:
            found += read_json(path, Records).runs
    return found


def run_of_bundle(path: Path, manifest: Manifest) -> RecordedRun:
    """What an evaluated bundle tells; raises ConfigError where it does not."""
    evaluation = manifest.evaluation
    if evaluation is None:
        raise ConfigError(
            f"{path / MANIFEST}: key `evaluation`: expected a measured bundle; run "
            "mdp-partition evaluate --write first"
        )
    if evaluation.teacher is None or evaluation.teacher.data is not None:
        raise ConfigError(
            f"{path / MANIFEST}: key `evaluation.teacher`: expected the teacher's accuracy on "
            "the evaluation's pictures, which evaluate --write measures where "
            "the run folder is at hand"
        )
    subsets = [
        RecordedSubset(members=subset.members, accuracy=subset.stacked)
        for subset in evaluation.subsets
    ]
    teacher = manifest.plan.require_teacher()
    return RecordedRun(
        name=manifest.name,
        source=f"{evaluation.data} {evaluation.data_digest[:8]}, {teacher.name}",
        teacher=teacher.shape,
        teacher_accuracy=min(max(evaluation.teacher.accuracy, 1e-6), 1 - 1e-6),
        members=members_of(manifest.plan),
        subsets=subsets,
        pictures=evaluation.pictures,
    )


def members_of(plan: Plan) -> list[RecordedMember]:
    """The plan's members by k."""
    return [RecordedMember(submodel=a.vit, region=a.region) for a in plan.assignments]


def recorded(subsets: Sequence[tuple[Sequence[int], float]]) -> list[RecordedSubset]:
    """Subsets from (members, accuracy)."""
    return [RecordedSubset(members=tuple(m), accuracy=accuracy) for m, accuracy in subsets]
