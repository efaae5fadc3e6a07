"""A crew's control: the desk's log and mailboxes in torch's TCPStore.

    trainer r:  set event/r/0, event/r/1, ...; after each, set bell
    desk:       wait for bell; delete it; take what is there of every trainer's, in turns
    desk:       set act/r/0, act/r/1, ...
    trainer r:  wait for act/r/i; delete it

Every event is one operation of the store, so that a trainer that is killed leaves none half
written; the order in which the desk takes them is the log's, which it writes to a file. Waiting
costs no processor time: a get of a missing key returns when it is set. `wait` with a timeout is
not used: in torch 2.13 one of 1 ms took 5 s now and then.
"""

import contextlib
import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec.structs import replace
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from mdp.errors import InputError, MDPError
from partitioner.crew.machine.events import (
    AnyAction,
    AnyEvent,
    Commit,
    Gone,
    GoOn,
    Joined,
    Rank,
    Refused,
    Report,
    Schedule,
)
from partitioner.crew.machine.watch import Watch

#: Of one message: a meeting of the largest crews and an epoch's lost batches stay far below.
MAX_BYTES = 2**20
#: Time between two signs of life of a trainer's process.
PULSE_S = 1.0
#: A desk that answers nothing for so long is lost: six times what it grants a trainer.
DESK_SILENT_S = 60.0
#: A get waits so long, and is repeated.
_PATIENCE = timedelta(days=1)
_CLOSING_S = 2.0

R = TypeVar("R")


class DeskLost(MDPError):
    """The desk does not answer; the same command goes on from the last checkpoint."""

    exit_code = 3


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer sends: an event, or None as a sign of life; the token only with Joined."""

    event: AnyEvent | None = None
    token: str = ""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a log's file."""

    at_s: float
    event: AnyEvent
    actions: list[AnyAction]


_ENTRY = msgspec.msgpack.Decoder(Entry)
_ACTION: "msgspec.msgpack.Decoder[AnyAction]" = msgspec.msgpack.Decoder(AnyAction)
_LINE = msgspec.json.Decoder(Line)


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
            timeout=_PATIENCE,
            wait_for_workers=False,
            # By itself it would listen on every address.
            master_listen_fd=listener.detach(),
        )


def connect(host: str, port: int, wait_s: float = 0.0, timeout: timedelta = _PATIENCE) -> TCPStore:
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

    def post(self, action: AnyAction) -> None:
        """Put an action into its trainer's mailbox."""
        number = self._posted.get(action.rank, 0)
        self._posted[action.rank] = number + 1
        put(self._store, f"act/{action.rank}/{number}", msgspec.msgpack.encode(action))


