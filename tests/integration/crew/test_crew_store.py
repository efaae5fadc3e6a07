"""The coordinator's log, mailboxes, groups and files over a real store on loopback."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import TCPStore

from mdp import __version__
from mdp.errors import InputError, TransferError
from mdp.formats.bundle import sha256_of
from mdp.testing.machine_faults import fill, mounting_works, small_disk
from partitioner.build.inputs import TrainingInputs
from partitioner.build.settings import run_settings
from partitioner.crew.averaging.groups import KEPT_MEETINGS, GroupBroken, TrainerGroups, timeout_s
from partitioner.crew.begin import Begin
from partitioner.crew.bus import control
from partitioner.crew.bus.control import MAX_BYTES, Coordinator, CoordinatorClient, post, replay
from partitioner.crew.bus.files import PIECE_BYTES, CoordinatorFiles, TrainerFiles
from partitioner.crew.bus.store import CoordinatorLost, SignedStore, connect, serve_store
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.messages import (
    Accepted,
    AnyAction,
    AnyEvent,
    Commit,
    Done,
    Joined,
    Meet,
    Ready,
    Refused,
    Waiting,
    cursor,
)
from partitioner.crew.run import join
from partitioner.data.datasets import DIGITS, open_dataset
from tests.support.models.runs import QUIET, config_of, tiny_plan

pytestmark = [pytest.mark.torch]

NET, HOST, WAIT_S, TOKEN = "member-0", "127.0.0.1", 20.0, "token"


def stranger(port: int) -> TCPStore:
    """A connection of who has no key."""
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False)


def names(store: SignedStore) -> list[str]:
    """All names in the store, without their signatures."""
    return sorted(name.rpartition("~")[0] or name for name in store.names())


def machine() -> MembershipMachine:
    return MembershipMachine(
        "d", {NET: ("coordinator", "nuc")}, {NET: LocalSgdSchedule(NET, RoundLengths(10, 10, 1))}
    )


@contextmanager
def opened(path: Path) -> Iterator[tuple[Coordinator, Callable[..., CoordinatorClient]]]:
    """A coordinator, and a function that has a trainer join it."""
    store = serve_store(HOST, 0, TOKEN)
    coordinator = Coordinator(store, machine(), Watch(20.0), path)
    clients: list[CoordinatorClient] = []

    def join(name: str) -> CoordinatorClient:
        clients.append(CoordinatorClient(connect(HOST, store.port, TOKEN)))
        clients[-1].join(name, "d")
        return clients[-1]

    try:
        yield coordinator, join
    finally:
        for client in clients:
            client.close()
        coordinator.close()


def test_what_is_reported_is_answered_and_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with opened(path) as (coordinator, join):
        client = join("coordinator")
        assert client.poll(WAIT_S) == Accepted(rank=0, network="")
        client.report(Waiting(rank=0, network=NET, pictures=0))
        assert isinstance(client.poll(WAIT_S), Meet)
        client.report(Done(rank=0, network=NET, seq=1))
        assert client.poll(WAIT_S) == Commit(rank=0, network=NET, seq=1)
        assert [client.has_committed(NET, seq) for seq in (0, 1, 2)] == [False, True, False]
        assert [client.claim(cursor(NET, 0)) for _ in range(2)] == [0, 1]
        client.report(Ready(rank=0, network=NET, pictures=2))
        assert client.poll() is None
        assert coordinator.states.keys() == {0}
        client.close()
        # All that was consumed is deleted; the counters stay.
        left = names(connect(HOST, client.address[1], TOKEN))
        assert {name.partition("/")[0] for name in left} == {"ranks", "cursor", "begin"}
    replayed = list(replay(path, machine()))
    assert all(then == now for then, now in replayed)
    assert len(replayed) == 5
    lines = path.read_bytes().splitlines()
    # What a trainer reports carries the round it is in, and its batches.
    assert msgspec.json.decode(lines[3])["event"] | {"kind": "ready"} == {
        "kind": "ready", "rank": 0, "network": NET, "pictures": 2, "since": 1, "claims": [0, 1],
    }  # fmt: skip
    # A line that was cut off while the coordinator died is none.
    path.write_bytes(path.read_bytes()[:-5])
    assert len(list(replay(path, machine()))) == 4


def test_strangers_and_garbage_are_not_believed(tmp_path: Path) -> None:
    with opened(tmp_path / "log.jsonl") as (coordinator, join):
        client = join("coordinator")
        assert isinstance(client.poll(WAIT_S), Accepted)
        port = client.address[1]
        with pytest.raises(InputError, match="key: expected a copy of the coordinator's"):
            connect(HOST, port, "another")
        store = connect(HOST, port, TOKEN)
        large = Joined(rank=7, name="x" * MAX_BYTES, digest="d")
        action = Accepted(rank=7, network="")
        for data in (b"\x00", *map(msgspec.msgpack.encode, (large, action))):
            store.push("coordinator", data)
        # What a trainer that is not there says is left out, too.
        store.push("coordinator", msgspec.msgpack.encode(Waiting(rank=7, network=NET, pictures=0)))
        assert isinstance(join("nuc").poll(WAIT_S), Accepted)
        assert coordinator.states.keys() == {0, 1}
        while coordinator.drops < 3:
            time.sleep(0.001)


def test_a_coordinator_that_cannot_write_its_log_says_so(tmp_path: Path) -> None:
    with opened(Path("/dev/full")) as (_, join):
        reasons = []
        for name in ("coordinator", "nuc"):
            told = join(name).poll(WAIT_S)
            assert isinstance(told, Refused)
            reasons.append(told.reason)
    assert reasons == ["/dev/full: cannot be written: No space left on device"] * 2
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="log: cannot be written: "):
        Coordinator(serve_store(HOST, 0, TOKEN), machine(), Watch(20.0), tmp_path / "file" / "log")


def test_a_coordinator_that_fails_says_so_to_all(tmp_path: Path) -> None:
    class Broken(MembershipMachine):
        def handle(self, event: AnyEvent, now_s: float = 0.0) -> list[AnyAction]:
            raise KeyError(event.rank)

    store = serve_store(HOST, 0, TOKEN)
    coordinator = Coordinator(store, Broken("d", {}, {}), Watch(20.0), tmp_path / "log.jsonl")
    client = CoordinatorClient(store)
    client.join("nuc", "d")
    for _ in range(2):  # a refusal is the last word
        told = client.poll(WAIT_S)
        assert isinstance(told, Refused)
        assert told.reason == "the coordinator fails: KeyError: 0"
    client.close()
    coordinator.close()


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b'{"version": "0.0.1", "all": "else"}', "the coordinator has version 0.0.1, this is"),
        (b'{"version": "0.1.0\\u001b[2J"}', "expected a coordinator of version"),
        (b"GET", "expected a coordinator of version"),
    ],
)
def test_coordinators_of_other_versions(tmp_path: Path, begin: bytes, message: str) -> None:
    store = serve_store(HOST, 0, "t")
    stranger(store.port).set("begin", begin)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        join(f"{HOST}:{store.port}", "nuc", "t", "digits", tmp_path / "run", QUIET, wait_s=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_no_plan_names(tmp_path: Path) -> None:
    data, plan = open_dataset(DIGITS, limit_train=20), tiny_plan()
    store = serve_store(HOST, 0, TOKEN)
    settings = run_settings(TrainingInputs.of(config_of(DIGITS), data, plan.teacher))
    begin = Begin(version=__version__, names=("coordinator", "tower"), settings=settings, plan=plan)
    log, said = tmp_path / "log.jsonl", msgspec.msgpack.encode(begin)
    coordinator = Coordinator(store, machine(), Watch(20.0), log, said)
    address = f"{HOST}:{store.port}"
    with pytest.raises(InputError, match=r"--name: expected a trainer of .* \(tower\), got 'nas'"):
        join(address, "nas", "token", DIGITS, tmp_path / "run", QUIET, wait_s=0.0)
    # Without the token nothing of the plan is said, and nothing of it is left in the store.
    with pytest.raises(InputError, match=r"key: expected a copy of the coordinator's crew\.key"):
        join(address, "tower", "another", DIGITS, tmp_path / "run", QUIET, wait_s=0.0)
    assert [name for name in names(store) if "begin" in name] == ["begin"]
    greeting = msgspec.json.decode(stranger(store.port).get("begin"))
    assert greeting.keys() == {"version", "nonce", "proof"}
    assert greeting["version"] == __version__
    coordinator.close()
    log.unlink()
    with pytest.raises(InputError, match=r"8\.8\.8\.8: expected a loopback or private address"):
        join("8.8.8.8:47100", "tower", "token", DIGITS, tmp_path / "run", QUIET, wait_s=0.0)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def filing(
    folder: Path,
) -> Iterator[tuple[SignedStore, CoordinatorFiles, Callable[[str], TrainerFiles]]]:
    """A coordinator with files, and a function that has a trainer join it."""
    store = serve_store(HOST, 0, TOKEN)
    posting = store.another()
    with (
        CoordinatorFiles(folder / "files", lambda message: post(posting, message)) as files,
        ExitStack() as stack,
    ):
        coordinator = Coordinator(
            store, machine(), Watch(20.0), folder / "log.jsonl", files=files.put
        )
        stack.callback(coordinator.close)

        def join(name: str) -> TrainerFiles:
            client = stack.enter_context(closing(CoordinatorClient(store)))
            client.join(name, "d")
            assert isinstance(client.poll(WAIT_S), Accepted)
            return TrainerFiles(client)

        yield store, files, join


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    source, other, got = tmp_path / "source", tmp_path / "other", tmp_path / "cache" / "got"
    source.write_bytes(b"weights")
    other.write_bytes(b"of another trainer")
    with filing(tmp_path) as (_, coordinator, join):
        files = join("nuc")
        assert not files.has("member-0")
        digest = files.send("member-0", source)
        # Another trainer's file is not the one that counts, and it is told so.
        assert files.send("member-0", other) == digest == sha256_of(source)
        assert coordinator.send("member-0", other) == digest
        assert files.has("member-0")
        for taker in (files, coordinator):
            assert [taker.fetch("member-0", got) for _ in range(2)] == [True, False]
            assert got.read_bytes() == b"weights"
            got.write_bytes(b"of another run")
            assert taker.fetch("member-0", got)
            assert got.read_bytes() == b"weights"
            got.unlink()
    assert not (tmp_path / "files").exists()


def test_a_coordinator_that_hangs_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "log.jsonl") as (_, join):
        client = join("coordinator")
        assert client.poll(WAIT_S)
        monkeypatch.setattr(control, "COORDINATOR_SILENT_S", -1.0)
        with pytest.raises(CoordinatorLost, match="the coordinator is lost: start it again"):
            client.poll()
        assert CoordinatorLost.exit_code == 3
        monkeypatch.undo()


def test_addresses_that_are_taken_or_where_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(InputError, match=f"{HOST}:{port}: cannot listen"):
            serve_store(HOST, port, TOKEN)
    with pytest.raises(CoordinatorLost, match=f"{HOST}:{port}: no coordinator of a crew answers"):
        connect(HOST, port, TOKEN)


def test_a_torch_that_cannot_list_what_strangers_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.crew.bus.store.TCPStore", object)
    with pytest.raises(
        InputError, match=r"torch: a crew's coordinator needs 2\.10 or newer, this is 2\."
    ):
        serve_store(HOST, 0, TOKEN)


def test_a_group_serves_until_a_mean_is_not_committed() -> None:
    server = serve_store(HOST, 0, TOKEN)
    committed = set[tuple[str, int]]()
    groups = TrainerGroups(server.another(), 4, HOST, lambda *which: which in committed, 5.0)
    first = groups.of(NET, 1, (4,))
    committed = {(NET, 1)}
    assert groups.of(NET, 2, (4,)) is first
    # Meeting 2 was not committed: whoever failed in it may have freed the group.
    second = groups.of(NET, 3, (4,))
    assert second is not first
    committed = {(NET, 3)}
    # Another network's meetings, and what was long ago, are not those of this group.
    assert groups.of("member-1", 4, (4,)) is not second
    assert groups.of(NET, 3 + KEPT_MEETINGS, (4,)) is second
    committed = {(NET, 3 + KEPT_MEETINGS)}
    assert groups.of(NET, 4 + 2 * KEPT_MEETINGS, (4,)) is not second
    assert groups.made == 4
    groups.close()
    short = TrainerGroups(server.another(timedelta(seconds=0.2)), 4, HOST, lambda *_: False, 0.2)
    with pytest.raises(GroupBroken, match="member-0: meeting 4 of 4, 5: "):
        short.of(NET, 4, (4, 5))
    assert timeout_s(2.5) == 30.0


def test_files_are_whole_and_in_no_memory(tmp_path: Path) -> None:
    source, got = tmp_path / "source", tmp_path / "got"
    source.write_bytes(bytes(range(256)) * (2 * PIECE_BYTES // 200))
    content, size = source.read_bytes(), source.stat().st_size
    with filing(tmp_path) as (store, coordinator, join):
        nuc, tower = join("nuc"), join("coordinator")
        nuc.send("weights", source)
        source.unlink()  # it is at the coordinator
        for files in (nuc, tower, coordinator):
            assert files.fetch("weights", got)
            assert got.read_bytes() == content
            got.unlink()
        assert (nuc.bytes_sent, tower.bytes_sent, coordinator.bytes_sent) == (size, 0, 2 * size)
        # An empty one, and one that comes while it is waited for.
        source.write_bytes(b"")
        assert nuc.send("empty", source) == sha256_of(source)
        assert tower.fetch("empty", got)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(tower.fetch, "late", got)
            source.write_bytes(b"12345")
            coordinator.send("late", source)
            assert waiting.result(WAIT_S)
        assert got.read_bytes() == b"12345"
        # What is changed after it was handed in, or deleted.
        source.write_bytes(b"12346")
        got.unlink()
        with pytest.raises(
            TransferError, match="got: expected 5 bytes of the coordinator's digest"
        ):
            tower.fetch("late", got)
        source.unlink()
        with pytest.raises(
            TransferError, match="got: the coordinator cannot read its late: No such file"
        ):
            tower.fetch("late", got)
        assert names(store) == ["begin", "ranks"]
    assert not got.exists()


def test_a_full_disk_while_pieces_arrive(tmp_path: Path) -> None:
    if why := mounting_works():
        pytest.skip(why)
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with (
        small_disk(tmp_path / "disk", 64 * 1024) as disk,
        filing(tmp_path) as (_, coordinator, join),
    ):
        files = join("nuc")
        full = fill(disk)
        path = disk / "weights"
        files.send("weights", source)
        for taker in (files, coordinator):
            with pytest.raises(InputError, match=f"{path}: cannot be written: No space left on"):
                taker.fetch("weights", path)
            assert list(disk.iterdir()) == [full]
        # It is still there for who makes room.
        assert files.fetch("weights", tmp_path / "weights")


def test_a_full_disk_of_the_coordinator(tmp_path: Path) -> None:
    if why := mounting_works():
        pytest.skip(why)
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with small_disk(tmp_path / "disk", 64 * 1024) as disk, filing(disk) as (_, coordinator, join):
        files = join("nuc")
        full = fill(disk)
        with pytest.raises(
            TransferError, match=r"the coordinator cannot keep it: .* No space left on"
        ):
            files.send("weights", source)
        full.unlink()
        source.write_bytes(b"weights")
        files.send("weights", source)
        assert coordinator.has("weights")
