"""What a trainer does in a run: jobs as the desk gives them out, from and to the run folder."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from mdp.errors import InputError, MDPError
from partitioner.crew.crews import Crews
from partitioner.crew.exchange.answers import FrozenPass, contribute, share_out
from partitioner.crew.exchange.control import Hand
from partitioner.crew.exchange.groups import Groups
from partitioner.crew.exchange.lease_messages import DeskEnd
from partitioner.crew.exchange.parameters import CrewEnded
from partitioner.crew.exchange.queues import StoreDesk, StoreTrainer
from partitioner.crew.exchange.store import DeskLost
from partitioner.crew.generations import train_in_generations
from partitioner.crew.machine.events import Accepted, Leave, Made, Refused, Start, Trainer
from partitioner.crew.machine.jobs import Job
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import SyncPlan
from partitioner.crew.progress import Account, Patient, Told
from partitioner.crew.staged import LOST, Files, StageLost, forget_stages, train_in_stages
from partitioner.data.memmaps import Index, load
from partitioner.run.curves import Curve
from partitioner.run.progress import Advance, Progress
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import Crew
from partitioner.training.members import train_members, twins
from partitioner.training.synchroniser import Synchroniser
from partitioner.training.teacher import ensure_targets, ensure_teacher, kept_targets, logits_of

#: Outputs of a batch of pictures, each `[B, ...]`.
Outputs = Callable[[Index], Sequence[Tensor]]

#: Seconds of one look into the mailbox.
LOOK_S = 0.2


class RunRefused(MDPError):
    """The desk takes this trainer no longer, or ends."""

    exit_code = 3


def jobs_of(
    plan: SyncPlan,
    members: int,
    names: Sequence[str],
    *,
    teacher: bool,
    same: Mapping[int, int] = MappingProxyType({}),
) -> list[Job]:
    """The jobs of a run of `members` sub-models by the trainers `names`, the desk first.

    A teacher that is not trained is loaded by the desk alone. The desk writes the answers, so it
    always takes part in them. It copies sub-models whose weights are those of an earlier one, which
    `same` names.
    """
    by = tuple(names)
    answer = dict.fromkeys((by[0], *(plan.answers.by or by)))
    jobs = [
        Job(name="teacher", by=(plan.of("teacher").crew or by) if teacher else by[:1]),
        Job(name="answers", by=tuple(answer), after=("teacher",)),
    ]
    for k in range(members):
        earlier = min(k, 1) if plan.chain == "star" else k
        needed = sorted({*range(earlier), same.get(k, 0)} - {k})
        after = ("answers", *(f"member-{before}" for before in needed))
        of_k = by[:1] if k in same else plan.of(f"member-{k}").by or by
        jobs.append(Job(name=f"member-{k}", by=of_k, after=after))
    return jobs


def made(work: Work, job: str) -> list[Path]:
    """Files that a job makes, for others to read."""
    if job == "teacher":
        return [work.run.teacher]
    if job == "answers":
        return kept_targets(work) if work.run.teacher.exists() else []
    return [work.run.member(int(job.removeprefix("member-")))]


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer tells the desk of a job, beside its files."""

    curve: Curve = []
    #: For others, and what this trainer sent.
    waited_s: float = 0.0
    sent_bytes: int = 0


@dataclass(slots=True)
class Ends:
    """A trainer's connections to the desk; each is used by one thread."""

    control: Hand
    files: Files
    answers: StoreTrainer
    rows: StoreTrainer
    #: Only at the desk.
    share: StoreDesk | None = None


def enter(control: Trainer) -> None:
    """Wait until the desk accepts this trainer; raises InputError where it does not."""
    while not isinstance(action := control.poll(LOOK_S), Accepted):
        if isinstance(action, Refused):
            raise InputError(action.reason)


def next_job(control: Trainer) -> Start | None:
    """Wait for the next job; None when all is done. Raises RunRefused."""
    while True:
        action = control.poll(LOOK_S)
        if isinstance(action, Leave):
            return None
        if isinstance(action, Refused) and not action.network:
            raise RunRefused(action.reason)
        if isinstance(action, Start):
            return action


