"""The desk of a training together, and the trainers that join it.

The desk owns the run folder: it plans, gives out jobs, takes part in them as a trainer, and
exports. Every other trainer has its own copy of the pictures, fetches what else it needs, and keeps
a run folder of its own.
"""

import hashlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import TCPStore

from mdp import __version__
from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import Plan
from partitioner.crew.exchange.address import checked, exposed
from partitioner.crew.exchange.control import Desk, Hand, connect, put, serve_store
from partitioner.crew.exchange.files import fetch_file, send_file
from partitioner.crew.exchange.groups import Groups, timeout_s
from partitioner.crew.exchange.store import StoreDesk, StoreTrainer
from partitioner.crew.folder import CrewFolder
from partitioner.crew.machine.events import Schedule, Waited
from partitioner.crew.machine.jobs import Jobs
from partitioner.crew.machine.run import Run
from partitioner.crew.machine.schedule import Everyone, Exact, Machine
from partitioner.crew.machine.watch import Watch
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import SyncPlan
from partitioner.crew.worker import Crews, Ends, Outcome, Worker, jobs_of, made
from partitioner.data.datasets import SPLITS, Dataset, open_dataset
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import Schedule as Epochs
from partitioner.run.settings import Settings
from partitioner.training.context import Work

#: Wait for trainers that are planned and not there yet, in seconds.
WAIT_S = 600.0
#: Kept for every trainer that may still come: no number of readers deletes a file of the run.
_EVERYBODY = 2**31
#: Seconds for trainers to read that all is done.
_LEAVE_S = 10.0


class Begin(Record, frozen=True, kw_only=True):
    """What a trainer has to know before it can join."""

    version: str
    settings: Settings
    plan: Plan
    crew: SyncPlan
    facts: Facts


class StoreFiles:
    """Files of a run in the desk's store; used by one thread."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    def send(self, name: str, path: Path) -> None:
        """Hand a file in."""
        send_file(self._store, name, path, _EVERYBODY)

    def fetch(self, name: str, path: Path) -> None:
        """Write the file to `path`; waits until there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fetch_file(self._store, name, path)


def data_digest(data: Dataset) -> str:
    """Of pictures and version: the same on every trainer."""
    made_of = [__version__, *(data.split(name).digest for name in SPLITS)]
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def train_together(
    work: Work,
    folder: CrewFolder,
    plan: SyncPlan,
    checkpoint: Path | None,
    *,
    wait_s: float = WAIT_S,
) -> None:
    """Finish the training of `work` with the trainers of a crew, as its desk.

    The desk listens on its address in the facts. Waits `wait_s` for trainers that are planned, and
    goes on without those that have not come. Raises InputError for an address that is taken or
    public; RunRefused where the crew cannot go on.
    """
    facts, run = folder.facts(), work.run
    jobs = jobs_of(plan, len(work.plan.assignments), facts.names, teacher=_trains_teacher(work))
    finished = [job.name for job in jobs if _is_made(work, job.name)]

    def schedule_of(network: str, members: set[int]) -> Schedule:
        return _schedule(work, plan, facts, network, members)

    digest = data_digest(work.data)
    machine = Run(
        Machine(digest, {job.name: job.by for job in jobs}, {}), Jobs(jobs, finished), schedule_of
    )
    folder.log.unlink(missing_ok=True)
    host, port = checked(facts.trainer[0].address)
    if said := exposed(host):
        work.progress.note(said)
    store = serve_store(host, port)
    watch = Watch(timeout_s(0.0))
    desk = Desk(store, machine, watch, folder.token(), folder.log)
    try:
        control = Hand(host, store.port)  # the first: its rank is 0
        begin = Begin(
            version=__version__, settings=work.settings, plan=work.plan, crew=plan, facts=facts
        )
        put(store, "begin", msgspec.json.encode(begin))
        share = StoreDesk(connect(host, store.port), "answers")
        with _ends(control, share) as ends:
            for job in finished:
                for path in made(work, job):
                    ends.files.send(path.relative_to(run.path).as_posix(), path)
            for k, path in work.weights.items():
                ends.files.send(f"weights-{k}", path)
            control.join(facts.names[0], digest, folder.token())
            patience = threading.Timer(wait_s, lambda: control.report(Waited(rank=0)))
            patience.daemon = True
            patience.start()
            _work(work, plan, facts, ends, store, facts.names[0], checkpoint)
            patience.cancel()
        _let_leave(desk)
    finally:
        desk.close()
    for network, said in machine.said.items():
        _keep(work, network, said)


