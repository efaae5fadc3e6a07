"""The coordinator's store: torch's TCPStore with mailboxes and counters in it, all signed.

A mailbox is a queue of the store: a message arrives whole or not at all, in one order, whoever is
killed meanwhile. Waiting costs no processor time: a pop of an empty queue returns with the next
message. A wait with a timeout of its own is not used: in torch 2.13 one of 1 ms took 5 s now and
then.

TCPStore asks nobody who they are. So every value is signed under its name, every message of a queue
under its number, and every name is signed too: the coordinator deletes what strangers have set.
"""

import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated

import msgspec
import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistStoreError

from mdp import __version__
from mdp.errors import InputError, MDPError
from partitioner.crew.bus.authentication import (
    NotAuthentic,
    is_signed_name,
    session_key,
    sign,
    sign_name,
    verify,
)

#: The counter that gives each trainer its rank.
RANKS = "ranks"
#: A crew numbers at most so many trainers, each as often as it joins.
MAX_RANKS = 1000
#: A connection waits so long for a key; a client then waits again.
PATIENCE = timedelta(days=1)
#: A coordinator that listens answers a new connection by then.
_CONNECT = timedelta(seconds=10)
#: Seconds that a coordinator which listens has until it greets.
_GREETING_S = 10.0
#: The only name without a signature: how the coordinator greets.
_GREETING = "begin"
_SENDER_BYTES, _NUMBER_BYTES = 8, 8
#: Names that are no text, of which torch tells one at a time: deleted at most in a call.
_UNREADABLE = 100
#: Seconds between two looks at a queue that gives nothing and waits for nothing.
_LOOK_S = 0.01


class CoordinatorLost(MDPError):
    """The coordinator does not answer; the same command goes on from the last checkpoint."""

    exit_code = 3


class Tampered(MDPError):
    """The coordinator's store has a message that nobody of the crew has sent."""

    exit_code = 3


class _Greeting(msgspec.Struct):
    """The part that anyone may read; coordinators of other versions say something else here."""

    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.+-]{1,50}\Z")]
    nonce: bytes = b""
    #: Shows that the coordinator has the key, too.
    proof: bytes = b""


