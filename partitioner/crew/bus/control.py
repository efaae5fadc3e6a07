"""A crew's control: the coordinator, which decides, and a client for each trainer.

    trainer:  push a message to the coordinator's mailbox
    coordinator:     take what comes in, in order; push what it answers to a trainer's mailbox

The order in which the coordinator takes events is the log's, which it writes to a file.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec.structs import replace
from torch.distributed import DistError

from mdp.errors import InputError, MDPError
from partitioner.crew.bus.store import (
    MAX_RANKS,
    RANKS,
    CoordinatorLost,
    SignedStore,
    Tampered,
    coordinator_lost,
    reaching,
)
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.messages import (
    AnyAction,
    AnyEvent,
    AnyFileMessage,
    AnyPassOrder,
    AnyPassReport,
    Commit,
    Description,
    FileMessage,
    Gone,
    GoOn,
    Heartbeat,
    Hello,
    Joined,
    Leave,
    Meet,
    MeetingSchedule,
    Offer,
    PassOrder,
    PassOver,
    PassReport,
    Piece,
    Rank,
    Refused,
    Rows,
    Start,
    State,
    ToCoordinator,
    ToTrainer,
    TrainerReport,
)

#: Of one message that has no outputs and no piece of a file in it: a meeting of the largest crews
#: and an epoch's lost batches stay far below.
MAX_BYTES = 2**20
#: Time between two heartbeats of a trainer's process.
HEARTBEAT_S = 1.0
#: A coordinator that answers nothing for so long is lost: six times what it grants a trainer.
COORDINATOR_SILENT_S = 60.0
_CLOSING_S = 2.0
#: The coordinator's mailbox.
_COORDINATOR = "coordinator"

R = TypeVar("R")


class LogLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a log's file."""

    at_s: float
    event: AnyEvent
    actions: list[AnyAction]


_LINE = msgspec.json.Decoder(LogLine)
_TO_COORDINATOR: "msgspec.msgpack.Decoder[ToCoordinator]" = msgspec.msgpack.Decoder(ToCoordinator)
_TO_TRAINER: "msgspec.msgpack.Decoder[ToTrainer]" = msgspec.msgpack.Decoder(ToTrainer)


class RunRefused(MDPError):
    """The coordinator takes this trainer no longer, or ends."""

    exit_code = 3


def mailbox(rank: Rank) -> str:
    """The name of a trainer's queue."""
    return f"mailbox/{rank}"


def post(store: SignedStore, message: ToTrainer) -> None:
    """Put a message into its trainer's mailbox."""
    store.push(mailbox(message.rank), msgspec.msgpack.encode(message))


