"""Strangers at a coordinator's port, without the key: they can end a training, not change it."""

import base64
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

from mdp.files import write_new  # noqa: E402
from mdp.testing.processes import until  # noqa: E402
from partitioner.crew.averaging.groups import TrainerGroups  # noqa: E402
from partitioner.crew.bus.authentication import session_key, sign_name  # noqa: E402
from partitioner.crew.bus.control import Coordinator, CoordinatorClient, mailbox, post  # noqa: E402
from partitioner.crew.bus.files import TrainerFiles  # noqa: E402
from partitioner.crew.bus.store import CoordinatorLost, SignedStore, Tampered, serve_store  # noqa: E402
from partitioner.crew.coordinator.membership import MembershipMachine  # noqa: E402
from partitioner.crew.coordinator.watch import Watch  # noqa: E402
from partitioner.crew.messages import (  # noqa: E402
    Accepted,
    FileHead,
    Gone,
    Joined,
    Leave,
    Piece,
    ToCoordinator,
    ToTrainer,
)
from partitioner.crew.planning.syncplan import NetworkSync  # noqa: E402
from tests.integration.crew.test_training_together import PATIENCE_S, Crew  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch

HOST, TOKEN, WAIT_S = "127.0.0.1", "262a43f4", 20.0


def stranger(port: int) -> TCPStore:
    """A connection of who has no key."""
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False)


def read_all(store: TCPStore) -> list[bytes]:
    """All values, but of counters; a compare that fails returns the value and never waits."""
    return [store.compare_set(name, "-", "-") for name in store.list_keys()]


@pytest.fixture
def store() -> SignedStore:
    return serve_store(HOST, 0, TOKEN)


@pytest.fixture
def coordinator(store: SignedStore, tmp_path: Path) -> Iterator[Coordinator]:
    served = Coordinator(
        store, MembershipMachine("d", {"member-0": ("nuc",)}, {}), Watch(20.0), tmp_path / "log"
    )
    yield served
    served.close()


def test_a_training_with_a_stranger_at_the_port(tmp_path: Path) -> None:
    """It reads all there is, and hands a file of zeros in, to and as the coordinator."""
    data = write_tree(tmp_path / "data", each=24)
    crew = Crew(
        tmp_path,
        data,
        NetworkSync(name="teacher", by=("coordinator",)),
        NetworkSync(name="member-0", by=("coordinator",)),
        NetworkSync(name="member-1", by=("tower",)),
        names=("coordinator", "tower"),
    )
    processes = {name: crew.start(name) for name in ("coordinator", "tower")}
    zeros = tmp_path / "zeros"
    save_file({"weight": torch.zeros(10)}, zeros)
    content = zeros.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    name = "member-1.safetensors"
    forged = [
        FileHead(rank=1, name=name, bytes=len(content), sha256=digest),
        Piece(rank=1, name=name, number=0, data=content),
    ]
    seen, ending = set[bytes](), threading.Event()
    port = int(crew.address.rpartition(":")[2])

    def connected() -> bool:
        try:
            stranger(port)
        except DistError:
            return False
        return True

    def attack() -> None:
        until(connected, "the coordinator", PATIENCE_S)
        store: Any = stranger(port)
        # It has seen the names of queues on their way.
        nonce = msgspec.json.decode(store.get("begin"), type=dict[str, Any])["nonce"]
        key = session_key(token.decode(), base64.b64decode(nonce))
        boxes = [sign_name(key, box) for box in ("coordinator", mailbox(0), mailbox(1))]
        try:
            while not ending.is_set():
                store.set("junk", content)
                for box in boxes:
                    for message in forged:
                        store.queue_push(box, bytes(48) + msgspec.msgpack.encode(message))
                seen.update(hashlib.sha256(v).digest() for v in read_all(store))
                readings.extend(v for v in read_all(store) if token in v)
        except DistError:
            pass  # the coordinator has ended

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
    assert len(seen) > 5  # messages are in queues, which nobody lists
    own = tmp_path / "run-tower" / "member-1.safetensors"
    assert crew.run.member(1).read_bytes() == own.read_bytes() != content
    assert any(value.any() for value in load_file(crew.run.member(1)).values())
    said = crew.log_of("coordinator").read_text()
    assert "values in the coordinator's store were not of this crew, and were deleted" in said