class Worker:
    """One trainer, from its acceptance to the end of the run."""

    def __init__(
        self, work: Work, ends: Ends, crews: Crews, checkpoint: Path | None = None
    ) -> None:
        """`checkpoint` is the user's teacher, at the desk."""
        self._work, self._ends, self._crews, self._checkpoint = work, ends, crews, checkpoint

    @property
    def _is_desk(self) -> bool:
        return self._ends.share is not None

    def run(self) -> None:
        """Do jobs until the desk says that all is done; raises RunRefused and DeskLost."""
        control = self._ends.control
        try:
            while (start := next_job(control)) is not None:
                self._crews.account.begin(start.network)
                said = self._do(start)
                control.report(Made(rank=control.rank, network=start.network, said=said))
        except DeskLost:
            if not control.may_leave:  # else others have handed the last outcomes in
                raise

    def _do(self, start: Start) -> str:
        """Do a job and hand its outcome in; returns what the desk is told beside it, as JSON."""
        job, account = start.network, self._crews.account
        needed = self._needed(job)
        others = [path for path in needed if self._fetched(path)]
        if others and not self._is_desk:
            self._drop_members(needed)
        if job != "teacher":
            forget_stages(self._work)
        try:
            if job == "teacher" and self._crews.plan.of(job).stage:
                if not self._in_stages(start):
                    return ""
            elif start.alone:
                self._train(job, self._work)
            elif job == "answers":
                self._answers()
            else:
                self._together(job)
        except CrewEnded as ended:
            self._work.progress.note(str(ended))
            account.end()
            return ""
        if not (start.alone or job == "answers" or self._is_desk) and self._crews.has_desk(job):
            return ""  # the desk's outcome counts: it is there from the beginning
        if job != "answers" or self._is_desk:
            for path in made(self._work, job):
                self._ends.files.send(self._name(path), path)
                if not self._is_desk:
                    account.sent(path.stat().st_size)
        curve = self._work.run.kept_curves().get(job, [])
        waited_s, sent_bytes = account.end()
        outcome = Outcome(curve=curve, waited_s=waited_s, sent_bytes=sent_bytes)
        return msgspec.json.encode(outcome).decode()

    def _in_stages(self, start: Start) -> bool:
        """Train the own stage of the teacher; whether the whole is here to be handed in."""
        if start.alone and not self._work.run.teacher.exists():
            raise StageLost(LOST.format(name=self._crews.plan.of("teacher").crew[0]))
        crews = self._crews
        return start.alone or train_in_stages(
            self._work,
            crews.plan.of("teacher"),
            crews.control,
            crews.groups,
            crews.name_of,
            self._ends.files,
        )

    def _together(self, job: str) -> None:
        """Train a network with its crew, in rounds or by gradients."""
        checkpoint = self._work.run.checkpoint(job)
        if not self._is_desk:  # an outcome that the desk lacks: the others wait for this trainer
            self._drop(job)
        if self._crews.plan.of(job).what == "parameters":
            if not self._is_desk:  # the desk gives what it has reached
                checkpoint.unlink(missing_ok=True)
            self._train(job, replace(self._work, sync_of=self._crews.rounds))
            return

        def train(crew: Crew, members: tuple[int, ...]) -> None:
            def sync_of(network: str) -> Synchroniser:
                return self._crews.gradients(network, crew, members)

            self._train(job, replace(self._work, sync_of=sync_of))

        control = Patient(self._ends.control, self._crews.account)
        train_in_generations(job, control, self._crews.groups, checkpoint, train)

    def _train(self, job: str, work: Work) -> None:
        """Train the network of a job; nothing where the folder has it."""
        if job == "teacher":
            ensure_teacher(work, self._checkpoint)
        elif job == "answers":
            self._answers()
        else:
            self._member(work, int(job.removeprefix("member-")))

    def _drop(self, job: str) -> None:
        for path in made(self._work, job):
            path.unlink(missing_ok=True)

    def _drop_members(self, needed: Collection[Path]) -> None:
        """What was made before a file that it needs is of another run."""
        for a in self._work.plan.assignments:
            if self._work.run.member(a.k) not in needed:
                self._drop(f"member-{a.k}")
                self._work.run.checkpoint(f"member-{a.k}").unlink(missing_ok=True)

    def _fetched(self, path: Path) -> bool:
        """Fetch a file; whether it is another one now. What the desk has is what others get."""
        if self._is_desk and path.exists():
            return False
        return self._ends.files.fetch(self._name(path), path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._work.run.path).as_posix()

    def _needed(self, job: str) -> list[Path]:
        """Files that a job reads, which another trainer may have made."""
        run = self._work.run
        if job == "teacher":
            return []
        if job == "answers":
            return [run.teacher]
        k = int(job.removeprefix("member-"))
        same = twins(self._work.plan, self._work.settings.schedule)
        before = {*self._work.schedule_of(k).predecessors(k), same.get(k, k)} - {k}
        earlier = [run.member(one) for one in sorted(before)]
        self._fetched(run.teacher)  # the names of the answers follow from its content
        return [*kept_targets(self._work), *earlier]

    def _answers(self) -> None:
        """Compute a share of the teacher's answers; at the desk, take all of them too."""
        work, ends = self._work, self._ends
        teacher = ensure_teacher(work, None).to(training_device())
        variants, paths = work.variants, kept_targets(work)
        if not paths:
            return
        frozen = FrozenPass(
            name=paths[0].name,
            pictures=len(work.singles.train),
            variants=range(len(paths)),
            outputs_of=lambda v: self._counted(
                logits_of(teacher, variants.view(work.teacher_view, v))
            ),
            outputs=["the teacher's answers"],
            arithmetic=work.settings.autocast,
        )
        if ends.share is None:
            contribute(ends.answers, ends.rows, frozen)
            self._crews.account.sent(ends.rows.sent_bytes)
            ends.rows.sent_bytes = 0
            return
        if not all(path.exists() for path in paths):
            total = len(paths) * frozen.pictures
            with work.progress.task("the teacher's answers, by all", total) as advance:
                shared_out(ends, frozen, {v: [path] for v, path in enumerate(paths)}, advance)
        ensure_targets(work, teacher)  # of calibration and test, too

    def _counted(self, outputs_of: Outputs) -> Outputs:
        def counted(index: Index) -> Sequence[Tensor]:
            self._crews.account.counted(len(index))
            return outputs_of(index)

        return counted

    def _member(self, work: Work, k: int) -> None:
        teacher = ensure_teacher(work, None)
        train_members(work, teacher, [load(path) for path in kept_targets(work)], only=[k])


