"""What a trainer does in a run: jobs as the desk gives them out, from and to the run folder."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import TCPStore

from mdp.errors import MDPError
from partitioner.crew.exchange.answers import FrozenPass, contribute, share_out
from partitioner.crew.exchange.control import Hand
from partitioner.crew.exchange.gradients import Gradients
from partitioner.crew.exchange.groups import Groups
from partitioner.crew.exchange.mean import Means
from partitioner.crew.exchange.parameters import CrewEnded, Rounds
from partitioner.crew.exchange.queues import StoreDesk, StoreTrainer
from partitioner.crew.generations import train_in_generations
from partitioner.crew.machine.events import Leave, Made, Refused, Start, Trainer
from partitioner.crew.machine.jobs import Job
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.flows import Links
from partitioner.crew.planning.syncplan import BUCKET_BYTES, SyncPlan
from partitioner.crew.staged import LOST, Files, StageLost, forget_stages, train_in_stages
from partitioner.data.memmaps import load
from partitioner.run.curves import Curve
from partitioner.run.progress import Advance
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import Crew
from partitioner.training.members import train_members
from partitioner.training.synchroniser import Synchroniser
from partitioner.training.teacher import ensure_targets, ensure_teacher, kept_targets, logits_of

T = TypeVar("T")

#: Seconds of one look into the mailbox.
LOOK_S = 0.2


class RunRefused(MDPError):
    """The desk takes this trainer no longer, or ends."""


def jobs_of(plan: SyncPlan, members: int, names: Sequence[str], *, teacher: bool) -> list[Job]:
    """The jobs of a run of `members` sub-models by the trainers `names`, the desk first.

    A teacher that is not trained is loaded by the desk alone.
    """
    by = tuple(names)
    jobs = [
        Job(name="teacher", by=(plan.of("teacher").crew or by) if teacher else by[:1]),
        Job(name="answers", by=plan.answers.by or by, after=("teacher",)),
    ]
    for k in range(members):
        earlier = min(k, 1) if plan.chain == "star" else k
        after = ("answers", *(f"member-{before}" for before in range(earlier)))
        jobs.append(Job(name=f"member-{k}", by=plan.of(f"member-{k}").by or by, after=after))
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


@dataclass(slots=True)
class Ends:
    """A trainer's connections to the desk; each is used by one thread."""

    control: Hand
    files: Files
    answers: StoreTrainer
    rows: StoreTrainer
    #: Only at the desk.
    share: StoreDesk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crews:
    """How this trainer trains with others."""

    plan: SyncPlan
    facts: Facts
    control: Trainer
    groups: Groups
    #: Where trainers say their names.
    store: TCPStore

    def rounds(self, network: str) -> Synchroniser:
        """Means of parameters."""
        trainers = len(self.plan.of(network).by or self.facts.names)
        return Rounds(
            network,
            self.control,
            self.groups,
            trainers,
            first=True,  # each keeps its own files
            means=self._means(network),
            codec_of=self.plan.of(network).codec_of,
        )

    def gradients(self, network: str, crew: Crew, members: tuple[int, ...]) -> Synchroniser:
        """Means of gradients, in one generation."""
        sync = self.plan.of(network)
        paces = [self._pace(network, rank) for rank in members] if sync.shares == "pace" else ()
        return Gradients(
            crew,
            self._means(network),
            sync.codec_of,
            paces=paces,
            bucket_bytes=sync.bucket_bytes or BUCKET_BYTES,
            members=members,
        )

    def _means(self, network: str) -> Means:
        sync = self.plan.of(network)
        uplink, sites = _ByRank(self._uplink), _ByRank(self._site)
        return Means(route=sync.way, shards=sync.shards, uplink=uplink, sites=sites)

    def name_of(self, rank: int) -> str:
        """The name of a trainer."""
        return self.store.get(f"name/{rank}").decode()

    def _pace(self, network: str, rank: int) -> float:
        return self.facts.of(self.name_of(rank)).pictures_per_s.get(network, 1.0)

    def _uplink(self, rank: int) -> float:
        return Links(self.facts).capacities.get(f"{self.name_of(rank)} up", 1.0)

    def _site(self, rank: int) -> str:
        name = self.name_of(rank)
        return next((site[0] for site in self.facts.sites if name in site), name)


class _ByRank(Mapping[int, T]):
    """What is computed of a rank, as a mapping without a fixed set of keys."""

    def __init__(self, of: Callable[[int], T]) -> None:
        self._of = of

    def __getitem__(self, rank: int) -> T:
        return self._of(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


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
        """Do jobs until the desk says that all is done; raises RunRefused."""
        control = self._ends.control
        while (start := next_job(control)) is not None:
            said = self._do(start)
            control.report(Made(rank=control.rank, network=start.network, said=said))

    def _do(self, start: Start) -> str:
        """Do a job and hand its outcome in; returns what the desk is told beside it, as JSON."""
        job = start.network
        for path in self._needed(job):
            if not path.exists():
                self._ends.files.fetch(self._name(path), path)
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
            return ""
        if job != "answers" or self._is_desk:
            for path in made(self._work, job):
                self._ends.files.send(self._name(path), path)
        curve = self._work.run.kept_curves().get(job, [])
        return msgspec.json.encode(Outcome(curve=curve)).decode()

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
        if self._crews.plan.of(job).what == "parameters":
            if not self._is_desk:  # the desk gives what it has reached
                checkpoint.unlink(missing_ok=True)
            self._train(job, replace(self._work, sync_of=self._crews.rounds))
            return

        def train(crew: Crew, members: tuple[int, ...]) -> None:
            def sync_of(network: str) -> Synchroniser:
                return self._crews.gradients(network, crew, members)

            self._train(job, replace(self._work, sync_of=sync_of))

        train_in_generations(job, self._ends.control, self._crews.groups, checkpoint, train)

    def _train(self, job: str, work: Work) -> None:
        """Train the network of a job; nothing where the folder has it."""
        if job == "teacher":
            ensure_teacher(work, self._checkpoint)
        elif job == "answers":
            self._answers()
        else:
            self._member(work, int(job.removeprefix("member-")))

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
        earlier = [run.member(before) for before in self._work.schedule_of(k).predecessors(k)]
        # The names of the answers follow from the teacher's content.
        if not run.teacher.exists():
            self._ends.files.fetch(self._name(run.teacher), run.teacher)
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
            outputs_of=lambda v: logits_of(teacher, variants.view(work.teacher_view, v)),
            outputs=["the teacher's answers"],
            arithmetic=work.settings.autocast,
        )
        if ends.share is None:
            contribute(ends.answers, ends.rows, frozen)
            return
        if not all(path.exists() for path in paths):
            total = len(paths) * frozen.pictures
            with work.progress.task("the teacher's answers, by all", total) as advance:
                _shared_out(ends, frozen, {v: [path] for v, path in enumerate(paths)}, advance)
        ensure_targets(work, teacher)  # of calibration and test, too

    def _member(self, work: Work, k: int) -> None:
        teacher = ensure_teacher(work, None)
        train_members(work, teacher, [load(path) for path in kept_targets(work)], only=[k])


def _shared_out(
    ends: Ends, frozen: FrozenPass, paths: Mapping[int, Sequence[Path]], advance: Advance
) -> None:
    """Share a pass out at the desk, which takes part in it from another thread."""
    assert ends.share is not None
    failed: list[Exception] = []

    def take_part() -> None:
        try:
            contribute(ends.answers, ends.rows, frozen)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=take_part, name="answers", daemon=True)
    thread.start()
    share_out(ends.share, frozen, paths, advance)
    thread.join()
    if failed:
        raise failed[0]