def _is_made(work: Work, job: str) -> bool:
    paths = made(work, job)
    return bool(paths) and all(path.exists() for path in paths)


def _trains_teacher(work: Work) -> bool:
    return work.settings.teacher_schedule.epochs > 0


def _schedule(
    work: Work, plan: SyncPlan, facts: Facts, network: str, members: set[int]
) -> Schedule:
    """The rounds of a network that several trainers share."""
    sync = plan.of(network)
    if sync.what == "gradients":
        return Exact(network, 1, expected=members)
    schedule: Epochs = work.settings.teacher_schedule
    if network != "teacher":
        schedule = work.schedule_of(int(network.removeprefix("member-")))
    trainers = len(sync.by or facts.names)
    batches = trainers * math.ceil(len(work.data.train) / schedule.batch_size)
    return Everyone(network, sync.round_pictures, batches, schedule.epochs)


@contextmanager
def _ends(control: Hand, share: StoreDesk | None = None) -> Iterator[Ends]:
    """A trainer's connections; it leaves at the end."""
    host, port = control.address
    try:
        yield Ends(
            control=control,
            files=StoreFiles(connect(host, port)),
            answers=StoreTrainer(connect(host, port), "answers", control.rank),
            rows=StoreTrainer(connect(host, port), "answers", control.rank),
            share=share,
        )
    finally:
        control.close()


def _work(
    work: Work,
    plan: SyncPlan,
    facts: Facts,
    ends: Ends,
    names: TCPStore,
    name: str,
    checkpoint: Path | None = None,
) -> None:
    """Do jobs until all is done."""
    control = ends.control
    assert isinstance(control, Hand)
    host, port = control.address
    meeting_s = timeout_s(0.0)
    store = connect(host, port, timeout=timedelta(seconds=meeting_s))
    groups = Groups(store, control.rank, own_address(host, port), control.committed, meeting_s)
    put(names, f"name/{control.rank}", name.encode())
    try:
        Worker(
            work,
            ends,
            Crews(
                plan=plan,
                facts=facts,
                control=control,
                groups=groups,
                name_of=lambda rank: names.get(f"name/{rank}").decode(),
            ),
            checkpoint,
        ).run()
    finally:
        groups.close()


def own_address(host: str, port: int) -> str:
    """The own address on the way to a desk."""
    with socket.create_connection((host, port), timeout=5.0) as connection:
        address: str = connection.getsockname()[0]
    return address


def _let_leave(desk: Desk) -> None:
    """Keep the store until all have read that they may go."""
    until_s = time.monotonic() + _LEAVE_S
    while desk.living and time.monotonic() < until_s:
        time.sleep(0.05)


def _keep(work: Work, network: str, said: str) -> None:
    """Note what a trainer said of a network that it has trained."""
    outcome = msgspec.json.decode(said, type=Outcome)
    if outcome.curve and network not in work.run.kept_curves():
        work.run.keep_curve(network, outcome.curve)


def join(
    address: str, name: str, token: str, data: str, run: Path, progress: Progress, *, wait_s: float
) -> None:
    """Take part in a training until it ends, as the trainer `name` of its plan.

    Waits `wait_s` for a desk. Raises RunRefused where the desk refuses this trainer, and DeskLost.
    """
    host, port = checked(address)
    store = connect(host, port, wait_s)
    begin = msgspec.json.decode(store.get("begin"), type=Begin)
    if begin.version != __version__:
        raise InputError(f"{address}: the desk has version {begin.version}, this is {__version__}")
    if name not in begin.facts.names:
        known = ", ".join(begin.facts.names[1:])
        raise InputError(f"--name: expected a trainer of the plan ({known}), got {name!r}")
    facts = begin.settings.data
    pictures = open_dataset(data, limit_train=facts.limit_train, limit_test=facts.limit_test)
    folder = RunFolder(run)
    with folder.locked():
        own = msgspec.structs.replace(facts, source=pictures.source)
        settings = msgspec.structs.replace(begin.settings, data=own)
        folder.start_or_continue(settings, begin.plan)
        control = Hand(host, port)
        with _ends(control) as ends:
            control.join(name, data_digest(pictures), token)
            weights = {
                a.k: folder.cache / f"weights-{a.k}.safetensors"
                for a in begin.plan.assignments
                if a.network is not None and a.network.name in settings.weights
            }
            for k, path in weights.items():
                ends.files.fetch(f"weights-{k}", path)
            work = Work(folder, settings, begin.plan, pictures, progress, weights)
            _work(work, begin.crew, begin.facts, ends, store, name)
