"""Strangers at a desk's port, who have no key: they can end a training, and not change it."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch._C._distributed_c10d import TCPStore  # noqa: E402
from torch.distributed import DistError  # noqa: E402

from mdp.errors import MDPError  # noqa: E402
from mdp.files import write_new  # noqa: E402
from mdp.testing.processes import until  # noqa: E402
from partitioner.crew.exchange.authentication import sign_name  # noqa: E402
from partitioner.crew.exchange.control import Desk, Hand  # noqa: E402
from partitioner.crew.exchange.files import EVERYBODY, Head, StoreFiles  # noqa: E402
from partitioner.crew.exchange.groups import TrainerGroups  # noqa: E402
from partitioner.crew.exchange.queues import StoreDesk, StoreTrainer  # noqa: E402
from partitioner.crew.exchange.store import SignedStore, Tampered, serve_store  # noqa: E402
from partitioner.crew.machine.events import Accepted, Leave, Refused  # noqa: E402
from partitioner.crew.machine.membership import MembershipMachine  # noqa: E402
from partitioner.crew.machine.watch import Watch  # noqa: E402
from partitioner.crew.planning.syncplan import NetworkSync  # noqa: E402
from tests.integration.crew.test_training_together import PATIENCE_S, Crew  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch

HOST, TOKEN, WAIT_S = "127.0.0.1", "262a43f4", 20.0


def stranger(port: int) -> TCPStore:
    """A connection of who has no key."""
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False)


def in_store(store: SignedStore, name: str) -> str:
    """A name as it is in the store."""
    [found] = [text for text in store.names() if text.startswith(f"{name}~")]
    return found


def read_all(store: TCPStore) -> list[bytes]:
    """All values, but of counters; a compare that fails returns the value and never waits."""
    return [store.compare_set(name, "-", "-") for name in store.list_keys()]


@pytest.fixture
def store() -> SignedStore:
    return serve_store(HOST, 0, TOKEN)


@pytest.fixture
def desk(store: SignedStore, tmp_path: Path) -> Iterator[Desk]:
    served = Desk(
        store, MembershipMachine("d", {"member-0": ("nuc",)}, {}), Watch(20.0), tmp_path / "log"
    )
    yield served
    served.close()


def test_a_training_with_a_stranger_at_the_port(tmp_path: Path) -> None:
    """It reads all there is, and hands a file of zeros in before the trainer has finished."""
    data = write_tree(tmp_path / "data", each=24)
    crew = Crew(
        tmp_path,
        data,
        NetworkSync(name="teacher", by=("desk",)),
        NetworkSync(name="member-0", by=("desk",)),
        NetworkSync(name="member-1", by=("tower",)),
        names=("desk", "tower"),
    )
    processes = {name: crew.start(name) for name in ("desk", "tower")}
    zeros = tmp_path / "zeros"
    save_file({"weight": torch.zeros(10)}, zeros)
    content = zeros.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    head = msgspec.msgpack.encode(Head(len(content), 1, digest, EVERYBODY))
    key = "file/member-1.safetensors"
    seen, ending = set[bytes](), threading.Event()
    port = int(crew.address.rpartition(":")[2])

    def connected() -> bool:
        try:
            stranger(port)
        except DistError:
            return False
        return True

    def attack() -> None:
        until(connected, "the desk", PATIENCE_S)
        store: Any = stranger(port)
        try:
            while not ending.is_set():
                store.set(f"{key}/{digest[:16]}/0", content)
                store.set(key, head)
                seen.update(hashlib.sha256(v).digest() for v in read_all(store))
                readings.extend(v for v in read_all(store) if token in v)
        except DistError:
            pass  # the desk has ended

    token, readings = crew.folder.token().encode(), list[bytes]()
    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for name, process in processes.items():
            crew.ends(name, process)
    finally:
        ending.set()
        thread.join()
    assert readings == []
    assert len(seen) > 10
    own = tmp_path / "run-tower" / "member-1.safetensors"
    assert crew.run.member(1).read_bytes() == own.read_bytes() != content
    assert any(value.any() for value in load_file(crew.run.member(1)).values())
    said = crew.log_of("desk").read_text()
    assert "values in the desk's store were not of this crew, and were deleted" in said


def test_no_value_has_the_key(store: SignedStore) -> None:
    hand = Hand(store)
    hand.join("nuc", "d")
    until(lambda: any("event/" in name for name in store.names()), "its first event", WAIT_S)
    values = read_all(stranger(store.port))
    assert len(values) > 2
    assert not any(TOKEN.encode() in value for value in values)
    hand.close()


def test_what_strangers_set_is_deleted(store: SignedStore, desk: Desk) -> None:
    other: Any = stranger(store.port)
    names = [f"{kind}/{i}" for i in range(3) for kind in ("junk", "event/9", "file/x", "g")]
    for name in names:
        other.set(name, bytes(7 * 2**20))
    until(lambda: desk.dropped >= len(names), "a look of the desk", WAIT_S)
    assert not set(names) & set(other.list_keys())
    # What the crew has set stays.
    store.set("name/0", b"desk")
    dropped = desk.dropped
    other.set("more", b"")
    until(lambda: desk.dropped > dropped, "another look", WAIT_S)
    assert store.get("name/0") == b"desk"


def test_ranks_of_a_counter_that_was_changed_are_not_all_looked_at(
    store: SignedStore, desk: Desk
) -> None:
    hand = Hand(store)
    stranger(store.port).add(in_store(store, "ranks"), 2**40)
    hand.join("nuc", "d")
    assert isinstance(hand.poll(WAIT_S), Accepted)
    with pytest.raises(MDPError, match="expected at most 1000 trainers"):
        Hand(store)
    hand.close()


def test_a_counter_that_is_none_any_more_ends_all_in_a_line(store: SignedStore, desk: Desk) -> None:
    hand = Hand(store)
    hand.join("nuc", "d")
    assert isinstance(hand.poll(WAIT_S), Accepted)
    stranger(store.port).set(in_store(store, "ranks"), "no number")
    action = hand.poll(WAIT_S)
    assert isinstance(action, Refused)
    assert "the desk's store" in action.reason
    assert "\n" not in action.reason
    hand.close()


def test_an_event_of_a_rank_that_has_joined_is_not_made_or_repeated(
    store: SignedStore, desk: Desk, tmp_path: Path
) -> None:
    hand = Hand(store)
    hand.join("nuc", "d")
    assert isinstance(hand.poll(WAIT_S), Accepted)
    other: Any = stranger(store.port)
    event = {"kind": "gone", "rank": hand.rank}
    forged = msgspec.msgpack.encode({"event": event, "asks": False})
    # One of its own that was signed, under numbers that are still to come.
    key = sign_name(store._key, f"event/{hand.rank}/1000")
    store.set(f"event/{hand.rank}/1000", forged)
    signed = other.get(key)
    other.delete_key(key)
    for number in range(0, 200, 2):
        other.set(_listed_name(store, f"event/{hand.rank}/{number}"), bytes(32) + forged)
        other.set(_listed_name(store, f"event/{hand.rank}/{number + 1}"), signed)
    until(lambda: desk.dropped > 0, "a forged event", WAIT_S)
    assert '"kind":"gone"' not in (tmp_path / "log").read_text()
    hand.close()


def _listed_name(store: SignedStore, name: str) -> str:
    """The name that a listing shows once the crew has used it."""
    return sign_name(store._key, name)


def test_an_action_that_the_desk_has_not_sent_ends_the_trainer(
    store: SignedStore, desk: Desk
) -> None:
    hand = Hand(store)
    leave = msgspec.msgpack.encode(Leave(rank=hand.rank, network=""))
    store._store.set(_listed_name(store, f"act/{hand.rank}/0"), bytes(32) + leave)  # type: ignore[arg-type]
    with pytest.raises(Tampered, match=r"act/0/0 is not signed with this crew's key") as caught:
        hand.poll(WAIT_S)
    assert caught.value.exit_code == 3
    assert not hand.may_leave
    hand.close()


def test_a_file_that_a_stranger_replaces_is_refused(store: SignedStore, tmp_path: Path) -> None:
    source, got = tmp_path / "source", tmp_path / "got"
    source.write_bytes(b"weights")
    files = StoreFiles(store.another())
    files.send("member-1", source)
    name = in_store(store, "file/member-1")
    other: Any = stranger(store.port)
    head = other.get(name)
    other.set(name, msgspec.msgpack.encode(Head(5, 1, "0" * 64, 9)))
    for act in (files.send, files.fetch):
        with pytest.raises(Tampered, match="file/member-1 is not signed with this crew's key"):
            act("member-1", source if act == files.send else got)
    other.set(name, head)
    [piece] = [text for text in other.list_keys() if "/0~" in text]
    other.set(piece, other.get(piece) + b"!")
    with pytest.raises(Tampered, match="is not signed"):
        files.fetch("member-1", got)
    assert not got.exists()


def test_the_desk_takes_the_file_that_its_trainer_has_told_of(
    store: SignedStore, tmp_path: Path
) -> None:
    source, got = tmp_path / "source", tmp_path / "got"
    source.write_bytes(b"weights")
    digest = StoreFiles(store).send("member-1", source)
    with pytest.raises(MDPError, match="got: expected the file that its trainer has told of"):
        StoreFiles(store, lambda name: "0" * 64).fetch("member-1", got)
    assert not got.exists()
    assert StoreFiles(store, {"member-1": digest}.__getitem__).fetch("member-1", got)


def test_queues_give_each_message_of_the_crew_once(store: SignedStore) -> None:
    desk, trainer = StoreDesk(store, "answers"), StoreTrainer(store.another(), "answers", 0)
    other: Any = stranger(store.port)
    queue = _listed_name(store, "answers/log")
    trainer.append(b"one")
    message = other.queue_pop(queue)
    for one in (b"", b"junk", message, message, message[:-1], message + b"!"):
        other.queue_push(queue, one)
    trainer.append(b"two")
    assert [desk.read(0.0) for _ in range(3)] == [b"one", b"two", None]
    # That a pass is over is the desk's to say.
    other.set("answers/closed/pass", b"")
    assert not trainer.closed("pass")
    desk.close("pass")
    assert trainer.closed("pass")
    other.set(_listed_name(store, "answers/closed/pass"), b"")
    with pytest.raises(Tampered):
        trainer.closed("pass")


def test_where_members_of_a_mean_listen_is_signed(store: SignedStore) -> None:
    """Whoever sets an address there would be a member, and change the mean."""
    own = store.another()
    other: Any = stranger(store.port)
    addresses = own.another()
    # A group of one has said where it listens.
    groups = TrainerGroups(own, 0, HOST, lambda network, seq: False, 5.0)
    groups.of("member-0", 1, (0,))
    [name] = [text for text in addresses.names() if text.startswith("g/member-0/1/")]
    assert "~" in name
    second = name.rpartition("~")[0].replace("/1/", "/2/", 1)
    first = second.rpartition("/")[0]
    other.set(_listed_name(store, f"{first}/1"), other.get(name))
    with pytest.raises((Tampered, RuntimeError), match="not signed"):
        groups.of("member-0", 2, (0, 1))
    groups.close()


def test_a_lost_desk_is_a_line_of_its_trainer(tmp_path: Path) -> None:
    served = [serve_store(HOST, 0, "1234")]
    key, address = tmp_path / "key", f"{HOST}:{served[0].port}"
    write_new(key, b"1234\n", 0o600)
    words = ["crew", "join", address, "--name", "nuc", "--data", "digits", "--threads", "1"]
    start = "from mdp_start import mdp_partition; mdp_partition()"
    # As a person starts it: no module has been loaded yet, and no test has set variables.
    variables = {name: value for name, value in os.environ.items() if "TORCH" not in name}
    with subprocess.Popen(
        [sys.executable, "-c", start, *words, "--key", str(key), "--run", str(tmp_path / "run")],
        stderr=subprocess.PIPE, text=True, env=variables,
    ) as trainer:  # fmt: skip
        assert trainer.stderr
        try:
            assert "waiting for the desk" in trainer.stderr.readline()
            until(lambda: any("event/0/1~" in n for n in served[0].names()), "it", PATIENCE_S)
            served.clear()
            said = trainer.stderr.read()
        finally:
            if trainer.poll() is None:
                trainer.send_signal(signal.SIGKILL)
    assert said == (
        f"mdp-partition: {address}: the desk is lost: start it again, and this command, to go on "
        "from the last checkpoint\n"
    )
    assert trainer.returncode == 3
