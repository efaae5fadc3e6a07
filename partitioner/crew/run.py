"""The coordinator of a training together, and the trainers that join it.

The coordinator owns the run folder: it plans, gives out jobs, takes part in them as a trainer, and
exports. Every other trainer has its own copy of the pictures, fetches what else it needs, and keeps
a run folder of its own.
"""

import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from mdp import __version__
from mdp.errors import InputError
from mdp.files import toml_bytes, write_bytes, write_toml
from mdp.formats.plan import Plan
from partitioner.crew.averaging.groups import TrainerGroups, timeout_s
from partitioner.crew.begin import Begin, Ending, begin_of
from partitioner.crew.bus.address import exposure, own_address, parse_address
from partitioner.crew.bus.control import Coordinator, CoordinatorClient, RunRefused, log_lines, post
from partitioner.crew.bus.files import CoordinatorFiles, Files, TrainerFiles
from partitioner.crew.bus.store import SignedStore, connect, serve_store
from partitioner.crew.coordinator.jobs import Jobs
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.neighbours import Graph, Neighbours, neighbours_of
from partitioner.crew.coordinator.partial import OnRequest, Shuffled, draw_by
from partitioner.crew.coordinator.rounds import RoundLengths, growing_period
from partitioner.crew.coordinator.run import CrewRun
from partitioner.crew.coordinator.schedule import (
    LocalSgdSchedule,
    RoundSchedule,
    SynchronousSchedule,
)
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.folder import CrewFolder
from partitioner.crew.history import costs_of, parts_of, spans_of
from partitioner.crew.jobs.kinds import TrainingKind, kind_of
from partitioner.crew.jobs.staged import hand_out_start
from partitioner.crew.messages import State, Waited
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.picture import schedule_svg
from partitioner.crew.planning.syncplan import (
    Neighbourhood,
    RequestedGroups,
    ShuffledGroups,
    SyncPlan,
    is_exact,
    write_plan,
)
from partitioner.crew.planning.tuning import (
    Alike,
    Tuned,
    judge,
    trial_jobs,
    trial_schedule,
    trials_of,
    tuned_plan,
)
from partitioner.crew.planning.work import Work
from partitioner.crew.worker.probe import facts_of, measure, probe_jobs
from partitioner.crew.worker.progress import board
from partitioner.crew.worker.trial import draw_network, try_candidates
from partitioner.crew.worker.worker import (
    Ends,
    JobOutcome,
    enter,
    find_finished,
    jobs_of,
    worker_of,
)
from partitioner.crew.workload import longest_s, workload
from partitioner.data.datasets import SPLITS, Dataset, open_dataset
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import Settings, TrainingConfig
from partitioner.training.context import TrainingContext
from partitioner.training.members import twins
from partitioner.training.world import world

#: Wait for trainers that are planned and not there yet, in seconds.
WAIT_S = 600.0
#: Name of the user's teacher among the files of a run.
_CHECKPOINT = "teacher-checkpoint"
#: Seconds for trainers to end what they do and to read that all is done.
_LEAVE_S = 60.0


def data_digest(data: Dataset) -> str:
    """Digest of pictures and version: the same on every trainer."""
    made_of = [__version__, *(data.split(name).digest for name in SPLITS)]
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


class Together(NamedTuple):
    """A training by a crew, whose coordinator this process is."""

    folder: CrewFolder
    plan: SyncPlan
    #: The settings of the training, as the crew's plan changes them.
    config: TrainingConfig

    @classmethod
    def of(
        cls, folder: CrewFolder, plan: Plan, config: TrainingConfig, data: Dataset
    ) -> "Together":
        """Read crew.toml; raises ConfigError, and InputError for what no crew trains."""
        if world().size > 1:
            raise InputError("torchrun: expected one process for each trainer of a crew")
        if config.options.teaching == "live":
            raise InputError('--crew: expected run.teaching = "kept" or "auto", got "live"')
        sync = folder.plan(workload(plan, config, data))
        schedule = replace(config.schedule, chain=sync.chain)
        keep = sync.answers.keep or config.options.answers_keep
        options = replace(config.options, teaching="kept", answers_keep=keep)
        return cls(folder, sync, replace(config, schedule=schedule, options=options))

    @property
    def digest(self) -> str:
        """Digest of all that gives other weights than one process; empty where nothing does."""
        return "" if all(map(is_exact, self.plan.network)) else self.plan.digest

    def train(self, work: TrainingContext, checkpoint: Path | None, bundle: str) -> TrainingContext:
        """Finish the training; `checkpoint` is the user's teacher. See `train_together`."""
        return train_together(work, self.folder, self.plan, checkpoint, bundle=bundle)


