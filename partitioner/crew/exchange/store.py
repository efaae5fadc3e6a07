"""The desk's store: torch's TCPStore with a log, mailboxes, queues and counters in it.

    trainer r:  set event/r/0, event/r/1, ...; after each, set bell
    desk:       wait for bell; delete it; take what is there of every trainer's, in turns
    desk:       set act/r/0, act/r/1, ...
    trainer r:  wait for act/r/i; delete it

Every event is one operation of the store, so that a trainer that is killed leaves none half
written; the order in which the desk takes them is the log's, which it writes to a file. Waiting
costs no processor time: a get of a missing key returns when it is set. `wait` with a timeout is
not used: in torch 2.13 one of 1 ms took 5 s now and then.

TCPStore asks nobody who they are. So every value is signed under its name, which has its number in
it, and every name is signed too: the desk deletes what strangers have set.
"""

import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated

import msgspec
import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, QueueEmptyError

from mdp import __version__
from mdp.errors import InputError, MDPError
from partitioner.crew.exchange.authentication import (
    NotAuthentic,
    is_signed_name,
    session_key,
    sign,
    sign_name,
    verify,
)
from partitioner.crew.machine.events import AnyAction, AnyEvent, Rank

#: Of one message: a meeting of the largest crews and an epoch's lost batches stay far below.
MAX_BYTES = 2**20
#: A crew numbers at most so many trainers, each as often as it joins.
MAX_RANKS = 1000
#: A connection waits so long for a key; a hand then waits again.
PATIENCE = timedelta(days=1)
#: A desk that listens answers a new connection by then.
_CONNECT = timedelta(seconds=10)
#: Seconds that a desk which listens has until it greets.
_GREETING_S = 10.0
#: The only name without a signature: how the desk greets.
_GREETING = "begin"
_SENDER_BYTES, _NUMBER_BYTES = 8, 8


class DeskLost(MDPError):
    """The desk does not answer; the same command goes on from the last checkpoint."""

    exit_code = 3


