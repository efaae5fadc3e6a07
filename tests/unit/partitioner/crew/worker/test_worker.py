"""Actions of a trainer on what the coordinator tells it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")

from mdp.errors import InputError, TransferError
from partitioner.crew.bus.control import RunRefused
from partitioner.crew.bus.store import CoordinatorLost
from partitioner.crew.jobs.answers import FrozenPass, OutputsRefused
from partitioner.crew.jobs.kinds import (
    AnswersKind,
    EvaluationKind,
    FrozenKind,
    MemberKind,
    ModelsKind,
    OutputsKind,
    TeacherKind,
    kind_of,
)
from partitioner.crew.messages import Accepted, AnyAction, Refused, Start
from partitioner.crew.planning.costs import Chain
from partitioner.crew.planning.syncplan import Answers, NetworkSync, SyncPlan
from partitioner.crew.worker import worker as worker_module
from partitioner.crew.worker.progress import WorkAccount
from partitioner.crew.worker.worker import Ends, Worker, enter, jobs_of, next_job

pytestmark = pytest.mark.torch


class Control:
    """Tells what it was given; then the coordinator is lost."""

    rank = 1

    def __init__(self, *actions: AnyAction, may_leave: bool = False) -> None:
        self.actions, self.may_leave = list(actions), may_leave

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        if not self.actions:
            raise CoordinatorLost("the coordinator is lost")
        return self.actions.pop(0)


def worker(control: Control) -> Worker:
    unused = cast(Any, None)
    return Worker(unused, Ends(cast(Any, control), unused), unused)


def test_a_coordinator_that_ends_before_a_slow_trainer_is_not_lost() -> None:
    worker(Control(may_leave=True)).run()
    with pytest.raises(CoordinatorLost):
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


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("strict", {"member-1": "outputs-0", "outputs-1": "outputs-0", "member-2": "outputs-1"}),
        ("star", {"member-1": "outputs-0", "member-2": "outputs-0"}),
    ],
)
def test_what_successors_learn_from_is_computed_before_them(
    chain: Chain, expected: dict[str, str]
) -> None:
    plan = SyncPlan(chain=chain, answers=Answers(by=("nuc",)))
    jobs = jobs_of(
        plan, 3, ("coordinator", "nuc", "tower"), teacher=False, outputs=True, evaluated=True
    )
    after = {job.name: [one for one in job.after if "outputs" in one] for job in jobs}
    assert {name: one for name, found in after.items() for one in found} == expected
    by = {job.name: job.by for job in jobs}
    assert by["outputs-0"] == by["evaluation"] == ("coordinator", "nuc")
    assert by["models"] == ("coordinator",)
    order = [job.name for job in jobs]
    assert all(order.index(one) < order.index(job.name) for job in jobs for one in job.after)


@pytest.mark.parametrize(
    ("by", "expected"), [((), "coordinator nuc"), (("nuc",), "coordinator nuc")]
)
def test_the_coordinator_takes_part_in_the_answers(by: tuple[str, ...], expected: str) -> None:
    plan = SyncPlan(answers=Answers(by=by), network=(NetworkSync(name="member-0", by=("nuc",)),))
    jobs = {job.name: job.by for job in jobs_of(plan, 1, ("coordinator", "nuc"), teacher=False)}
    assert jobs == {
        "teacher": ("coordinator",), "answers": tuple(expected.split()), "member-0": ("nuc",),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("teacher answers member-0 models", "teacher answers member-0"),
        ("member-0 member-1", "member-0 member-1"),
        ("member-0 member-1 outputs-1", "member-0 outputs-0 member-1 outputs-1"),
        ("member-0 member-1 member-2", "member-0 outputs-0 member-1 outputs-1 member-2"),
    ],
)
def test_deleted_outputs_are_made_again_where_a_job_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, expected: str
) -> None:
    jobs = jobs_of(SyncPlan(), 3, ("coordinator",), teacher=True, outputs=True, evaluated=True)
    for kind in (TeacherKind, MemberKind, ModelsKind, AnswersKind, OutputsKind, EvaluationKind):
        monkeypatch.setattr(kind, "outputs", lambda self, work: [tmp_path / self.name])
    for name in files.split():
        (tmp_path / name).touch()
    assert set(worker_module.find_finished(cast(Any, None), jobs)) == set(expected.split())


def test_a_name_says_the_kind_of_a_job() -> None:
    names = ["teacher", "answers", "member-12", "outputs-0", "models", "evaluation"]
    kinds = [kind_of(name) for name in names]
    assert [kind.name for kind in kinds] == names
    assert [isinstance(kind, FrozenKind) for kind in kinds] == [
        name in ("answers", "outputs-0", "evaluation") for name in names
    ]
    member = kinds[2]
    assert isinstance(member, MemberKind)
    assert member.k == 12
    with pytest.raises(KeyError):
        kind_of("line:a:b")


def frozen(dtype: type[np.floating]) -> FrozenPass:
    return FrozenPass("logits", 3, [0], lambda v: lambda i: [], ["logits"], "fp32", dtype)


def sharing(coordinator: Any, one: FrozenPass, kept: Path) -> list[str]:
    """Have a trainer, or a coordinator, do a job of one pass; returns its notes."""

    class OnePass(EvaluationKind):
        """One pass alone."""

        def passes(self, work: Any) -> Any:
            """The pass."""
            return [(one, {0: [kept]})]

    notes = list[str]()
    work = SimpleNamespace(progress=SimpleNamespace(note=notes.append))
    unused = cast(Any, None)
    ends = Ends(unused, unused, coordinator)
    crews = cast(Any, SimpleNamespace(account=WorkAccount(lambda: 0)))
    Worker(cast(Any, work), ends, crews)._share(OnePass("evaluation"))
    return notes


def test_a_pass_that_the_coordinator_has_is_over(tmp_path: Path) -> None:
    over = list[str]()
    sharing(SimpleNamespace(end_pass=over.append), frozen(np.float16), tmp_path)
    assert over == ["logits"]


def test_a_trainer_whose_evaluation_is_refused_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise OutputsRefused("differs")

    monkeypatch.setattr(worker_module, "contribute", refused)
    assert sharing(None, frozen(np.float32), tmp_path) == ["differs"]
    with pytest.raises(OutputsRefused):
        sharing(None, frozen(np.float16), tmp_path)


def test_a_trainer_too_slow_for_a_pass_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator deletes what a pass was made from as soon as others have ended it."""

    class Gone:
        def fetch(self, name: str, path: Path) -> bool:
            raise TransferError(
                f"{name}: the coordinator cannot read it: No such file or directory"
            )

    for kind in (EvaluationKind, ModelsKind):
        monkeypatch.setattr(kind, "inputs", lambda self, work, fetch: [tmp_path / "outputs"])
    notes = list[str]()
    progress, run = SimpleNamespace(note=notes.append), SimpleNamespace(path=tmp_path)
    work = cast(Any, SimpleNamespace(progress=progress, run=run))
    unused = cast(Any, None)
    slow = Worker(work, Ends(unused, cast(Any, Gone())), unused)
    assert slow._do(Start(rank=1, network="evaluation", alone=False)) == ""
    assert notes == ["outputs: the coordinator cannot read it: No such file or directory"]
    # What only this trainer may do is not left out.
    with pytest.raises(TransferError):
        slow._do(Start(rank=1, network="models", alone=True))


def test_weights_that_are_shared_are_copied_by_the_coordinator_once_they_are_there() -> None:
    jobs = jobs_of(SyncPlan(chain="star"), 4, ("coordinator", "nuc"), teacher=False, same={2: 1})
    needed = {job.name: (job.by, job.after[1:]) for job in jobs if job.name.startswith("member")}
    assert needed["member-2"] == (("coordinator",), ("member-0", "member-1"))
    assert needed["member-3"] == (("coordinator", "nuc"), ("member-0",))