def train_together(
    work: TrainingContext,
    folder: CrewFolder,
    plan: SyncPlan,
    checkpoint: Path | None,
    *,
    bundle: str = "",
) -> TrainingContext:
    """Finish the training of `work` with the trainers of a crew, as its coordinator.

    With a name of a `bundle` its sub-models are exported, and evaluated by all, unless all were
    trained before; returns the work with these. The coordinator listens on its address in the
    facts. Waits `WAIT_S` for trainers that are planned, and goes on without those that have not
    come. Raises InputError for an address that is taken or public; RunRefused where the crew cannot
    go on.
    """
    facts, run = folder.facts(), work.run
    if plan.facts not in ("", facts.digest):
        work.progress.note(f"{folder.plan_file}: decided from other facts than {folder.facts_file}")
    schedule = work.settings.schedule
    jobs = jobs_of(
        plan,
        len(work.plan.assignments),
        facts.names,
        teacher=_trains_teacher(work.settings),
        outputs=schedule.boosting or schedule.stacking,
        # Trainers that have nothing to train may not come.
        evaluated=bool(bundle) and not _has_members(work),
        same=twins(work.plan, schedule),
    )
    finished = find_finished(work, jobs)

    def schedule_of(network: str, members: set[int], names: Mapping[int, str]) -> RoundSchedule:
        return _schedule(work, plan, facts, network, members, names)

    begin = Begin(
        version=__version__,
        names=facts.names,
        settings=work.settings,
        plan=work.plan,
        crew=plan,
        facts=facts,
        meeting_s=timeout_s(_longest_s(work, plan, facts)),
        weights=msgspec.convert(
            {k: path.suffix for k, path in work.weights.items()}, type=dict[int, Ending]
        ),
    )

    address, digest = facts.trainer[0].address, data_digest(work.data)
    with _leading(
        address, folder, begin, digest, Jobs(jobs, finished), schedule_of, work.progress, WAIT_S
    ) as led:
        for done in finished:
            for path in kind_of(done).outputs(work):
                if path.exists():
                    led.ends.files.send(path.relative_to(run.path).as_posix(), path)
        for name, path in _starting_files(work, checkpoint).items():
            led.ends.files.send(name, path)
        if plan.of("teacher").stage and "teacher" not in finished:
            hand_out_start(work, plan.of("teacher"), checkpoint, facts.names[0], led.ends.files)
        with (
            _groups(led.ends.control, led.store, begin) as groups,
            board(led.states, facts.names, work.progress) as note,
        ):
            worker = worker_of(
                work, led.ends, plan, facts, groups, led.store, checkpoint, note, None, bundle
            )
            worker.run()
        for one in jobs:
            kind = kind_of(one.name)
            for path in () if kind.until_used else kind.outputs(work):
                if not path.exists():  # another trainer made it
                    led.ends.files.fetch(path.relative_to(run.path).as_posix(), path)
    for network, outcome in led.run.said.items():
        curve = msgspec.json.decode(outcome, type=JobOutcome).curve
        if curve and network not in run.read_curves():
            run.keep_curve(network, curve)
    log = list(log_lines(folder.log))
    if spans := spans_of(log):
        write_bytes(folder.picture, schedule_svg(spans).encode())
    for cost in costs_of(log):
        work.progress.note(cost.words)
    return dataclasses.replace(work, exported=worker.exports)


class _Led(NamedTuple):
    """A run at its coordinator, which is its first trainer too."""

    ends: Ends
    coordinator: Coordinator
    store: SignedStore
    run: CrewRun

    def states(self) -> dict[str, State]:
        """Return what the trainers that are there do, by name."""
        names = dict(self.run.living)
        return {
            names[rank]: state for rank, state in self.coordinator.states.items() if rank in names
        }


