"""Recorded runs as fitting and checking the accuracy law take them."""

from collections.abc import Sequence

from partitioner.estimates.accuracy_law import LawMember, model_of, view_of
from partitioner.estimates.accuracy_records import RecordedRun


def has_untouched(run: RecordedRun) -> bool:
    """Tell whether any member has public weights as they are."""
    return any(member.training == "untouched" for member in run.members)


def as_members(
    run: RecordedRun, capability: dict[int, float], subset: Sequence[int]
) -> list[LawMember]:
    """Some of a run's members as the law sees them, with these capabilities."""
    return [
        LawMember(
            capability=capability[k],
            view=view_of(run.members[k].spec, run.members[k].region),
            model=model_of(run.members[k].spec),
        )
        for k in subset
    ]