def worker_of(
    work: Work,
    ends: Ends,
    plan: SyncPlan,
    facts: Facts,
    groups: Groups,
    store: TCPStore,
    checkpoint: Path | None,
    note: Callable[[str], None],
    shown: Progress | None,
) -> Worker:
    """A trainer that tells the desk what it does; the desk itself shows that of all alone."""
    account = Account()
    ends.control.told = account.told
    crews = Crews(
        plan=plan, facts=facts, control=ends.control, groups=groups, store=store, account=account
    )
    return Worker(replace(work, progress=Told(account, note, shown)), ends, crews, checkpoint)


def shared_out(
    ends: Ends, frozen: FrozenPass, paths: Mapping[int, Sequence[Path]], advance: Advance
) -> None:
    """Share a pass out at the desk, which takes part in it from another thread.

    Raises what that thread raises, and what `share_out` does.
    """
    assert ends.share is not None
    failed: list[Exception] = []

    def take_part() -> None:
        try:
            contribute(ends.answers, ends.rows, frozen)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=take_part, name="answers", daemon=True)
    thread.start()
    try:
        share_out(_Unless(failed, ends.share), frozen, paths, advance)
    finally:
        thread.join()
    if failed:
        raise failed[0]


class _Unless:
    """The desk's end of a pass, until something has failed."""

    def __init__(self, failed: Sequence[Exception], end: DeskEnd) -> None:
        self._failed, self._end = failed, end
        self.post, self.close = end.post, end.close

    def read(self, timeout_s: float) -> bytes | None:
        """The log's next message, None when there is none; raises what has failed."""
        if self._failed:
            raise self._failed[0]
        return self._end.read(timeout_s)