class Tampered(MDPError):
    """The desk's store has a message that nobody of the crew has sent."""

    exit_code = 3


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that a trainer sends, or None as a sign of life.

    A trainer `asks`, before it joins, for what `Log.tell` says.
    """

    event: AnyEvent | None = None
    asks: bool = False


class _Greeting(msgspec.Struct):
    """The part that anyone may read; desks of other versions say something else here."""

    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.+-]{1,50}\Z")]
    nonce: bytes = b""
    #: Shows that the desk has the key, too.
    proof: bytes = b""


_ENTRY = msgspec.msgpack.Decoder(Entry)


class SignedStore(Store):
    """A connection to the desk's store, for one thread; a store of torch for gloo as well.

    Whatever is read was written by who has the key, under the same name: Tampered is raised for
    anything else. Counters (`add`) are not signed. Messages of a queue are signed with a number;
    those that are not authentic, or were taken from it before, are left out.
    """

    def __init__(self, store: TCPStore, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key
        self._sender = secrets.token_bytes(_SENDER_BYTES)
        self._pushed = Counter[str]()
        #: The number of the last message that was taken, by queue and sender.
        self._popped: dict[tuple[str, bytes], int] = {}

    @property
    def host(self) -> str:
        """The desk's address."""
        return self._store.host

    @property
    def port(self) -> int:
        """The desk's port."""
        return self._store.port

    def another(self, timeout: timedelta = PATIENCE) -> "SignedStore":
        """Open another connection; `timeout` is of what waits for a key. Raises DeskLost."""
        try:
            store = _connection(self.host, self.port, timeout)
        except DeskLost as error:
            raise desk_lost(self.host, self.port) from error
        return SignedStore(store, self._key)

    def set(self, name: str, data: bytes) -> None:  # type: ignore[override]
        """Set a value."""
        self._store.set(sign_name(self._key, name), sign(self._key, name, data))  # type: ignore[arg-type]

    def set_first(self, name: str, data: bytes) -> bytes:
        """Set a value unless there is one; returns the one that is there. Raises Tampered."""
        signed = sign(self._key, name, data)
        there = self._store.compare_set(sign_name(self._key, name), b"", signed)  # type: ignore[arg-type]
        return self._verified(name, there)

    def get(self, name: str) -> bytes:
        """Wait for a value; raises Tampered."""
        return self._verified(name, self._store.get(sign_name(self._key, name)))

    def check(self, names: list[str]) -> bool:
        """Tell whether all of these have a value."""
        return self._store.check([sign_name(self._key, name) for name in names])

    def wait(self, names: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these have a value; gloo calls it."""
        signed = [sign_name(self._key, name) for name in names]
        self._store.wait(signed, *([] if timeout is None else [timeout]))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which begins with 0; returns it."""
        return self._store.add(sign_name(self._key, name), amount)

    def delete_key(self, name: str) -> bool:
        """Delete a value; whether there was one."""
        return self._store.delete_key(sign_name(self._key, name))

    def push(self, queue: str, data: bytes) -> None:
        """Append a message to a queue."""
        number = self._pushed[queue] = self._pushed[queue] + 1
        message = sign(self._key, _of_sender(queue, self._sender), data, number)
        head = self._sender + number.to_bytes(_NUMBER_BYTES, "big")
        self._store.queue_push(sign_name(self._key, queue), head + message)

    def pop(self, queue: str) -> bytes | None:
        """Take a queue's next message; None where there is none."""
        while True:
            try:
                message: bytes = self._store.queue_pop(sign_name(self._key, queue), False)
            except QueueEmptyError:
                return None
            sender, rest = message[:_SENDER_BYTES], message[_SENDER_BYTES:]
            number = int.from_bytes(rest[:_NUMBER_BYTES], "big")
            label, last = _of_sender(queue, sender), self._popped.get((queue, sender), 0)
            try:
                data = verify(self._key, label, rest[_NUMBER_BYTES:], number)
            except NotAuthentic:
                continue
            if number > last:
                self._popped[queue, sender] = number
                return data

    def names(self) -> list[str]:
        """List the names of all values and counters, as they are in the store; of no queues."""
        return self._store.list_keys()

    def delete_strange(self) -> int:
        """Delete all values that nobody of the crew has named; returns how many."""
        strange = [
            text
            for text in self.names()
            if text != _GREETING and not is_signed_name(self._key, text)
        ]
        for text in strange:
            self._store.delete_key(text)
        return len(strange)

    def _verified(self, name: str, message: bytes) -> bytes:
        try:
            return verify(self._key, name, message)
        except NotAuthentic as error:
            raise Tampered(
                f"{self.host}:{self.port}: {name} is not signed with this crew's key: another "
                "program writes to the desk's port; on a network of your own the same commands go "
                "on from the last checkpoint"
            ) from error


def _of_sender(queue: str, sender: bytes) -> str:
    return f"{queue} {sender.hex()}"


def serve_store(host: str, port: int, token: str) -> SignedStore:
    """The desk's store, which listens on this address alone; raises InputError if it is taken.

    Port 0: any; the store's `port` has it. Each call begins a session of its own. Raises InputError
    also where torch cannot list what strangers have set.
    """
    if not hasattr(TCPStore, "list_keys"):
        raise InputError(f"torch: a crew's desk needs 2.10 or newer, this is {torch.__version__}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"{host}:{port}: cannot listen: {error.strerror}") from error
        listener.listen(128)
        store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            # By itself it would listen on every address.
            master_listen_fd=listener.detach(),
        )
    nonce = secrets.token_bytes(16)
    key = session_key(token, nonce)
    greeting = _Greeting(__version__, nonce, sign(key, _GREETING, b""))
    store.set(_GREETING, msgspec.json.encode(greeting))  # type: ignore[arg-type]
    return SignedStore(store, key)


def connect(
    host: str, port: int, token: str, wait_s: float = 0.0, timeout: timedelta = PATIENCE
) -> SignedStore:
    """A connection to the desk's store; each thread needs its own.

    Waits `wait_s` for a desk that is not there yet. timeout: of what waits for a key. Raises
    DeskLost, and InputError for a desk of another version or with another token.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            store = _connection(host, port, timeout)
            break
        except DeskLost:
            if time.monotonic() >= until_s:
                raise
        time.sleep(0.1)
    with reaching(store):
        until_s = time.monotonic() + _GREETING_S
        while not store.check([_GREETING]):
            if time.monotonic() >= until_s:
                raise DeskLost(f"{host}:{port}: no desk of a crew answers")
            time.sleep(0.01)
        key = _key_of(f"{host}:{port}", store.get(_GREETING), token)
    return SignedStore(store, key)


def _connection(host: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
        # Connecting would be tried for as long as a key is waited for.
        store = TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
        store.set_timeout(timeout)
        return store
    except (OSError, DistError) as error:
        raise DeskLost(f"{host}:{port}: no desk of a crew answers") from error


def _key_of(address: str, said: bytes, token: str) -> bytes:
    """The key of the session that a desk greets with."""
    try:
        greeting = msgspec.json.decode(said, type=_Greeting)
    except msgspec.DecodeError as error:
        raise InputError(f"{address}: expected a desk of version {__version__}: {error}") from error
    if greeting.version != __version__:
        raise InputError(
            f"{address}: the desk has version {greeting.version}, this is {__version__}"
        )
    key = session_key(token, greeting.nonce)
    try:
        verify(key, _GREETING, greeting.proof)
    except NotAuthentic as error:
        raise InputError(
            "key: expected a copy of the desk's crew.key, got another token"
        ) from error
    return key


def desk_lost(host: str, port: int) -> DeskLost:
    """Return the error of a desk that was there and does not answer any more."""
    return DeskLost(
        f"{host}:{port}: the desk is lost: start it again, and this command, to go on from the "
        "last checkpoint"
    )


@contextmanager
def reaching(store: SignedStore | TCPStore) -> Iterator[None]:
    """Raise the store's errors as DeskLost."""
    try:
        yield
    except DistError as error:
        raise desk_lost(store.host, store.port) from error


class Log:
    """The desk's side of the store: takes entries in order, posts actions."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._taken: dict[Rank, int] = {}
        self._posted: dict[Rank, int] = {}
        #: Entries that were too large, no entries, or not signed with the crew's key.
        self.dropped = 0

    def take(self) -> Iterator[tuple[Rank, Entry]]:
        """Wait for the bell; then all that is there, each with who sent it.

        What is not authentic is deleted, and its number waited for: whoever was to send it is
        silent then.
        """
        with suppress(Tampered):
            self._store.get("bell")
        self._store.delete_key("bell")
        for rank in range(len(self._taken), min(self._store.add("ranks", 0), MAX_RANKS)):
            self._taken[rank] = 0
        again = True
        while again:
            again = False
            for rank in list(self._taken):
                key = f"event/{rank}/{self._taken[rank]}"
                if not self._store.check([key]):
                    continue
                try:
                    data = self._store.get(key)
                except Tampered:
                    self.dropped += 1
                    continue
                finally:
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

    def reconnect(self) -> None:
        """Go on with a connection anew, where the last one has broken; raises DeskLost."""
        self._store = self._store.another()

    def tell(self, rank: Rank, said: bytes) -> None:
        """Say to a trainer what it has to know before it joins."""
        self._store.set(f"begin/{rank}", said)

    def post(self, action: AnyAction) -> None:
        """Put an action into its trainer's mailbox."""
        number = self._posted.get(action.rank, 0)
        self._posted[action.rank] = number + 1
        self._store.set(f"act/{action.rank}/{number}", msgspec.msgpack.encode(action))


def told(store: SignedStore, rank: Rank) -> bytes:
    """The message that `Log.tell` has sent, once; empty where it has not."""
    key = f"begin/{rank}"
    if not store.check([key]):
        return b""
    said = store.get(key)
    store.delete_key(key)
    return said
