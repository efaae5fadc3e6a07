"""The desk's store: torch's TCPStore with a log and mailboxes in it.

    trainer r:  set event/r/0, event/r/1, ...; after each, set bell
    desk:       wait for bell; delete it; take what is there of every trainer's, in turns
    desk:       set act/r/0, act/r/1, ...
    trainer r:  wait for act/r/i; delete it

Every event is one operation of the store, so that a trainer that is killed leaves none half
written; the order in which the desk takes them is the log's, which it writes to a file. Waiting
costs no processor time: a get of a missing key returns when it is set. `wait` with a timeout is
not used: in torch 2.13 one of 1 ms took 5 s now and then.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from mdp.errors import InputError, MDPError
from partitioner.crew.machine.events import AnyAction, AnyEvent, Rank

#: Of one message: a meeting of the largest crews and an epoch's lost batches stay far below.
MAX_BYTES = 2**20
#: A connection waits so long for a key; a hand then waits again.
PATIENCE = timedelta(days=1)


class DeskLost(MDPError):
    """The desk does not answer; the same command goes on from the last checkpoint."""

    exit_code = 3


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer sends: an event, or None as a sign of life.

    The token is sent with Joined, and once before it without an event.
    """

    event: AnyEvent | None = None
    token: str = ""


_ENTRY = msgspec.msgpack.Decoder(Entry)


def serve_store(host: str, port: int) -> TCPStore:
    """The desk's store, which listens on this address alone; raises InputError if it is taken.

    Port 0: any; the store's `port` has it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"{host}:{port}: cannot listen: {error.strerror}") from error
        listener.listen(128)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            # By itself it would listen on every address.
            master_listen_fd=listener.detach(),
        )


def connect(host: str, port: int, wait_s: float = 0.0, timeout: timedelta = PATIENCE) -> TCPStore:
    """A connection to the desk's store; each thread needs its own.

    Waits `wait_s` for a desk that is not there yet. timeout: of what waits for a key. Raises
    DeskLost.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except (OSError, DistError) as error:
            if time.monotonic() >= until_s:
                raise DeskLost(f"{host}:{port}: no desk of a crew answers") from error
        time.sleep(0.1)


@contextmanager
def reaching(store: TCPStore) -> Iterator[None]:
    """The store's errors as DeskLost."""
    try:
        yield
    except DistError as error:
        raise DeskLost(
            f"{store.host}:{store.port}: the desk is lost: start it again, and this command, to go "
            "on from the last checkpoint"
        ) from error


def put(store: Store, key: str, data: bytes) -> None:
    """Set a key; torch's types say text, and bytes are meant."""
    store.set(key, data)  # type: ignore[arg-type]


class Log:
    """The desk's side of the store: takes entries in order, posts actions."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._taken: dict[Rank, int] = {}
        self._posted: dict[Rank, int] = {}
        #: Entries that were too large or no entries.
        self.dropped = 0

    def take(self) -> Iterator[tuple[Rank, Entry]]:
        """Wait for the bell; then all that is there, each with who sent it."""
        self._store.get("bell")
        self._store.delete_key("bell")
        for rank in range(len(self._taken), self._store.add("ranks", 0)):
            self._taken[rank] = 0
        again = True
        while again:
            again = False
            for rank in list(self._taken):
                key = f"event/{rank}/{self._taken[rank]}"
                if not self._store.check([key]):
                    continue
                data = self._store.get(key)
                self._store.delete_key(key)
                self._taken[rank] += 1
                again = True
                try:
                    entry = _ENTRY.decode(data) if len(data) <= MAX_BYTES else None
                except msgspec.DecodeError:
                    entry = None
                if entry is None or (entry.event and entry.event.rank != rank):
                    self.dropped += 1
                    continue
                yield rank, entry

    def tell(self, rank: Rank, said: bytes) -> None:
        """Say to a trainer what it has to know before it joins."""
        put(self._store, f"begin/{rank}", said)

    def post(self, action: AnyAction) -> None:
        """Put an action into its trainer's mailbox."""
        number = self._posted.get(action.rank, 0)
        self._posted[action.rank] = number + 1
        put(self._store, f"act/{action.rank}/{number}", msgspec.msgpack.encode(action))


def told(store: TCPStore, rank: Rank) -> bytes:
    """What `Log.tell` has said, once; empty where it has not."""
    key = f"begin/{rank}"
    if not store.check([key]):
        return b""
    said = store.get(key)
    store.delete_key(key)
    return said