def test_no_value_and_no_message_has_the_key(store: SignedStore) -> None:
    client, other = CoordinatorClient(store), stranger(store.port)
    client.join("nuc", "d")
    until(lambda: other.queue_len(sign_name(store._key, "coordinator")) > 1, "a heartbeat", WAIT_S)
    messages = [other.queue_pop(sign_name(store._key, "coordinator"), False) for _ in range(2)]
    values = read_all(other)
    assert len(values) > 1
    assert not any(TOKEN.encode() in value for value in values + messages)
    client.close()


def test_what_strangers_set_is_deleted(store: SignedStore, coordinator: Coordinator) -> None:
    other: Any = stranger(store.port)
    names = [f"{kind}/{i}" for i in range(3) for kind in ("junk", "coordinator", "name/x", "g")]
    for name in names:
        other.set(name, bytes(7 * 2**20))
    until(lambda: coordinator.drops >= len(names), "a look of the coordinator", WAIT_S)
    assert not set(names) & set(other.list_keys())
    # What the crew has set stays.
    store.set("name/0", b"coordinator")
    dropped = coordinator.drops
    other.set("more", b"")
    until(lambda: coordinator.drops > dropped, "another look", WAIT_S)
    assert store.get("name/0") == b"coordinator"


def test_names_that_are_no_text_do_not_stop_the_coordinator(
    store: SignedStore, coordinator: Coordinator
) -> None:
    other: Any = stranger(store.port)
    for i in range(3):
        other.set(b"\xff\xfe" + bytes([i]), b"junk")
    other.set("junk", b"junk")
    until(lambda: coordinator.drops >= 4, "a look of the coordinator", WAIT_S)
    assert all("~" in name for name in other.list_keys() if name != "begin")
    client = CoordinatorClient(store)
    client.join("nuc", "d")
    assert isinstance(client.poll(WAIT_S), Accepted)
    client.close()


@pytest.mark.parametrize("value", ["no number", 2**40])
def test_a_counter_that_was_changed_keeps_others_out(
    store: SignedStore, coordinator: Coordinator, value: str | int
) -> None:
    client, name = CoordinatorClient(store), sign_name(store._key, "ranks")
    other: Any = stranger(store.port)
    if isinstance(value, int):
        other.add(name, value)
    else:
        other.set(name, value)
    with pytest.raises(CoordinatorLost) as caught:
        CoordinatorClient(store)
    assert "\n" not in str(caught.value)
    # Who is there goes on.
    client.join("nuc", "d")
    assert isinstance(client.poll(WAIT_S), Accepted)
    client.close()


def encode(message: ToCoordinator | ToTrainer) -> bytes:
    return msgspec.msgpack.encode(message)


def test_a_message_to_the_coordinator_is_not_made_or_repeated(
    store: SignedStore, coordinator: Coordinator, tmp_path: Path
) -> None:
    client = CoordinatorClient(store)
    client.join("nuc", "d")
    assert isinstance(client.poll(WAIT_S), Accepted)
    other: Any = stranger(store.port)
    gone = encode(Gone(rank=client.rank))
    # One that was signed for another queue, and one of its own that was taken already.
    store.push("other", gone)
    store.check(["ranks"])  # is answered, unlike a push: the message is there
    signed = other.queue_pop(sign_name(store._key, "other"))
    name = sign_name(store._key, "coordinator")
    for forged in (b"", bytes(16) + bytes(32) + gone, signed):
        other.queue_push(name, forged)
    until(lambda: coordinator.drops > 2, "forged events", WAIT_S)
    assert '"kind":"gone"' not in (tmp_path / "log").read_text()
    assert coordinator.states.keys() == {client.rank}
    client.close()


def test_who_misses_a_message_at_the_coordinator_is_silent(
    store: SignedStore, tmp_path: Path
) -> None:
    """No event that follows one that was taken away is believed."""
    other: Any = stranger(store.port)
    own = store.another()
    own.push("coordinator", encode(Joined(rank=0, name="nuc", digest="d")))
    own.check(["ranks"])  # is answered, unlike a push: the message is there
    other.queue_pop(sign_name(store._key, "coordinator"), False)
    own.push("coordinator", encode(Joined(rank=0, name="nuc", digest="d")))
    machine = MembershipMachine("d", {"member-0": ("nuc",)}, {})
    coordinator = Coordinator(store, machine, Watch(20.0), tmp_path / "log")
    until(lambda: coordinator.drops > 0, "an event that misses one", WAIT_S)
    assert not coordinator.states
    coordinator.close()


