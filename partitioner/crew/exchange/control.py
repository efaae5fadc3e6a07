"""A crew's control: the desk, which decides, and a hand for each trainer."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec.structs import replace
from torch.distributed import DistError, DistStoreError

from mdp.errors import InputError, MDPError
from partitioner.crew.exchange.store import (
    MAX_RANKS,
    DeskLost,
    Entry,
    Log,
    SignedStore,
    Tampered,
    connect,
    desk_lost,
    reaching,
    serve_store,
    told,
)
from partitioner.crew.machine.events import (
    AnyAction,
    AnyEvent,
    Commit,
    Gone,
    GoOn,
    Joined,
    Leave,
    Meet,
    MeetingSchedule,
    Rank,
    Refused,
    TrainerReport,
)
from partitioner.crew.machine.watch import Watch

__all__ = ["Desk", "DeskLost", "Hand", "connect", "replay", "serve_store"]

#: Time between two signs of life of a trainer's process.
PULSE_S = 1.0
#: A desk that answers nothing for so long is lost: six times what it grants a trainer.
DESK_SILENT_S = 60.0
_CLOSING_S = 2.0
#: Seconds between two looks for what the desk says first.
_LOOK_S = 0.05

R = TypeVar("R")


class LogLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a log's file."""

    at_s: float
    event: AnyEvent
    actions: list[AnyAction]


_ACTION: "msgspec.msgpack.Decoder[AnyAction]" = msgspec.msgpack.Decoder(AnyAction)
_LINE = msgspec.json.Decoder(LogLine)


class Desk:
    """Reads the log, asks the machine, posts its actions; a thread of the desk's process.

    The log is written to a file anew, from which `replay` gives the same actions. Who is lost is
    decided by `watch`. Where the desk itself fails (a full disk), every trainer is told why. Raises
    InputError where the file cannot be opened.

    begin: for who asks, before it joins.
    """

    def __init__(
        self,
        store: SignedStore,
        machine: MeetingSchedule,
        watch: Watch,
        path: Path,
        begin: bytes = b"",
    ) -> None:
        self._machine, self._watch, self._path = machine, watch, path
        self._begin = begin
        self._living: set[Rank] = set()
        self._ending = threading.Event()
        self._failed = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        # The store's own connection belongs to who made it.
        self._log = Log(store.another())
        self._bell = store.another()
        #: Values that no trainer has named.
        self._strange = 0
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
        """Values of strangers, and entries that were too large or no entries."""
        return self._log.dropped + self._strange

    def close(self) -> None:
        """Stop reading; trainers that are still there are left to themselves."""
        self._ending.set()
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _ring(self) -> None:
        """The desk looks who is silent, and what strangers do, even where nobody says anything."""
        with contextlib.suppress(DistError):
            while not self._ending.wait(PULSE_S):
                self._bell.set("bell", b"")
                self._strange += self._bell.delete_strange()
            self._bell.set("bell", b"")

    def _serve(self) -> None:
        with self._file:
            try:
                while not self._ending.is_set():
                    for rank, entry in self._log.take():
                        self._take(rank, entry)
                    for rank in self._watch.lost(time.monotonic()):
                        self._handle(Gone(rank=rank))
            except DistError as error:
                with contextlib.suppress(DistError, DeskLost):
                    if not self._ending.is_set():
                        self._log.reconnect()
                        self._fail(error)

    def _take(self, rank: Rank, entry: Entry) -> None:
        event = entry.event
        if entry.asks or isinstance(event, Joined):
            if self._failed:
                self._refuse(rank, self._failed)
            elif isinstance(event, Joined):
                self._handle(event)
            else:
                self._log.tell(rank, self._begin)
        elif rank in self._living:
            if event is None:
                self._watch.heard(rank, time.monotonic())
            else:
                self._handle(event)

    def _handle(self, event: AnyEvent) -> None:
        now_s = time.monotonic()
        if isinstance(event, Joined):
            self._living.add(event.rank)
        try:
            actions = self._machine.handle(event)
            # Written first: what trainers are told is in the file.
            self._file.write(msgspec.json.encode(LogLine(now_s, event, actions)) + b"\n")
        except Exception as error:  # all wait for this thread
            self._fail(error)
            return
        self._watch.saw(event, now_s)
        for action in actions:
            self._log.post(action)
            self._watch.told(action, now_s)
            if isinstance(action, Refused) and not action.network:
                self._forget(action.rank)

    def _fail(self, error: Exception) -> None:
        """Nothing can be decided any more: all are told why, also who comes later."""
        if isinstance(error, OSError):
            self._failed = f"{self._path}: cannot be written: {error.strerror}"
        elif isinstance(error, DistError):
            self._failed = (
                "the desk's store refuses the desk: another program may have changed a counter "
                "there; the same commands go on from the last checkpoint"
            )
        elif isinstance(error, ValueError):
            self._failed = f"the log contradicts itself: {error}"
        else:
            self._failed = f"the desk fails: {type(error).__name__}: {error}"
        for rank in sorted(self._living):
            self._refuse(rank, self._failed)

    def _refuse(self, rank: Rank, reason: str) -> None:
        self._log.post(Refused(rank=rank, network="", reason=reason))
        self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        self._living.discard(rank)
        self._watch.saw(Gone(rank=rank), time.monotonic())