class SignedStore(Store):
    """A connection to the coordinator's store, for one thread; a store of torch for gloo as well.

    Whatever is read was written by who has the key, under the same name: Tampered is raised for
    anything else. Counters (`add`) are not signed. Messages of a queue are signed with a number;
    those that are not authentic, or were taken from it before, are left out. A queue is read by
    one connection.
    """

    def __init__(self, store: TCPStore, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key
        self._sender = secrets.token_bytes(_SENDER_BYTES)
        self._pushed = Counter[str]()
        #: The number of the last message that was taken, by queue and sender.
        self._popped: dict[tuple[str, bytes], int] = {}
        #: The connection that has pushed the message that was taken last.
        self.last_sender = b""
        #: Messages that were left out.
        self.left_out = 0

    @property
    def host(self) -> str:
        """The coordinator's address."""
        return self._store.host

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return self._store.port

    def another(self, timeout: timedelta = PATIENCE) -> "SignedStore":
        """Open another connection; `timeout` is of what waits for a key. Raises CoordinatorLost."""
        try:
            store = _connection(self.host, self.port, timeout)
        except CoordinatorLost as error:
            raise coordinator_lost(self.host, self.port) from error
        return SignedStore(store, self._key)

    def set(self, name: str, data: bytes) -> None:  # type: ignore[override]
        """Set a value."""
        self._store.set(sign_name(self._key, name), sign(self._key, name, data))  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Wait for a value; raises Tampered."""
        return self._verify(name, self._store.get(sign_name(self._key, name)))

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

    def pop(self, queue: str) -> bytes:
        """Wait for a queue's next message and take it.

        Raises Tampered for every message of a sender of which an earlier one was taken away.
        """
        while True:
            try:
                message: bytes = self._store.queue_pop(sign_name(self._key, queue), True)
            except DistStoreError:
                # A day without a message; or a stranger has set a value of this name.
                time.sleep(_LOOK_S)
                continue
            sender, rest = message[:_SENDER_BYTES], message[_SENDER_BYTES:]
            number = int.from_bytes(rest[:_NUMBER_BYTES], "big")
            label, last = _of_sender(queue, sender), self._popped.get((queue, sender), 0)
            try:
                data = verify(self._key, label, rest[_NUMBER_BYTES:], number)
            except NotAuthentic:
                self.left_out += 1
                continue
            if number > last + 1:
                raise self._tampering(f"message {last + 1} of {queue} was taken away")
            if number <= last:
                self.left_out += 1
                continue
            self._popped[queue, sender], self.last_sender = number, sender
            return data

    def names(self) -> list[str]:
        """List the names of all values and counters, as they are in the store; of no queues."""
        return self._store.list_keys()

    def delete_strange(self) -> int:
        """Delete the values that nobody of the crew has named; returns how many.

        The others stay until a later call where more than a few of the names are no text.
        """
        for unreadable in range(_UNREADABLE):
            try:
                names = self.names()
            except UnicodeDecodeError as error:
                self._store.delete_key(error.object)  # type: ignore[arg-type]
                continue
            strange = [
                text for text in names if text != _GREETING and not is_signed_name(self._key, text)
            ]
            for text in strange:
                self._store.delete_key(text)
            return unreadable + len(strange)
        return _UNREADABLE

    def _verify(self, name: str, message: bytes) -> bytes:
        try:
            return verify(self._key, name, message)
        except NotAuthentic as error:
            raise self._tampering(f"{name} is not signed with this crew's key") from error

    def _tampering(self, what: str) -> Tampered:
        return Tampered(
            f"{self.host}:{self.port}: {what}: another program writes to the coordinator's port; "
            "on a network of your own the same commands go on from the last checkpoint"
        )


def _of_sender(queue: str, sender: bytes) -> str:
    return f"{queue} {sender.hex()}"


def serve_store(host: str, port: int, token: str, *, reserved: int = 0) -> SignedStore:
    """The coordinator's store, which listens on this address alone; raises InputError.

    Port 0: any; the store's `port` has it. Each call begins a session of its own. The lowest ranks,
    so many as are `reserved`, are this process's, however quick others connect. Raises InputError
    also where torch cannot list what strangers have set.
    """
    if not hasattr(TCPStore, "list_keys"):
        raise InputError(
            f"torch: a crew's coordinator needs 2.10 or newer, this is {torch.__version__}"
        )
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
    signed = SignedStore(store, key)
    if reserved:
        signed.add(RANKS, reserved)
    greeting = _Greeting(__version__, nonce, sign(key, _GREETING, b""))
    store.set(_GREETING, msgspec.json.encode(greeting))  # type: ignore[arg-type]
    return signed


def connect(
    host: str, port: int, token: str, wait_s: float = 0.0, timeout: timedelta = PATIENCE
) -> SignedStore:
    """A connection to the coordinator's store; each thread needs its own.

    Waits `wait_s` for a coordinator that is not there yet. timeout: of what waits for a key. Raises
    CoordinatorLost, and InputError for a coordinator of another version or with another token.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            store = _connection(host, port, timeout)
            break
        except CoordinatorLost:
            if time.monotonic() >= until_s:
                raise
        time.sleep(0.1)
    with reaching(store):
        until_s = time.monotonic() + _GREETING_S
        while not store.check([_GREETING]):
            if time.monotonic() >= until_s:
                raise CoordinatorLost(f"{host}:{port}: no coordinator of a crew answers")
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
        raise CoordinatorLost(f"{host}:{port}: no coordinator of a crew answers") from error


def _key_of(address: str, said: bytes, token: str) -> bytes:
    """The key of the session that a coordinator greets with."""
    try:
        greeting = msgspec.json.decode(said, type=_Greeting)
    except msgspec.DecodeError as error:
        raise InputError(
            f"{address}: expected a coordinator of version {__version__}: {error}"
        ) from error
    if greeting.version != __version__:
        raise InputError(
            f"{address}: the coordinator has version {greeting.version}, this is {__version__}"
        )
    key = session_key(token, greeting.nonce)
    try:
        verify(key, _GREETING, greeting.proof)
    except NotAuthentic as error:
        raise InputError(
            "key: expected a copy of the coordinator's crew.key, got another token"
        ) from error
    return key


def coordinator_lost(host: str, port: int) -> CoordinatorLost:
    """Return the error of a coordinator that was there and does not answer any more."""
    return CoordinatorLost(
        f"{host}:{port}: the coordinator is lost: start it again, and this command, to go on from "
        "the last checkpoint"
    )


@contextmanager
def reaching(store: SignedStore | TCPStore) -> Iterator[None]:
    """Raise the store's errors as CoordinatorLost."""
    try:
        yield
    except DistError as error:
        raise coordinator_lost(store.host, store.port) from error
