"""Jobs go to the planned trainers, and to others where these are gone."""

import random

import pytest

from partitioner.crew.coordinator.jobs import Job, Jobs
from partitioner.crew.messages import Gone, Joined, Made

STAR = [
    Job(name="answers", by=("coordinator", "tower", "nuc")),
    Job(name="member-0", by=("coordinator", "tower"), after=("answers",)),
    Job(name="member-1", by=("tower",), after=("member-0",)),
    Job(name="member-2", by=("nuc",), after=("member-0",)),
]


def joined(rank: int, name: str) -> Joined:
    return Joined(rank=rank, name=name, digest="")


def started(jobs: Jobs, *events: Joined | Gone | Made) -> list[tuple[str, int]]:
    return [(start.network, start.rank) for event in events for start in jobs.handle(event)]


def test_members_of_a_star_start_side_by_side() -> None:
    jobs = Jobs(STAR)
    names = enumerate(("coordinator", "tower", "nuc"))
    begun = started(jobs, *(joined(rank, name) for rank, name in names))
    assert begun == [("answers", 0), ("answers", 1), ("answers", 2)]
    done = [Made(rank=rank, network="answers", said="{}") for rank in range(3)]
    assert started(jobs, *done) == [("member-0", 0), ("member-0", 1)]
    first = [Made(rank=rank, network="member-0", said="{}") for rank in range(2)]
    assert started(jobs, first[0]) == [("member-2", 2)]
    assert started(jobs, first[1]) == [("member-1", 1)]
    assert not jobs.is_finished
    assert (
        started(
            jobs,
            Made(rank=1, network="member-1", said="{}"),
            Made(rank=2, network="member-2", said="{}"),
        )
        == []
    )
    assert jobs.is_finished


def test_the_job_of_a_lost_trainer_goes_to_one_that_is_free() -> None:
    jobs = Jobs(STAR, finished=["answers", "member-0"])
    assert started(jobs, joined(0, "coordinator"), joined(2, "nuc")) == [("member-2", 2)]
    assert [(start.network, start.rank) for start in jobs.give_up()] == [("member-1", 0)]
    assert started(jobs, Gone(rank=2)) == []
    assert started(jobs, Made(rank=0, network="member-1", said="{}")) == [("member-2", 0)]


def test_a_trainer_that_comes_back_joins_its_crew() -> None:
    jobs = Jobs([Job(name="teacher", by=("coordinator", "tower"))])
    assert started(jobs, joined(0, "coordinator")) == [], "the tower is awaited"
    assert started(jobs, joined(1, "tower")) == [("teacher", 0), ("teacher", 1)]
    assert started(jobs, Gone(rank=1), joined(2, "tower")) == [("teacher", 2)]
    assert started(jobs, Gone(rank=0), Gone(rank=2), joined(3, "nuc")) == [("teacher", 3)]
    assert started(jobs, Made(rank=3, network="teacher", said="{}")) == []
    assert jobs.is_finished


def test_who_came_too_late_rests_until_the_job_is_done() -> None:
    jobs = Jobs(
        [
            Job(name="teacher", by=("coordinator", "tower")),
            Job(name="member-0", by=("tower",), after=("teacher",)),
        ]
    )
    started(jobs, joined(0, "coordinator"), joined(1, "tower"))
    assert started(jobs, Made(rank=1, network="teacher")) == []
    assert started(jobs, Made(rank=0, network="teacher", said="{}")) == [("member-0", 1)]


def test_a_job_that_all_leave_without_an_outcome_begins_again() -> None:
    jobs = Jobs([Job(name="teacher", by=("coordinator", "tower"))])
    started(jobs, joined(0, "coordinator"), joined(1, "tower"))
    assert started(jobs, Made(rank=1, network="teacher")) == []
    assert started(jobs, Made(rank=0, network="teacher")) == [("teacher", 0), ("teacher", 1)]
    assert started(jobs, Made(rank=1, network="teacher"), Gone(rank=0)) == [("teacher", 1)]


def test_jobs_after_unknown_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="member-1: after"):
        Jobs([Job(name="member-1", by=("coordinator",), after=("member-0",))])


@pytest.mark.parametrize("seed", range(200))
def test_every_job_ends_whoever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)
    jobs, rank, there = Jobs(STAR), 0, set[int]()
    for _ in range(60):
        kind = draw.choice(("join", "made", "made", "gone"))
        starts = []
        if kind == "join":
            starts = jobs.handle(
                joined(rank, draw.choice(("coordinator", "tower", "nuc", "spare")))
            )
            there.add(rank)
            rank += 1
        elif there and (one := draw.choice(sorted(there))) is not None:
            work = jobs.working(one)
            if kind == "gone":
                there.discard(one)
                starts = jobs.handle(Gone(rank=one))
            elif work is not None:
                starts = jobs.handle(Made(rank=one, network=work, said="{}"))
        for start in starts:
            assert start.rank in there
            assert jobs.working(start.rank) == start.network
    jobs.handle(joined(rank, "coordinator"))
    jobs.give_up()
    there.add(rank)
    for _ in range(len(STAR) * 4):
        for one in sorted(there):
            if (work := jobs.working(one)) is not None:
                jobs.handle(Made(rank=one, network=work, said="{}"))
    assert jobs.is_finished