def replay(
    path: Path, machine: MeetingSchedule
) -> Iterator[tuple[list[AnyAction], list[AnyAction]]]:
    """For each event of a log's file what was told then, and what `machine` tells now.

    A last line that is cut off is left out: its actions were not posted.
    """
    for line in log_lines(path):
        yield line.actions, machine.handle(line.event)


def log_lines(path: Path) -> Iterator[LogLine]:
    """Lines of a log's file, in order, without a last line that is cut off."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _LINE.decode(line)


class Hand:
    """A trainer's end of the control (`partitioner.crew.machine.events.Trainer`).

    A thread sends, with a sign of life every second, and one receives, so that neither a step of
    minutes looks like a lost trainer nor a desk that hangs stops this process for ever: what waits
    for it raises DeskLost. Reports are given the last Commit or GoOn that was polled, and the
    batches claimed since the last report: claim the next batch after reporting this one.
    """

    def __init__(self, store: SignedStore) -> None:
        """Connect as `store` does; raises DeskLost."""
        self._out: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[AnyAction | None] = queue.SimpleQueue()
        self._sending, self._receiving = store.another(), store.another()
        self.address = store.host, store.port
        #: What the desk is told beside events, with every sign of life.
        self.told: Callable[[], bytes] | None = None
        with reaching(self._sending):
            self._rank: Rank = self._sending.add("ranks", 1) - 1
        if not 0 <= self._rank < MAX_RANKS:
            raise DeskLost(
                f"{store.host}:{store.port}: expected at most {MAX_RANKS} trainers, each as often "
                "as it joins: start the desk again, to go on from the last checkpoint"
            )
        self._sent = 0
        self._heard_s = time.monotonic()
        #: Why nothing can be sent or received any more.
        self._ended: MDPError | None = None
        self._refused: Refused | None = None
        #: Whether the desk has said that all is done; it may be gone before that is polled.
        self.may_leave = False
        self._since: dict[str, int] = {}
        self._committed = set[tuple[str, int]]()
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

    def join(self, name: str, digest: str) -> None:
        """Ask to take part; the answer is polled."""
        self._append(Entry(Joined(rank=self._rank, name=name, digest=digest)))

    def asked(self) -> bytes:
        """The desk's words before one joins; raises DeskLost, InputError if it refuses."""
        self._append(Entry(asks=True))
        while not (said := self._ask(partial(told, rank=self._rank))):
            if isinstance(action := self.poll(_LOOK_S), Refused):
                raise InputError(action.reason)
        return said

    def report(self, event: AnyEvent) -> None:
        """Append to the log; raises DeskLost."""
        self._check()
        if isinstance(event, TrainerReport):
            claims = tuple(self._claimed.pop(event.network, ()))
            event = replace(event, since=self._since.get(event.network, 0), claims=claims)
        self._append(Entry(event))

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action, None when there is none within `timeout_s`; raises DeskLost.

        A refusal that concerns all is the last action: every later poll returns it again.
        """
        if self._refused is not None:
            return self._refused
        try:
            action = self._in.get(timeout=timeout_s) if timeout_s else self._in.get_nowait()
        except queue.Empty:
            action = None
        if action is None:
            self._check()
        if isinstance(action, Refused) and not action.network:
            self._refused = action
        match action:
            case Commit() | GoOn() | Meet(background=True):
                self._since[action.network] = action.seq
        if isinstance(action, Commit):
            self._committed.add((action.network, action.seq))
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
        if number < 0:  # a counter has no signature
            raise Tampered(f"{counter}: expected a number from 0, got {number}")
        self._claimed.setdefault(network, []).append(number)
        return number

    def committed(self, network: str, seq: int) -> bool:
        """Tell whether the mean of a meeting was committed, as polled."""
        return (network, seq) in self._committed

    def close(self) -> None:
        """Leave."""
        if self._ended is None:
            self._append(Entry(Gone(rank=self._rank)))
        self._out.put(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        if time.monotonic() - self._heard_s > DESK_SILENT_S:
            raise desk_lost(*self.address)

    def _append(self, entry: Entry) -> None:
        data = msgspec.msgpack.encode(entry)

        def send() -> None:
            self._sending.set(f"event/{self._rank}/{self._sent}", data)
            self._sending.set("bell", b"")
            self._sent += 1

        self._out.put(send)

    def _ask(self, question: Callable[[SignedStore], R]) -> R:
        """The store's answer."""
        answers: queue.SimpleQueue[R] = queue.SimpleQueue()
        self._out.put(lambda: answers.put(question(self._sending)))
        while True:
            try:
                return answers.get(timeout=PULSE_S)
            except queue.Empty:
                self._check()

    def _send(self) -> None:
        with self._ending():
            pulse_s = 0.0
            while True:
                left_s = pulse_s + PULSE_S - time.monotonic()
                if left_s <= 0:
                    self._append(Entry())
                    if self.told is not None:
                        self._sending.set(f"progress/{self._rank}", self.told())
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

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Whoever waits is told why a thread can go on no longer."""
        try:
            yield
        except (DistError, Tampered) as error:
            self._ended = error if isinstance(error, Tampered) else desk_lost(*self.address)
            self._in.put(None)

    def _receive(self) -> None:
        number = 0
        with self._ending():
            while True:
                key = f"act/{self._rank}/{number}"
                try:
                    action = _ACTION.decode(self._receiving.get(key))
                except DistStoreError:
                    continue  # A day without an action.
                self._receiving.delete_key(key)
                number += 1
                self.may_leave |= isinstance(action, Leave)
                self._in.put(action)
                if isinstance(action, Refused) and not action.network:
                    return