@contextmanager
def _leading(
    address: str,
    folder: CrewFolder,
    begin: Begin,
    digest: str,
    jobs: Jobs,
    schedule_of: Callable[[str, set[int], Mapping[int, str]], RoundSchedule],
    progress: Progress,
    wait_s: float,
    *,
    whole: bool = False,
) -> Iterator[_Led]:
    """Coordinate `jobs` during the block, which does them, and until all others have left.

    A `whole` run ends where a trainer is lost, or is not there in `wait_s`.
    """
    token = folder.token()
    run = CrewRun(MembershipMachine(digest, jobs.by, {}), jobs, schedule_of, whole=whole)
    host, port = parse_address(address)
    if said := exposure(host):
        progress.note(said)
    store = serve_store(host, port, token, reserved=1)
    watch, posting = Watch(begin.meeting_s), store.another()
    with ExitStack() as stack:
        files = stack.enter_context(
            CoordinatorFiles(folder.files, partial(post, posting), partial(_digest_of, run))
        )
        coordinator = Coordinator(
            store, run, watch, folder.log, msgspec.msgpack.encode(begin), files.put
        )
        stack.callback(coordinator.close)
        with closing(CoordinatorClient(store, reserved=0)) as control:
            control.join(begin.names[0], digest)
            enter(control)
            patience = threading.Timer(wait_s, lambda: control.report(Waited(rank=0)))
            patience.daemon = True
            patience.start()
            try:
                yield _Led(Ends(control, files, coordinator), coordinator, store, run)
            finally:
                patience.cancel()
        _let_leave(coordinator)
        if coordinator.drops:
            progress.note(
                f"{coordinator.drops} values in the coordinator's store were not of this crew, and "
                f"were deleted: another program writes to {address}"
            )


def _starting_files(work: TrainingContext, checkpoint: Path | None) -> dict[str, Path]:
    """The user's files that networks start from, by their names for trainers."""
    found = {f"weights-{k}": path for k, path in work.weights.items()}
    if checkpoint is not None and _trains_teacher(work.settings):
        found[_CHECKPOINT] = checkpoint
    return found


def _has_members(work: TrainingContext) -> bool:
    return all(work.run.member(a.k).exists() for a in work.plan.assignments)


def _longest_s(work: TrainingContext, plan: SyncPlan, facts: Facts) -> float:
    """Seconds that trainers may wait for each other in a group."""
    settings, data = work.settings, work.data
    validated = len(data.calibration) if settings.schedule.patience else 0
    return longest_s(plan, facts, workload(work.plan, settings, data), validated)


def _trains_teacher(settings: Settings) -> bool:
    return settings.teacher_schedule.epochs > 0


def _schedule(
    work: TrainingContext,
    plan: SyncPlan,
    facts: Facts,
    network: str,
    members: set[int],
    names: Mapping[int, str],
) -> RoundSchedule:
    """The rounds of a network that several trainers share; `names` are of all that take part."""
    sync = plan.of(network)
    if sync.what == "gradients":
        return SynchronousSchedule(network, 1, expected=members)
    kind = kind_of(network)
    assert isinstance(kind, TrainingKind)
    schedule = kind.schedule(work)
    pictures = range(len(work.singles.train))[kind.rows(work)]
    trainers = len(sync.by or facts.names)
    batches = trainers * math.ceil(len(pictures) / schedule.batch_size)
    every, epochs, period = sync.round_pictures, schedule.epochs, None
    if sync.period == "grows":
        period = growing_period(every, epochs * batches)
    lengths = RoundLengths(every, batches, epochs, period)
    meet = sync.meet
    if isinstance(meet, ShuffledGroups):
        sites = {name: site[0] for site in facts.sites for name in site}

        def site_of(rank: int) -> str:
            return sites.get(names.get(rank, ""), "")

        return Shuffled(
            network,
            lengths,
            members,
            size=meet.size,
            cross_every=meet.cross_every,
            site_of=site_of,
            draw=draw_by(work.settings.seed),
        )
    if isinstance(meet, RequestedGroups):
        return OnRequest(
            network,
            lengths,
            members,
            size=meet.size,
            gap=meet.gap,
            reach=meet.reach,
            divide=meet.divide,
            draw=draw_by(work.settings.seed),
        )
    if isinstance(meet, Neighbourhood):
        planned, pairs = sync.by or facts.names, meet.pairs

        def among(ranks: Sequence[int]) -> Graph[int]:
            """Neighbours of these trainers: by the plan's pairs, or a ring in its order."""
            rank_of = {names[rank]: rank for rank in ranks if rank in names}
            return neighbours_of(
                [rank_of[name] for name in planned if name in rank_of],
                [(rank_of[a], rank_of[b]) for a, b in pairs if a in rank_of and b in rank_of],
            )

        return Neighbours(
            network,
            lengths,
            members,
            gap=meet.gap,
            backup=meet.backup,
            stale=meet.stale,
            skip=meet.skip,
            graph_of=among,
        )
    return LocalSgdSchedule(
        network, lengths, expected=members, background=sync.when == "background"
    )