def test_an_action_that_the_coordinator_has_not_sent_is_left_out(
    store: SignedStore, coordinator: Coordinator
) -> None:
    client = CoordinatorClient(store)
    other: Any = stranger(store.port)
    name = sign_name(store._key, mailbox(client.rank))
    leave = encode(Leave(rank=client.rank, network=""))
    other.queue_push(name, bytes(8) + (1).to_bytes(8, "big") + bytes(32) + leave)
    client.join("nuc", "d")
    assert isinstance(client.poll(WAIT_S), Accepted)
    assert not client.may_leave
    client.close()


def test_an_action_that_is_taken_away_ends_the_trainer(store: SignedStore) -> None:
    other: Any = stranger(store.port)
    post(store, Accepted(rank=0, network=""))
    store.check(["ranks"])  # is answered, unlike a push: the message is there
    other.queue_pop(sign_name(store._key, mailbox(0)), False)
    client = CoordinatorClient(store)
    post(store, Leave(rank=0, network=""))
    with pytest.raises(Tampered, match="message 1 of mailbox/0 was taken away: ") as caught:
        client.poll(WAIT_S)
    assert caught.value.exit_code == 3
    assert not client.may_leave
    client.close()


def test_a_value_of_the_name_of_a_queue_does_not_stop_it(
    store: SignedStore, coordinator: Coordinator
) -> None:
    other: Any = stranger(store.port)
    client = CoordinatorClient(store)
    for box in ("coordinator", mailbox(client.rank)):
        other.set(sign_name(store._key, box), "")
    client.join("nuc", "d")
    assert isinstance(client.poll(WAIT_S), Accepted)
    client.close()


def test_a_file_that_a_stranger_would_replace(store: SignedStore, tmp_path: Path) -> None:
    got = tmp_path / "got"
    digest = hashlib.sha256(b"weights").hexdigest()
    client = CoordinatorClient(store)
    other: Any = stranger(store.port)
    name = sign_name(store._key, mailbox(client.rank))
    about: dict[str, Any] = {"rank": client.rank, "name": "member-1"}

    def answer() -> None:
        """As the coordinator, behind a stranger's answers."""
        for real, sha256, data in ((False, "0" * 64, b"zeros!!"), (True, digest, b"weights")):
            head = FileHead(**about, bytes=7, sha256=sha256)
            for message in (head, Piece(**about, number=0, data=data)):
                if real:
                    post(store, message)
                else:
                    number = (1).to_bytes(8, "big")
                    other.queue_push(name, bytes(8) + number + bytes(32) + encode(message))

    answer()
    assert TrainerFiles(client).fetch("member-1", got)
    assert got.read_bytes() == b"weights"
    client.close()


def test_queues_give_each_message_of_the_crew_once(store: SignedStore) -> None:
    trainer, other = store.another(), stranger(store.port)
    queue = sign_name(store._key, "coordinator")
    trainer.push("coordinator", b"one")
    trainer.check(["ranks"])  # is answered, unlike a push: the message is there
    message = other.queue_pop(queue)
    for one in (b"", b"junk", message, message, message[:-1], message + b"!"):
        other.queue_push(queue, one)
    trainer.push("coordinator", b"two")
    assert [store.pop("coordinator") for _ in range(2)] == [b"one", b"two"]
    assert store.left_out == 5


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
    other.set(sign_name(store._key, f"{first}/1"), other.get(name))
    with pytest.raises((Tampered, RuntimeError), match="not signed"):
        groups.of("member-0", 2, (0, 1))
    groups.close()


def test_a_lost_coordinator_is_a_line_of_its_trainer(tmp_path: Path) -> None:
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
            assert "waiting for the coordinator" in trainer.stderr.readline()
            until(lambda: any("ranks~" in n for n in served[0].names()), "it", PATIENCE_S)
            served.clear()
            said = trainer.stderr.read()
        finally:
            if trainer.poll() is None:
                trainer.send_signal(signal.SIGKILL)
    assert said == (
        f"mdp-partition: {address}: the coordinator is lost: start it again, and this command, to "
        "go on from the last checkpoint\n"
    )
    assert trainer.returncode == 3