class Coordinator:
    """Reads its mailbox, asks the machine, posts actions; two threads of the coordinator's process.

    The log is written to a file anew, from which `replay` gives the same actions. Who is lost is
    decided by `watch`. Where the coordinator itself fails (a full disk), every trainer is told why.
    Raises InputError where the file cannot be opened.

    Frozen passes have `read`, `post` and `end_pass`, for one thread.

    begin: for who asks, before it joins. files: takes messages about files, and who has gone.
    """

    def __init__(
        self,
        store: SignedStore,
        machine: MeetingSchedule,
        watch: Watch,
        path: Path,
        begin: bytes = b"",
        files: Callable[[AnyFileMessage | Gone], None] = lambda message: None,
    ) -> None:
        self._machine, self._watch, self._path = machine, watch, path
        self._begin, self._files = begin, files
        #: Trainers that take part, and what they last said of themselves.
        self._states: dict[Rank, State] = {}
        self._ending = threading.Event()
        self._failed = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        # The store's own connection belongs to who made it.
        self._receiving, self._posting = store.another(), store.another()
        #: Of the thread of passes, and of who closes the coordinator.
        self._passing = store.another()
        self._inbox: queue.SimpleQueue[ToCoordinator | Exception] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[AnyPassReport] = queue.SimpleQueue()
        #: Whom each connection has spoken for.
        self._senders: dict[bytes, Rank] = {}
        self._looked_s = time.monotonic()
        #: Passes of which nothing is left to compute.
        self._over = set[str]()
        #: Values that no trainer has named, and messages that are none.
        self._strange = self._garbage = 0
        self._threads = [
            threading.Thread(target=target, name=f"crew-{name}", daemon=True)
            for name, target in (("coordinator", self._serve), ("mailbox", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def states(self) -> Mapping[Rank, State]:
        """Trainers that take part, and what each last said that it does.

        Until they have left, they may still read their mailboxes.
        """
        return dict(self._states)

    @property
    def drops(self) -> int:
        """Values of strangers, and messages that count for nothing.

        These were too large, not signed, of another rank than earlier ones, or no messages.
        """
        return self._strange + self._garbage + self._receiving.left_out

    def read(self, timeout_s: float) -> AnyPassReport | None:
        """The next word of a trainer in a pass, None when there is none within `timeout_s`."""
        return _next(self._reports, timeout_s)

    def post(self, order: AnyPassOrder) -> None:
        """Put an order into its trainer's mailbox; raises CoordinatorLost."""
        with reaching(self._passing):
            post(self._passing, order)

    def end_pass(self, work: str) -> None:
        """Tell every trainer, also one that comes later, that a pass is over."""
        self._over.add(work)
        for rank in self.states:
            self.post(PassOver(rank=rank, work=work))

    def close(self) -> None:
        """Stop reading; trainers that are still there are left to themselves."""
        self._ending.set()
        with contextlib.suppress(DistError):
            self._passing.push(_COORDINATOR, b"")  # for who waits
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _receive(self) -> None:
        while not self._ending.is_set():
            try:
                message = _decode(self._receiving.pop(_COORDINATOR))
            except Tampered:
                # Nothing of this sender is believed any more: it is silent.
                self._garbage += 1
                continue
            except Exception as error:
                self._inbox.put(error)
                return
            if message is not None and self._is_own(message.rank):
                self._inbox.put(message)
            else:
                self._garbage += not self._ending.is_set()

    def _is_own(self, rank: Rank) -> bool:
        """Check that the last message is of the rank that its connection has first spoken for."""
        return self._senders.setdefault(self._receiving.last_sender, rank) == rank

    def _serve(self) -> None:
        with self._file:
            while not self._ending.is_set():
                try:
                    self._look()
                except Exception as error:  # all wait for this thread
                    with contextlib.suppress(DistError, CoordinatorLost):
                        if isinstance(error, DistError) and not self._ending.is_set():
                            self._posting = self._posting.another()
                        self._fail(error)

    def _look(self) -> None:
        """Take the next message, and each second see who is lost and what is strange."""
        message = _next(self._inbox, self._looked_s + HEARTBEAT_S - time.monotonic())
        if isinstance(message, Exception):
            raise message
        if message is not None:
            self._take(message)
        now_s = time.monotonic()
        if now_s >= self._looked_s + HEARTBEAT_S:
            self._looked_s = now_s
            for rank in self._watch.find_lost(now_s):
                self._handle(Gone(rank=rank))
            self._strange += self._posting.delete_strange()

    def _take(self, message: ToCoordinator) -> None:
        rank = message.rank
        if isinstance(message, Hello | Joined):
            if self._failed:
                self._refuse(rank, self._failed)
            elif isinstance(message, Joined):
                self._handle(message)
            else:
                description = Description(rank=rank, network="", content=self._begin)
                post(self._posting, description)
        elif rank not in self._states:
            return
        elif isinstance(message, Heartbeat):
            self._states[rank] = message.state
            self._watch.on_heartbeat(rank, time.monotonic())
        elif isinstance(message, PassReport) and message.work in self._over:
            if isinstance(message, Offer):
                post(self._posting, PassOver(rank=rank, work=message.work))
        elif isinstance(message, PassReport):
            self._reports.put(message)
        elif isinstance(message, FileMessage):
            self._files(message)
        else:
            self._handle(message)

    def _handle(self, event: AnyEvent) -> None:
        now_s = time.monotonic()
        if isinstance(event, Joined):
            self._states[event.rank] = State()
        try:
            actions = self._machine.handle(event, now_s)
            # Written first: what trainers are told is in the file.
            self._file.write(msgspec.json.encode(LogLine(now_s, event, actions)) + b"\n")
        except Exception as error:  # all wait for this thread
            self._fail(error)
            return
        self._watch.on_event(event, now_s)
        for action in actions:
            post(self._posting, action)
            self._watch.on_action(action, now_s)
            if isinstance(action, Refused) and not action.network:
                self._forget(action.rank)

    def _fail(self, error: Exception) -> None:
        """Tell all, also who comes later, why nothing can be decided any more."""
        if isinstance(error, OSError):
            self._failed = f"{self._path}: cannot be written: {error.strerror}"
        elif isinstance(error, DistError):
            self._failed = (
                "the coordinator's store refuses the coordinator: another program may have changed "
                "a counter there; the same commands go on from the last checkpoint"
            )
        elif isinstance(error, ValueError):
            self._failed = f"the log contradicts itself: {error}"
        else:
            self._failed = f"the coordinator fails: {type(error).__name__}: {error}"
        for rank in sorted(self._states):
            self._refuse(rank, self._failed)

    def _refuse(self, rank: Rank, reason: str) -> None:
        post(self._posting, Refused(rank=rank, network="", reason=reason))
        self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        self._states.pop(rank, None)
        gone = Gone(rank=rank)
        self._watch.on_event(gone, time.monotonic())
        self._files(gone)


def _next(waiting: "queue.SimpleQueue[R]", timeout_s: float) -> R | None:
    """The next of a queue, None when there is none within `timeout_s`."""
    with contextlib.suppress(queue.Empty):
        return waiting.get(timeout=max(0.0, timeout_s))
    return None


def _decode(data: bytes) -> ToCoordinator | None:
    """A message to the coordinator; None for what is none, and for one that is too large."""
    try:
        message = _TO_COORDINATOR.decode(data)
    except msgspec.DecodeError:
        return None
    may_be_large = isinstance(message, Rows | Piece | Offer)
    return message if may_be_large or len(data) <= MAX_BYTES else None


def replay(
    path: Path, machine: MeetingSchedule
) -> Iterator[tuple[list[AnyAction], list[AnyAction]]]:
    """For each event of a log's file what was told then, and what `machine` tells now.

    A last line that is cut off is left out: its actions were not posted.
    """
    for line in log_lines(path):
        yield line.actions, machine.handle(line.event, line.at_s)


def log_lines(path: Path) -> Iterator[LogLine]:
    """Lines of a log's file, in order, without a last line that is cut off."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _LINE.decode(line)


class CoordinatorClient:
    """A trainer's connections to the coordinator: its `TrainerControl`, and a way for files.

    A thread sends, with a heartbeat every second, and one receives, so that neither a step of
    minutes looks like a lost trainer nor a coordinator that hangs stops this process for ever: what
    waits for it raises CoordinatorLost, or what has ended a thread. Reports are given the last
    Commit or GoOn that was polled, and the batches claimed since the last report: claim the next
    batch after reporting this one.

    Rows and pieces of files have a connection and a thread of their own (`send`): what comes after
    megabytes on a slow link would be late.
    """

    def __init__(self, store: SignedStore, reserved: Rank | None = None) -> None:
        """Connect as `store` does, with a `reserved` rank or the next; raises CoordinatorLost."""
        self._out: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[AnyAction | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[AnyPassOrder | AnyFileMessage | None] = queue.SimpleQueue()
        self._sending, self._receiving = store.another(), store.another()
        self._carrying = store.another()
        #: Each has megabytes: one waits while one is on its way.
        self._bulk: queue.Queue[Rows | Piece | None] = queue.Queue(maxsize=1)
        self.address = store.host, store.port
        #: What this trainer does, for every heartbeat.
        self.state: Callable[[], State] = State
        self._sent_bytes = 0
        with reaching(self._sending):
            found = self._sending.add(RANKS, 1) - 1 if reserved is None else reserved
        self._rank: Rank = found
        if not 0 <= self._rank < MAX_RANKS:
            raise CoordinatorLost(
                f"{store.host}:{store.port}: expected at most {MAX_RANKS} trainers, each as often "
                "as it joins: start the coordinator again, to go on from the last checkpoint"
            )
        self._heard_s = time.monotonic()
        #: Why nothing can be sent or received any more.
        self._ended: Exception | None = None
        self._refused: Refused | None = None
        #: Whether the coordinator has said that all is done; it may be gone before that is polled.
        self.may_leave = False
        self._since: dict[str, int] = {}
        self._committed = set[tuple[str, int]]()
        self._claimed: dict[str, list[int]] = {}
        self._given: dict[str, list[int]] = {}
        self._threads = [
            threading.Thread(target=target, name=f"crew-{name}", daemon=True)
            for name, target in (
                ("send", self._send),
                ("receive", self._receive),
                ("bulk", self._carry),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def rank(self) -> Rank:
        """The own rank."""
        return self._rank

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows and files."""
        return self._sent_bytes

    def join(self, name: str, digest: str) -> None:
        """Ask to take part; the answer is polled."""
        self._append(Joined(rank=self._rank, name=name, digest=digest))

    def describe(self) -> bytes:
        """Ask for the coordinator's description.

        Raises CoordinatorLost, and InputError where it refuses.
        """
        self._append(Hello(rank=self._rank))
        while not isinstance(action := self.poll(HEARTBEAT_S), Description):
            if isinstance(action, Refused):
                raise InputError(action.reason)
        return action.content

    def report(self, event: AnyEvent) -> None:
        """Append to the log; raises CoordinatorLost."""
        self._check()
        if isinstance(event, TrainerReport):
            claims = tuple(self._claimed.pop(event.network, ()))
            event = replace(event, since=self._since.get(event.network, 0), claims=claims)
        self._append(event)

    def append(self, message: AnyPassReport | AnyFileMessage) -> None:
        """Send a short message; raises CoordinatorLost."""
        self._check()
        self._append(message)

    def send(self, message: Rows | Piece) -> None:
        """Send megabytes in the background; waits while others wait. Raises CoordinatorLost."""
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                self._bulk.put(message, timeout=HEARTBEAT_S)
                return

    def reply(self) -> AnyPassOrder | AnyFileMessage:
        """Wait for the coordinator's next word in a pass or about a file.

        Raises CoordinatorLost, and RunRefused where the coordinator takes this trainer no longer.
        """
        while (reply := _next(self._replies, HEARTBEAT_S)) is None:
            if self._refused is not None:
                raise RunRefused(self._refused.reason)
            self._check()
        return reply

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action, None when there is none within `timeout_s`; raises CoordinatorLost.

        A refusal that concerns all is the last action: every later poll returns it again.
        """
        action = _next(self._in, timeout_s if self._refused is None else 0.0)
        if action is None and self._refused is not None:
            return self._refused
        if action is None:
            self._check()
        match action:
            case Start():  # a network that begins anew is another one
                for of_network in (self._since, self._claimed, self._given):
                    of_network.pop(action.network, None)
            case Commit() | GoOn() | Meet(background=True):
                self._since[action.network] = action.seq
        if isinstance(action, Commit):
            self._committed.add((action.network, action.seq))
        if isinstance(action, GoOn):
            self._given.setdefault(action.network, []).extend(action.claims)
        return action

    def claim(self, counter: str) -> int:
        """The next batch of an epoch, `cursor(network, epoch)`; raises CoordinatorLost.

        Those that were lost with other trainers come first.
        """
        network = counter.removeprefix("cursor/").rpartition("/")[0]
        given = self._given.get(network)
        number = given.pop(0) if given else self._ask(lambda s: s.add(counter, 1)) - 1
        if number < 0:  # a counter has no signature
            raise Tampered(f"{counter}: expected a number from 0, got {number}")
        self._claimed.setdefault(network, []).append(number)
        return number

    def has_committed(self, network: str, seq: int) -> bool:
        """Tell whether the mean of a meeting was committed, as polled."""
        return (network, seq) in self._committed

    def close(self) -> None:
        """Leave."""
        if self._ended is None:
            # The coordinator answers with a refusal, which is the last message.
            self._append(Gone(rank=self._rank))
        self._out.put(None)
        with contextlib.suppress(queue.Full):
            self._bulk.put(None, timeout=_CLOSING_S)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        if time.monotonic() - self._heard_s > COORDINATOR_SILENT_S:
            raise coordinator_lost(*self.address)

    def _append(self, message: ToCoordinator) -> None:
        data = msgspec.msgpack.encode(message)
        self._out.put(lambda: self._sending.push(_COORDINATOR, data))

    def _ask(self, question: Callable[[SignedStore], R]) -> R:
        """The store's answer."""
        answers: queue.SimpleQueue[R] = queue.SimpleQueue()
        self._out.put(lambda: answers.put(question(self._sending)))
        while True:
            try:
                return answers.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                self._check()

    def _send(self) -> None:
        with self._ending():
            heartbeat_s = 0.0
            while True:
                left_s = heartbeat_s + HEARTBEAT_S - time.monotonic()
                if left_s <= 0:
                    self._append(Heartbeat(rank=self._rank, state=self.state()))
                    # Unlike a push, a check is answered.
                    self._sending.check([RANKS])
                    self._heard_s = heartbeat_s = time.monotonic()
                    continue
                with contextlib.suppress(queue.Empty):
                    act = self._out.get(timeout=left_s)
                    if act is None:
                        return
                    act()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Tell whoever waits why a thread can go on no longer."""
        try:
            yield
        except Exception as error:
            self._ended = coordinator_lost(*self.address) if isinstance(error, DistError) else error
            self._wake()

    def _carry(self) -> None:
        with self._ending():
            while (message := self._bulk.get()) is not None:
                self._sent_bytes += len(message.data)
                self._carrying.push(_COORDINATOR, msgspec.msgpack.encode(message))

    def _wake(self) -> None:
        self._in.put(None)
        self._replies.put(None)

    def _receive(self) -> None:
        with self._ending():
            while True:
                message = _TO_TRAINER.decode(self._receiving.pop(mailbox(self._rank)))
                if isinstance(message, PassOrder | FileMessage):
                    self._replies.put(message)
                elif isinstance(message, Refused) and not message.network:
                    self._refused = message
                    self._wake()
                    return
                else:
                    self.may_leave |= isinstance(message, Leave)
                    self._in.put(message)