def _digest_of(run: CrewRun, name: str) -> str:
    """The SHA-256 of a file as the trainer told that made it; empty where none did."""
    for said in list(run.said.values()):
        if digest := msgspec.json.decode(said, type=JobOutcome).files.get(name):
            return digest
    return ""


@contextmanager
def _groups(
    control: CoordinatorClient, store: SignedStore, begin: Begin, name: str = ""
) -> Iterator[TrainerGroups]:
    """This trainer's groups, by default the coordinator's; says its name to the others."""
    name, meeting_s = name or begin.names[0], begin.meeting_s
    own = store.another(timedelta(seconds=meeting_s))
    store.set(f"name/{control.rank}", name.encode())
    store.set(f"rank/{name}", str(control.rank).encode())
    host = own_address(*control.address)
    groups = TrainerGroups(own, control.rank, host, control.has_committed, meeting_s)
    try:
        yield groups
    finally:
        groups.close()


def _let_leave(coordinator: Coordinator) -> None:
    """Keep the store until all have read that they may go."""
    until_s = time.monotonic() + _LEAVE_S
    while coordinator.states and time.monotonic() < until_s:
        time.sleep(0.05)


def join(
    address: str, name: str, token: str, data: str, run: Path, progress: Progress, *, wait_s: float
) -> None:
    """Take part in a training until it ends, as the trainer `name` of its plan.

    Waits `wait_s` for a coordinator. Raises RunRefused where the coordinator refuses this trainer,
    and CoordinatorLost.
    """
    host, port = parse_address(address)
    progress.note(f"waiting for the coordinator at {address}")
    store = connect(host, port, token, wait_s)
    control = CoordinatorClient(store)
    with ExitStack() as stack:
        stack.enter_context(closing(control))
        files: Files = TrainerFiles(control)
        begin = begin_of(address, control.describe())
        # The first one is the coordinator itself.
        if name not in begin.names[1:]:
            known = ", ".join(begin.names[1:])
            raise InputError(f"--name: expected a trainer of the plan ({known}), got {name!r}")
        data_of = begin.settings.data
        pictures = open_dataset(
            data,
            limit_train=data_of.limit_train,
            limit_test=data_of.limit_test,
            cameras=begin.plan.cameras,
        )
        folder = RunFolder(run)
        stack.enter_context(folder.lock())
        own = replace(data_of, source=pictures.source)
        settings = replace(begin.settings, data=own)
        control.join(name, data_digest(pictures))
        enter(control)
        groups = stack.enter_context(_groups(control, store, begin, name))
        if begin.trials and begin.facts is not None:
            draw = partial(draw_network, begin.plan, settings)
            try_candidates(begin.trials, begin.facts, control, groups, store, draw)
            return
        if begin.crew is None or begin.facts is None:
            measure(control, groups, store, begin.plan, settings)
            return
        folder.start_or_continue(settings, begin.plan)
        weights = {k: folder.cache / f"weights-{k}{ending}" for k, ending in begin.weights.items()}
        for k, path in weights.items():
            files.fetch(f"weights-{k}", path)
        checkpoint = None
        if settings.teacher.checkpoint and _trains_teacher(settings):
            suffix = Path(settings.teacher.file or "").suffix
            checkpoint = folder.cache / f"{_CHECKPOINT}{suffix}"
            files.fetch(_CHECKPOINT, checkpoint)
        work = TrainingContext(folder, settings, begin.plan, pictures, progress, weights)
        plan, facts = begin.crew, begin.facts
        ends = Ends(control, files)
        worker_of(work, ends, plan, facts, groups, store, checkpoint, progress.note, progress).run()


