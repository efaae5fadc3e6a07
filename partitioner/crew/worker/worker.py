"""The work of a trainer in a run: jobs that the coordinator gives out, in the run folder."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from torch import Tensor

from mdp.errors import AgentError, InputError, TransferError
from partitioner.crew.averaging.generations import train_in_generations
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.averaging.parameters import CrewEnded
from partitioner.crew.bus.control import Coordinator, CoordinatorClient, RunRefused
from partitioner.crew.bus.files import Files
from partitioner.crew.bus.store import CoordinatorLost, SignedStore
from partitioner.crew.coordinator.jobs import Job
from partitioner.crew.jobs.answers import FrozenPass, OutputsRefused, contribute, lead_pass
from partitioner.crew.jobs.kinds import FrozenKind, JobContext, JobKind, NetworkKind, kind_of
from partitioner.crew.jobs.passes import ANSWERS, EVALUATION, MODELS, OUTPUTS, Outputs
from partitioner.crew.jobs.staged import LOST, StageLost, forget_stages, train_in_stages
from partitioner.crew.messages import Accepted, Leave, Made, Refused, Start, TrainerControl
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import SyncPlan
from partitioner.crew.worker.crews import Crews
from partitioner.crew.worker.progress import Patient, Told, WorkAccount
from partitioner.data.memmaps import Index
from partitioner.run.curves import Curve
from partitioner.run.progress import Progress
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import Synchroniser

#: Seconds of one look into the mailbox.
LOOK_S = 0.2


def jobs_of(
    plan: SyncPlan,
    members: int,
    names: Sequence[str],
    *,
    teacher: bool,
    outputs: bool = False,
    evaluated: bool = False,
    same: Mapping[int, int] = MappingProxyType({}),
) -> list[Job]:
    """The jobs of a run of `members` sub-models by the trainers `names`, the coordinator first.

    A teacher that is not trained is loaded by the coordinator alone. The coordinator writes what
    frozen passes give, so it always takes part in them: the answers, and where they are wanted
    predecessors' `outputs` and what sub-models are `evaluated` by. It copies sub-models whose
    weights are those of an earlier one, which `same` names.
    """
    by = tuple(names)
    frozen = tuple(dict.fromkeys((by[0], *(plan.answers.by or by))))
    jobs = [
        Job(name="teacher", by=(plan.of("teacher").crew or by) if teacher else by[:1]),
        Job(name=ANSWERS, by=frozen, after=("teacher",)),
    ]
    for k in range(members):
        earlier = min(k, 1) if plan.chain == "star" else k
        needed = sorted({*range(earlier), same.get(k, 0)} - {k})
        after = (ANSWERS, *(f"member-{before}" for before in needed))
        if outputs and earlier:
            after = (*after, f"{OUTPUTS}{earlier - 1}")
        of_k = by[:1] if k in same else plan.of(f"member-{k}").by or by
        jobs.append(Job(name=f"member-{k}", by=of_k, after=after))
        if outputs and k + 1 < members and (k == 0 or plan.chain == "strict"):
            sums = (f"{OUTPUTS}{k - 1}",) if k else ()
            jobs.append(Job(name=f"{OUTPUTS}{k}", by=frozen, after=(f"member-{k}", *sums)))
    if evaluated:
        trained = tuple(f"member-{k}" for k in range(members))
        jobs.append(Job(name=MODELS, by=by[:1], after=trained))
        jobs.append(Job(name=EVALUATION, by=frozen, after=(MODELS,)))
    return jobs


def find_finished(work: TrainingContext, jobs: Sequence[Job]) -> list[str]:
    """The jobs whose files are there, and those whose files no other job needs any more."""
    found = list[str]()
    for job in reversed(jobs):
        kind = kind_of(job.name)
        paths = kind.outputs(work)
        after = [later.name for later in jobs if job.name in later.after]
        unneeded = kind.until_used and set(after) <= set(found)
        if unneeded or (paths and not kind.each_time and all(path.exists() for path in paths)):
            found.append(job.name)
    return found


class JobOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's report of a job to the coordinator, beside its files."""

    curve: Curve = []
    #: The SHA-256 of each of its files, by name.
    files: dict[str, str] = {}


