"""Faults between a coordinator and its trainers: what hangs, is too large, or is another's."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from mdp import __version__
from mdp.testing.processes import until
from partitioner.build.inputs import TrainingInputs
from partitioner.build.settings import run_settings
from partitioner.crew import run as crew_run
from partitioner.crew.begin import Begin
from partitioner.crew.bus import control
from partitioner.crew.bus.control import MAX_BYTES, Coordinator, CoordinatorClient, mailbox, post
from partitioner.crew.bus.files import CoordinatorFiles
from partitioner.crew.bus.store import CoordinatorLost, SignedStore, connect, serve_store
from partitioner.crew.coordinator.jobs import Jobs
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.schedule import SynchronousSchedule
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.folder import CrewFolder
from partitioner.crew.messages import (
    Accepted,
    Ask,
    Chunk,
    FileHead,
    Gone,
    Offer,
    Rank,
    Refused,
    Rows,
)
from partitioner.crew.worker.probe import probe_jobs
from partitioner.data.datasets import DIGITS, open_dataset
from tests.support.models.runs import QUIET, config_of, tiny_plan

pytestmark = [pytest.mark.torch]

HOST, TOKEN, WAIT_S = "127.0.0.1", "token", 20.0
NAMES = ("coordinator", "nuc", "tower")
#: A coordinator as a process, which says its port.
COORDINATOR = f"""
import sys, time
from pathlib import Path
from tests.integration.crew.test_crew_faults import coordinator_of, serve_store
store = serve_store({HOST!r}, 0, {TOKEN!r})
coordinator = coordinator_of(store, Path(sys.argv[1]))
print(store.port, flush=True)
time.sleep(600)
"""


def coordinator_of(store: SignedStore, path: Path) -> Coordinator:
    return Coordinator(store, MembershipMachine("d", {"member-0": NAMES}, {}), Watch(20.0), path)


@contextmanager
def opened(path: Path) -> Iterator[tuple[SignedStore, Coordinator]]:
    store = serve_store(HOST, 0, TOKEN)
    with closing(coordinator_of(store, path)) as coordinator:
        yield store, coordinator


@contextmanager
def joined(store: SignedStore, name: str) -> Iterator[CoordinatorClient]:
    with closing(CoordinatorClient(store)) as client:
        client.join(name, "d")
        assert isinstance(client.poll(WAIT_S), Accepted)
        yield client


def test_a_coordinator_that_hangs_while_rows_are_sent_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            store = connect(HOST, int(process.stdout.readline()), TOKEN)
            with joined(store, "nuc") as client, ThreadPoolExecutor(1) as pool:
                os.kill(process.pid, signal.SIGSTOP)
                monkeypatch.setattr(control, "COORDINATOR_SILENT_S", 2.0)
                rows = Rows(
                    rank=client.rank, work="teacher", chunk=Chunk(0, 0, 1), part=0, parts=1,
                    took_s=1.0, data=bytes(4_000_000),
                )  # fmt: skip

                def send() -> None:
                    for _ in range(100):
                        client.send(rows)

                sending = pool.submit(send)
                try:
                    assert isinstance(sending.exception(WAIT_S), CoordinatorLost)
                finally:
                    process.kill()
        finally:
            process.kill()


def test_first_outputs_of_many_classes_reach_the_coordinator(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as (store, coordinator), joined(store, "nuc") as client:
        reference = bytes(2 * MAX_BYTES)
        client.append(
            Offer(rank=client.rank, work="teacher", arithmetic="fp32", reference=reference)
        )
        offer = coordinator.read(WAIT_S)
        assert isinstance(offer, Offer)
        assert offer.reference == reference


def test_rows_of_a_pass_that_is_over_are_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as (store, coordinator), joined(store, "nuc") as client:
        coordinator.end_pass("teacher")
        for work in ("teacher", "next"):
            client.append(Ask(rank=client.rank, work=work))
        assert coordinator.read(WAIT_S) == Ask(rank=client.rank, work="next")


def test_no_trainer_speaks_for_another(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with (
        opened(path) as (store, coordinator),
        joined(store, "nuc") as nuc,
        joined(store, "tower") as tower,
    ):
        nuc.report(Gone(rank=tower.rank))
        until(lambda: coordinator.drops == 1, "an event of another rank", WAIT_S)
        assert coordinator.states.keys() == {nuc.rank, tower.rank}
        assert b'"kind":"gone"' not in path.read_bytes()


def test_a_message_that_a_trainer_cannot_read_does_not_leave_it_waiting(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as (store, _), joined(store, "nuc") as client:
        coordinator = store.another()
        coordinator.push(mailbox(client.rank), b"\xc1")
        with pytest.raises(msgspec.DecodeError):
            client.poll(WAIT_S)


def test_a_coordinator_whose_thread_fails_says_so(tmp_path: Path) -> None:
    broken = threading.Event()

    class Broken(Watch):
        def find_lost(self, now_s: float) -> list[Rank]:
            if broken.is_set():
                raise KeyError(0)
            return super().find_lost(now_s)

    store = serve_store(HOST, 0, TOKEN)
    machine = MembershipMachine("d", {"member-0": NAMES}, {})
    with (
        closing(Coordinator(store, machine, Broken(20.0), tmp_path / "log")) as coordinator,
        joined(store, "nuc") as client,
        closing(CoordinatorClient(store)) as later,
    ):
        broken.set()
        for one in (client, later):
            refused = one.poll(WAIT_S)
            assert isinstance(refused, Refused)
            assert refused.reason == "the coordinator fails: KeyError: 0"
            later.join("tower", "d")
        until(lambda: not coordinator.states, "the end of both", WAIT_S)


def test_what_a_lost_trainer_has_begun_to_hand_in_is_deleted(tmp_path: Path) -> None:
    store = serve_store(HOST, 0, TOKEN)
    posting, folder = store.another(), tmp_path / "files"
    with CoordinatorFiles(folder, lambda message: post(posting, message)) as files:
        machine = MembershipMachine("d", {"member-0": NAMES}, {})
        coordinator = Coordinator(store, machine, Watch(20.0), tmp_path / "log", files=files.put)
        with closing(coordinator):
            with joined(store, "nuc") as client:
                client.append(FileHead(rank=client.rank, name="member-0", bytes=7, sha256="0" * 64))
                assert client.reply()
                assert len(list(folder.iterdir())) == 1
            until(lambda: not list(folder.iterdir()), "the end of its file", WAIT_S)


def test_the_coordinator_has_the_lowest_rank_however_quick_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives what was reached before, and says for all that nobody is waited for."""
    others = list[CoordinatorClient]()

    def serve(host: str, port: int, token: str, **options: int) -> SignedStore:
        store = serve_store(host, port, token, **options)
        others.append(CoordinatorClient(connect(host, store.port, token)))
        return store

    monkeypatch.setattr(crew_run, "serve_store", serve)
    data, plan = open_dataset(DIGITS, limit_train=20), tiny_plan()
    settings = run_settings(TrainingInputs.of(config_of(DIGITS), data, plan.teacher))
    begin = Begin(version=__version__, names=("coordinator", "nuc"), settings=settings, plan=plan)
    with (
        crew_run._leading(
            "127.0.0.1:0", CrewFolder(tmp_path), begin, "d", Jobs(probe_jobs(begin.names)),
            lambda network, *_: SynchronousSchedule(network, 1), QUIET, 600.0,
        ) as led,
        closing(others[0]),
    ):  # fmt: skip
        assert (led.ends.control.rank, others[0].rank) == (0, 1)
