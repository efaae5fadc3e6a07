"""What a trainer does with what the desk tells it."""

from typing import Any, cast

import pytest

pytest.importorskip("torch")

from mdp.errors import InputError
from partitioner.crew.exchange.store import DeskLost
from partitioner.crew.machine.events import Accepted, AnyAction, Refused
from partitioner.crew.planning.syncplan import Answers, NetworkSync, SyncPlan
from partitioner.crew.worker import Ends, RunRefused, Worker, enter, jobs_of, next_job

pytestmark = pytest.mark.torch


class Control:
    """Tells what it was given; then the desk is lost."""

    rank = 1

    def __init__(self, *actions: AnyAction, may_leave: bool = False) -> None:
        self.actions, self.may_leave = list(actions), may_leave

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        if not self.actions:
            raise DeskLost("the desk is lost")
        return self.actions.pop(0)


def worker(control: Control) -> Worker:
    unused = cast(Any, None)
    return Worker(unused, Ends(cast(Any, control), unused, unused, unused), unused)


def test_a_desk_that_ends_before_a_slow_trainer_is_not_lost() -> None:
    worker(Control(may_leave=True)).run()
    with pytest.raises(DeskLost):
        worker(Control()).run()


def test_a_refusal_is_bad_input_at_the_door_alone() -> None:
    refused = Refused(rank=1, network="", reason="another trainer joined as nuc")
    with pytest.raises(InputError, match="another trainer"):
        enter(cast(Any, Control(refused)))
    control = cast(Any, Control(Accepted(rank=1, network=""), refused))
    enter(control)
    with pytest.raises(RunRefused, match="another trainer"):
        next_job(control)
    assert (InputError.exit_code, RunRefused.exit_code) == (2, 3)


@pytest.mark.parametrize(("by", "expected"), [((), "desk nuc"), (("nuc",), "desk nuc")])
def test_the_desk_takes_part_in_the_answers(by: tuple[str, ...], expected: str) -> None:
    plan = SyncPlan(answers=Answers(by=by), network=(NetworkSync(name="member-0", by=("nuc",)),))
    jobs = {job.name: job.by for job in jobs_of(plan, 1, ("desk", "nuc"), teacher=False)}
    assert jobs == {
        "teacher": ("desk",), "answers": tuple(expected.split()), "member-0": ("nuc",),
    }  # fmt: skip


def test_weights_that_are_shared_are_copied_by_the_desk_once_they_are_there() -> None:
    jobs = jobs_of(SyncPlan(chain="star"), 4, ("desk", "nuc"), teacher=False, same={2: 1})
    needed = {job.name: (job.by, job.after[1:]) for job in jobs if job.name.startswith("member")}
    assert needed["member-2"] == (("desk",), ("member-0", "member-1"))
    assert needed["member-3"] == (("desk", "nuc"), ("member-0",))