@dataclass(slots=True)
class Ends:
    """A trainer's connections to the coordinator."""

    control: CoordinatorClient
    files: Files
    #: Only at the coordinator.
    coordinator: Coordinator | None = None


def enter(control: TrainerControl) -> None:
    """Wait until the coordinator accepts this trainer; raises InputError where it does not."""
    while not isinstance(action := control.poll(LOOK_S), Accepted):
        if isinstance(action, Refused):
            raise InputError(action.reason)


def next_job(control: TrainerControl) -> Start | None:
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
        self,
        work: TrainingContext,
        ends: Ends,
        crews: Crews,
        checkpoint: Path | None = None,
        bundle: str = "",
    ) -> None:
        """At the coordinator, `checkpoint` is the user's teacher, `bundle` the name of a bundle."""
        self._work, self._ends, self._crews = work, ends, crews
        self._context = JobContext(checkpoint, bundle)

    @property
    def exports(self) -> dict[int, tuple[Path, float]]:
        """Exported sub-models: see `TrainingContext`."""
        return self._context.exported

    @property
    def _is_coordinator(self) -> bool:
        return self._ends.coordinator is not None

    def run(self) -> None:
        """Do jobs until the coordinator says that all is done.

        Raises RunRefused and CoordinatorLost.
        """
        control = self._ends.control
        try:
            while (start := next_job(control)) is not None:
                self._crews.account.begin(start.network)
                said = self._do(start)
                waited_s, sent_bytes = self._crews.account.end()
                control.report(
                    Made(
                        rank=control.rank, network=start.network, said=said, waited_s=waited_s,
                        sent_bytes=sent_bytes,
                    )
                )  # fmt: skip
        except CoordinatorLost:
            if not control.may_leave:  # else others have handed the last outcomes in
                raise

    def _do(self, start: Start) -> str:
        """Do a job and hand its outcome in; returns the report beside it, as JSON."""
        job = start.network
        kind = kind_of(job)
        try:
            needed = kind.inputs(self._work, self._fetch)
            others = [path for path in needed if self._fetch(path)]
        except TransferError as error:
            if self._is_coordinator or not isinstance(kind, FrozenKind):
                raise
            # Others have ended the pass meanwhile, or the coordinator will: it computes alone if
            # need be.
            self._work.progress.note(str(error))
            return ""
        if others and not self._is_coordinator and kind.follows_others:
            self._drop_members(needed)
        if kind.ends_stages:
            forget_stages(self._work)
        try:
            if isinstance(kind, FrozenKind):
                self._share(kind)
            elif self._crews.plan.of(job).stage:
                if not self._in_stages(start):
                    return ""
            elif isinstance(kind, NetworkKind):
                if start.alone:
                    kind.train(self._work, self._context)
                else:
                    self._together(kind)
        except CrewEnded as ended:
            self._work.progress.note(str(ended))
            return ""
        is_frozen = isinstance(kind, FrozenKind)
        if not (start.alone or is_frozen or self._is_coordinator) and self._crews.has_coordinator(
            job
        ):
            return ""  # the coordinator's outcome counts: it is there from the beginning
        files = dict[str, str]()
        if not is_frozen or self._is_coordinator:
            for path in kind.outputs(self._work):
                files[self._name(path)] = self._ends.files.send(self._name(path), path)
        curve = self._work.run.read_curves().get(job, [])
        return msgspec.json.encode(JobOutcome(curve=curve, files=files)).decode()

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
            crews.means("teacher"),
            self._ends.files,
        )

    def _together(self, kind: NetworkKind) -> None:
        """Train a network with its crew, in rounds or by gradients."""
        job = kind.name
        checkpoint = self._work.run.checkpoint(job)
        if not self._is_coordinator:
            finished = all(path.exists() for path in kind.outputs(self._work))
            if finished and not self._crews.has_coordinator(job):
                return  # the coordinator was started again before it had fetched it
            # An outcome that the coordinator lacks: the others wait for this trainer.
            self._drop(kind)
        if self._crews.plan.of(job).what == "parameters":
            if not self._is_coordinator and self._crews.has_coordinator(job):
                # The coordinator gives what it has reached.
                checkpoint.unlink(missing_ok=True)
            kind.train(replace(self._work, sync_of=self._crews.rounds), self._context)
            return

        def train(crew: Crew, members: tuple[int, ...]) -> None:
            def sync_of(network: str) -> Synchroniser:
                return self._crews.gradients(network, crew, members)

            try:
                kind.train(replace(self._work, sync_of=sync_of), self._context)
            finally:
                # What it has sent stays counted, and the group is held no longer.
                self._crews.account.follow(lambda: 0)

        control = Patient(self._ends.control, self._crews.account)
        train_in_generations(job, control, self._crews.groups, checkpoint, train)

    def _drop(self, kind: JobKind) -> None:
        for path in kind.outputs(self._work):
            path.unlink(missing_ok=True)

    def _drop_members(self, needed: Collection[Path]) -> None:
        """Remove files made before one that they need, which are of another run."""
        for a in self._work.plan.assignments:
            if self._work.run.member(a.k) not in needed:
                self._drop(kind_of(f"member-{a.k}"))
                self._work.run.checkpoint(f"member-{a.k}").unlink(missing_ok=True)

    def _fetch(self, path: Path) -> bool:
        """Fetch a file; whether it is another one now. The coordinator's own is what others get."""
        if self._is_coordinator and path.exists():
            return False
        return self._ends.files.fetch(self._name(path), path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._work.run.path).as_posix()

    def _share(self, kind: FrozenKind) -> None:
        """Compute a share of a job's frozen passes; the coordinator keeps all of their outputs."""
        ends = self._ends
        for of_job, files in kind.passes(self._work):
            frozen = self._count(of_job)
            try:
                if ends.coordinator is None:
                    contribute(ends.control, frozen)
                elif all(path.exists() for paths in files.values() for path in paths):
                    ends.coordinator.end_pass(frozen.name)
                else:
                    total = len(files) * frozen.pictures
                    with self._work.progress.task(f"{kind.name}, by all", total) as advance:
                        lead_pass(ends.coordinator, ends.control, frozen, files, advance)
            except (OutputsRefused, AgentError) as error:
                if self._is_coordinator or frozen.dtype is np.float16:  # what networks learn from
                    raise
                self._work.progress.note(str(error))

    def _count(self, frozen: FrozenPass) -> FrozenPass:
        def of_variant(variant: int) -> Outputs:
            of = frozen.outputs_of(variant)

            def batch(index: Index) -> Sequence[Tensor]:
                self._crews.account.count(len(index))
                return of(index)

            return batch

        return replace(frozen, outputs_of=of_variant)


def worker_of(
    work: TrainingContext,
    ends: Ends,
    plan: SyncPlan,
    facts: Facts,
    groups: TrainerGroups,
    store: SignedStore,
    checkpoint: Path | None,
    note: Callable[[str], None],
    shown: Progress | None,
    bundle: str = "",
) -> Worker:
    """Build a worker that reports progress to the coordinator, which displays everybody's."""
    # The coordinator's own rows go to itself.
    account = WorkAccount(lambda: ends.files.bytes_sent)
    ends.control.state = account.state
    crews = Crews(
        plan=plan, facts=facts, control=ends.control, groups=groups, store=store, account=account
    )
    told = replace(work, progress=Told(account, note, shown))
    return Worker(told, ends, crews, checkpoint, bundle)