def probe(
    address: str,
    names: Sequence[str],
    folder: CrewFolder,
    plan: Plan,
    settings: Settings,
    digest: str,
    progress: Progress,
    *,
    wait_s: float = WAIT_S,
) -> Facts:
    """Measure trainers and lines, as the coordinator `names[0]`.

    Trainers that do not come are left out. Writes facts.toml. Raises InputError.
    """
    begin = Begin(version=__version__, names=tuple(names), settings=settings, plan=plan)

    with (
        _leading(
            address, folder, begin, digest, Jobs(probe_jobs(names)),
            lambda network, *_: SynchronousSchedule(network, 1), progress, wait_s,
        ) as led,
        _groups(led.ends.control, led.store, begin) as groups,
    ):  # fmt: skip
        measure(led.ends.control, groups, led.store, plan, settings)
    facts = facts_of(names, address, led.run.said)
    write_toml(folder.facts_file, facts)
    return facts


def tune(
    folder: CrewFolder,
    sync: SyncPlan,
    work: Work,
    alike: Sequence[Alike],
    plan: Plan,
    settings: Settings,
    digest: str,
    progress: Progress,
    *,
    wait_s: float = WAIT_S,
) -> Tuned:
    """Try candidates with the trainers of a crew, as its coordinator, and keep the quickest ones.

    alike: networks of the crew's plan `sync`, with the candidates of each. Writes tuned.toml
    and then crew.toml. Raises InputError where one cannot be written, and RunRefused where a
    trainer is lost or not there in `wait_s`; both are then as they were.
    """
    facts, trials = folder.facts(), trials_of(alike)
    of_trials = {name for one in alike for name in one.crew}
    names = (facts.names[0], *(name for name in facts.names[1:] if name in of_trials))
    begin = Begin(
        version=__version__,
        names=names,
        settings=settings,
        plan=plan,
        facts=facts,
        meeting_s=timeout_s(_longest_trial_s(alike, facts)),
        trials=tuple(trials),
    )
    jobs = trial_jobs(trials, names)
    batches = [one.network.batch for one in alike for _ in one.candidates]
    known = {
        job.name: (trial, batch)
        for job, trial, batch in zip(jobs[:-1], trials, batches, strict=True)
    }

    def schedule_of(job: str, members: set[int], _: Mapping[int, str]) -> RoundSchedule:
        if job not in known:
            return SynchronousSchedule(job, 1)
        trial, batch = known[job]
        return trial_schedule(job, trial, batch, members, len(trial.crew or facts.names))

    try:
        with (
            _leading(
                facts.trainer[0].address, folder, begin, digest, Jobs(jobs), schedule_of, progress,
                wait_s, whole=True,
            ) as led,
            _groups(led.ends.control, led.store, begin) as groups,
            board(led.states, names, progress),
        ):  # fmt: skip
            draw = partial(draw_network, plan, settings)
            try_candidates(trials, facts, led.ends.control, groups, led.store, draw)
    except RunRefused as error:
        raise RunRefused(f"{error}; {folder.plan_file} is as it was") from error
    told = parts_of(log_lines(folder.log), [job.name for job in jobs[:-1]])
    found = Tuned(facts=facts.digest, tried=tuple(judge(alike, told)))
    former = folder.tuned_file.read_bytes() if folder.tuned_file.exists() else None
    write_bytes(folder.tuned_file, toml_bytes(found, empty=False))
    try:
        write_plan(folder.plan_file, tuned_plan(sync, found.tried, facts, work))
    except BaseException:
        if former is None:
            folder.tuned_file.unlink()
        else:
            write_bytes(folder.tuned_file, former)
        raise
    return found


def _longest_trial_s(alike: Sequence[Alike], facts: Facts) -> float:
    """Seconds that trainers may wait for each other in a group of a trial."""
    return max(
        longest_s(SyncPlan(network=(candidate.sync,)), facts, Work(networks=(one.network,)))
        for one in alike
        for candidate in one.candidates
    )