class Desk:
    """Reads the log, asks the machine, posts its actions; a thread of the desk's process.

    The log is written to a file anew, from which `replay` gives the same actions. Who is lost is
    decided by `watch`. Where the desk itself fails (a full disk), every trainer is told why. Raises
    InputError where the file cannot be opened.
    """

    def __init__(
        self, store: TCPStore, machine: Schedule, watch: Watch, token: str, path: Path
    ) -> None:
        self._machine, self._watch, self._token, self._path = machine, watch, token, path
        self._address = store.host, store.port
        self._living: set[Rank] = set()
        self._ending = threading.Event()
        self._failed = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        # The store's own connection belongs to who made it.
        self._log = Log(connect(*self._address))
        self._bell = connect(*self._address)
        self._threads = [
            threading.Thread(target=target, name=f"crew-{name}", daemon=True)
            for name, target in (("desk", self._serve), ("bell", self._ring))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def living(self) -> frozenset[Rank]:
        """Trainers that take part: until they have left, they may still read their mailboxes."""
        return frozenset(self._living)

    @property
    def dropped(self) -> int:
        """Entries that were too large or no entries."""
        return self._log.dropped

    def close(self) -> None:
        """Stop reading; trainers that are still there are left to themselves."""
        self._ending.set()
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _ring(self) -> None:
        """The desk looks who is silent even where nobody says anything."""
        with contextlib.suppress(DistError):
            while not self._ending.wait(PULSE_S):
                self._bell.set("bell", "1")
            self._bell.set("bell", "1")

    def _serve(self) -> None:
        with contextlib.suppress(DistError), self._file:
            while not self._ending.is_set():
                for rank, entry in self._log.take():
                    self._take(rank, entry)
                for rank in self._watch.lost(time.monotonic()):
                    self._handle(Gone(rank=rank))

    def _take(self, rank: Rank, entry: Entry) -> None:
        event = entry.event
        if event is None:
            if rank in self._living:
                self._watch.heard(rank, time.monotonic())
        elif isinstance(event, Joined):
            if not hmac.compare_digest(entry.token.encode(), self._token.encode()):
                self._refuse(rank, "expected the token of the desk's key folder, got another")
            elif self._failed:
                self._refuse(rank, self._failed)
            else:
                self._handle(event)
        elif rank in self._living:
            self._handle(event)

    def _handle(self, event: AnyEvent) -> None:
        now_s = time.monotonic()
        if isinstance(event, Joined):
            self._living.add(event.rank)
        try:
            actions = self._machine.handle(event)
            # Written first: what trainers are told is in the file.
            self._file.write(msgspec.json.encode(Line(now_s, event, actions)) + b"\n")
        except (OSError, ValueError) as error:
            self._fail(error)
            return
        self._watch.saw(event, now_s)
        for action in actions:
            self._log.post(action)
            self._watch.told(action, now_s)
            if isinstance(action, Refused) and not action.network:
                self._forget(action.rank)

    def _fail(self, error: OSError | ValueError) -> None:
        """Nothing can be decided any more: all are told why, also who comes later."""
        if isinstance(error, OSError):
            self._failed = f"{self._path}: cannot be written: {error.strerror}"
        else:
            self._failed = f"the log contradicts itself: {error}"
        for rank in sorted(self._living):
            self._refuse(rank, self._failed)

    def _refuse(self, rank: Rank, reason: str) -> None:
        self._log.post(Refused(rank=rank, network="", reason=reason))
        self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        self._living.discard(rank)
        self._watch.saw(Gone(rank=rank), time.monotonic())


def replay(path: Path, machine: Schedule) -> Iterator[tuple[list[AnyAction], list[AnyAction]]]:
    """For each event of a log's file what was told then, and what `machine` tells now.

    A last line that is cut off is left out: its actions were never posted.
    """
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            told = _LINE.decode(line)
            yield told.actions, machine.handle(told.event)


class Hand:
    """A trainer's end of the control (`partitioner.crew.machine.events.Trainer`).

    A thread sends, with a sign of life every second, and one receives, so that neither a step of
    minutes looks like a lost trainer nor a desk that hangs stops this process for ever: what waits
    for it raises DeskLost. Reports are given the last Commit or GoOn that was polled, and the
    batches claimed since the last report: claim the next batch after reporting this one.
    """

    def __init__(self, host: str, port: int, wait_s: float = 0.0) -> None:
        self._out: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[AnyAction | None] = queue.SimpleQueue()
        self._sending, self._receiving = connect(host, port, wait_s), connect(host, port)
        self.address = host, port
        self._rank: Rank = self._sending.add("ranks", 1) - 1
        self._sent = 0
        self._heard_s = time.monotonic()
        self._lost = False
        self._since: dict[str, int] = {}
        self._committed: dict[str, int] = {}
        self._claimed: dict[str, list[int]] = {}
        self._given: dict[str, list[int]] = {}
        self._threads = [
            threading.Thread(target=target, name=f"crew-{name}", daemon=True)
            for name, target in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def rank(self) -> Rank:
        """The own rank."""
        return self._rank

    def join(self, name: str, digest: str, token: str) -> None:
        """Ask to take part; the answer is polled."""
        self._append(Entry(Joined(rank=self._rank, name=name, digest=digest), token))

    def report(self, event: AnyEvent) -> None:
        """Append to the log; raises DeskLost."""
        self._check()
        if isinstance(event, Report):
            claims = tuple(self._claimed.pop(event.network, ()))
            event = replace(event, since=self._since.get(event.network, 0), claims=claims)
        self._append(Entry(event))

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action, None when there is none within `timeout_s`; raises DeskLost."""
        try:
            action = self._in.get(timeout=timeout_s) if timeout_s else self._in.get_nowait()
        except queue.Empty:
            action = None
        if action is None:
            self._check()
        if isinstance(action, Commit | GoOn):
            self._since[action.network] = action.seq
        if isinstance(action, Commit):
            self._committed[action.network] = action.seq
        if isinstance(action, GoOn):
            self._given.setdefault(action.network, []).extend(action.claims)
        return action

    def claim(self, counter: str) -> int:
        """The next batch of an epoch, `cursor(network, epoch)`; raises DeskLost.

        Those that were lost with other trainers come first.
        """
        network = counter.removeprefix("cursor/").rpartition("/")[0]
        given = self._given.get(network)
        number = given.pop(0) if given else self._ask(lambda s: s.add(counter, 1)) - 1
        self._claimed.setdefault(network, []).append(number)
        return number

    def committed(self, network: str) -> int:
        """The number of the last meeting whose mean was committed, as polled; 0 for none."""
        return self._committed.get(network, 0)

    def close(self) -> None:
        """Leave."""
        if not self._lost:
            self._append(Entry(Gone(rank=self._rank)))
        self._out.put(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _check(self) -> None:
        if self._lost or time.monotonic() - self._heard_s > DESK_SILENT_S:
            host, port = self.address
            raise DeskLost(
                f"{host}:{port}: the desk is lost: start it again, and this command, to go on from "
                "the last checkpoint"
            )

    def _append(self, entry: Entry) -> None:
        data = msgspec.msgpack.encode(entry)

        def send() -> None:
            put(self._sending, f"event/{self._rank}/{self._sent}", data)
            self._sending.set("bell", "1")
            self._sent += 1

        self._out.put(send)

    def _ask(self, question: Callable[[TCPStore], R]) -> R:
        """What the store answers."""
        answers: queue.SimpleQueue[R] = queue.SimpleQueue()
        self._out.put(lambda: answers.put(question(self._sending)))
        while True:
            try:
                return answers.get(timeout=PULSE_S)
            except queue.Empty:
                self._check()

    def _send(self) -> None:
        try:
            pulse_s = 0.0
            while True:
                left_s = pulse_s + PULSE_S - time.monotonic()
                if left_s <= 0:
                    self._append(Entry())
                    # Unlike a set, a check is answered.
                    self._sending.check(["bell"])
                    self._heard_s = pulse_s = time.monotonic()
                    continue
                try:
                    act = self._out.get(timeout=left_s)
                except queue.Empty:
                    continue
                if act is None:
                    return
                act()
        except DistError:
            self._lost = True
            self._in.put(None)

    def _receive(self) -> None:
        number = 0
        try:
            while True:
                key = f"act/{self._rank}/{number}"
                action = _ACTION.decode(self._receiving.get(key))
                self._receiving.delete_key(key)
                number += 1
                self._in.put(action)
                if isinstance(action, Refused) and not action.network:
                    return
        except DistError:
            self._lost = True
            self._in.put(None)
