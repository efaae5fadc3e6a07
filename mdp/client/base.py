"""Parts of both clients: a fleet, its bundle, the sockets, and the calls in flight."""

import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import numpy as np

from mdp.arguments import (
    Errors,
    as_path,
    check_choice,
    check_errors,
    check_in_flight,
    check_number,
    check_timeout_s,
)
from mdp.client.crops import Cutter, PictureOrScene
from mdp.client.dispatcher import LOG, Clock, Dispatcher
from mdp.client.questions import CameraQuestion, PictureQuestion
from mdp.client.status import DeviceStatus, device_status, with_camera_faults
from mdp.errors import ConfigError, DeadlineExceeded, InputError, InsecureWarning
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.fleet import PLAIN_TEXT, Fleet, agent_keys, plain_text_entries, read_fleet
from mdp.formats.keys import load_pair
from mdp.fusion.fuse import FUSIONS, Fusion
from mdp.pictures.decoders import CUTTERS, DECODERS, Decoding
from mdp.protocol.messages import reply_frame_bytes
from mdp.requests.capture import (
    DEFAULT_EVERY_MS,
    DEFAULT_WITHIN_MS,
    Moment,
    check_every_ms,
    frame_query,
)
from mdp.requests.deadline import Deadline, check_deadline_ms
from mdp.requests.hedging import DEFAULT_SHARE
from mdp.requests.reason import NO_TIME
from mdp.transport import CLOSED, FORKED, ClientKeys, Dealers, public_key_of, this_process

if TYPE_CHECKING:
    from asyncio import TimerHandle

DEFAULT_DEADLINE_MS = 1000.0
#: How long `connect` waits for devices that do not answer.
CONNECT_TIMEOUT_S = 1.0
#: The most of its deadline that a first call waits for the agents.
CONNECT_SHARE = 0.5
#: From a look without an answer to the next one, at least.
RETRY_MS = 100.0
#: When the calls of this task or thread began, by `time.monotonic`; None: when they are made.
_begun_s: ContextVar[float | None] = ContextVar("begun_s", default=None)


@contextmanager
def begun_at(at_s: float) -> Iterator[None]:
    """Let calls in the block have begun at `at_s` of `time.monotonic`, in another process say."""
    token = _begun_s.set(at_s)
    try:
        yield
    finally:
        _begun_s.reset(token)


class FleetConnection:
    """A fleet and its bundle as they were read once, and the sockets and calls that go with them.

    Everything of a call happens on one connection, so that no answer is made of two bundles.
    """

    def __init__(self, options: "Options", clock: Clock, *, stacklevel: int) -> None:
        """Read the files and begin to connect; raises ConfigError.

        Warnings are given where `stacklevel` says, as seen from here.
        """
        self.fleet: Fleet
        self.bundle: Bundle
        self.fleet, self.bundle = read_fleet(options.fleet)
        #: One object for each caller that holds this connection.
        self.users: set[object] = set()
        #: Whether an event loop goes on taking in what has come in its next turn.
        self.goes_on = False
        #: An event loop's timer for the next moment to decide, and that moment.
        self.alarm: TimerHandle | None = None
        self.alarm_s = math.inf
        #: What begins calls of threads that have not got their turn.
        self.arrivals: deque[Callable[[], None]] = deque()
        self._clock = clock
        for entry in plain_text_entries(self.fleet) if options.insecure else ():
            warnings.warn(
                f"device {entry.device!r} at {entry.address} is {PLAIN_TEXT}",
                InsecureWarning,
                stacklevel=stacklevel + 1,
            )
        if options.cascade and self.bundle.manifest.cascade is None:
            raise ConfigError(
                f"{self.bundle.path / MANIFEST}: key `cascade`: expected members to ask first and "
                "how sure they have to be, found none: run mdp-partition evaluate --write "
                "(it takes 500 calibration pictures)"
            )
        self.transport = Dealers(
            {entry.device: entry.address for entry in self.fleet.devices},
            keys=client_keys(self.fleet, options),
            max_frame_bytes=reply_frame_bytes(len(self.bundle.manifest.labels)),
        )
        after_ms = options.hedge_after_ms
        try:
            self.dispatcher = Dispatcher(
                self.fleet,
                self.bundle,
                self.transport,
                clock=clock,
                fusion=options.fusion,
                hedge_after_s=None if after_ms is None else after_ms / 1e3,
                hedge_share=options.hedge_share,
                cascade=options.cascade,
                opinions=options.opinions,
            )
        except BaseException:
            self.transport.close()
            raise
        self._cutter = Cutter(self.dispatcher.assignments)

    def cut(self, picture: PictureOrScene) -> PictureQuestion:
        """The question about a picture, every member's crop cut; raises PictureError."""
        return PictureQuestion(self._cutter.views(picture))

    def start_cut(
        self, picture: PictureOrScene, done: Callable[[], None] = lambda: None
    ) -> Decoding[PictureQuestion]:
        """Begin to decode and cut `picture` beside the call; `done` is called in that thread."""
        decoders = CUTTERS if isinstance(picture, np.ndarray) else DECODERS
        return decoders.start(lambda: self.cut(picture), done)

    def step(self, timeout_s: float = math.inf) -> None:
        """Wait for the next event or moment to decide, at most `timeout_s`, and take it in."""
        if self.arrivals:
            self.take_in()
            while self.arrivals:
                self.arrivals.popleft()()
            # A call that ended at once has its thread waiting, and nothing else may be under way.
            timeout_s = 0.0
        left_s = min(timeout_s, self.dispatcher.next_wake_s() - self._clock())
        if events := self.transport.poll(max(0.0, left_s)):
            self.dispatcher.handle(events)
        self.dispatcher.tick()

    def take_in(self) -> None:
        """Settle connections that went or came since the last call, before any is asked.

        Raises InputError if the sockets are closed.
        """
        if events := self.transport.poll(0):
            self.dispatcher.handle(events)

    def is_settled(self) -> bool:
        """Tell whether every device is connected, or has said that it will not be."""
        settled = self.transport.connected | self.transport.refused.keys()
        return len(settled) == len(self.fleet.devices)


class Connecting(TypedDict, total=False):
    """The options of both clients and of `mdp.classify`, explained at `Client.connect`."""

    fusion: Fusion
    key: str | os.PathLike[str] | None
    insecure: bool
    timeout_s: float
    hedge_after_ms: float | None
    hedge_share: float
    cascade: bool
    opinions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a client, which hold whatever its fleet file says later."""

    fleet: Path
    fusion: Fusion = "stacked"
    key: str | os.PathLike[str] | None = None
    insecure: bool = False
    timeout_s: float = CONNECT_TIMEOUT_S
    hedge_after_ms: float | None = None
    hedge_share: float = DEFAULT_SHARE
    cascade: bool = False
    opinions: bool = False

    def __post_init__(self) -> None:
        check_timeout_s(self.timeout_s)
        check_choice("fusion", self.fusion, FUSIONS)
        if self.key is not None:
            as_path("key", self.key)
        if self.hedge_after_ms is not None:
            check_number("hedge_after_ms", self.hedge_after_ms, "0 or more", lambda ms: ms >= 0)
        check_number("hedge_share", self.hedge_share, "0 to 1", lambda share: 0 <= share <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of `watch`."""

    every_ms: float = DEFAULT_EVERY_MS
    deadline_ms: float = DEFAULT_DEADLINE_MS
    within_ms: float = DEFAULT_WITHIN_MS
    errors: Errors = "raise"

    def __post_init__(self) -> None:
        check_errors(self.errors)
        check_deadline_ms(self.deadline_ms)
        check_every_ms(self.every_ms)
        frame_query("latest", within_ms=self.within_ms, now_s=0.0)

    def pause_s(self, since_s: float, *, answered: bool) -> float:
        """Seconds to wait for the next look, `since_s` after the last one's start.

        A look without an answer may end at once: the next comes `RETRY_MS` later or more.
        """
        every_ms = self.every_ms if answered else max(self.every_ms, RETRY_MS)
        return max(0.0, every_ms / 1e3 - since_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of `stream`."""

    deadline_ms: float = DEFAULT_DEADLINE_MS
    in_flight: int = 2
    errors: Errors = "raise"

    def __post_init__(self) -> None:
        check_errors(self.errors)
        check_in_flight(self.in_flight)
        check_deadline_ms(self.deadline_ms)


class BaseClient:
    """The base of both clients: the connection for new calls, and the options."""

    def __init__(self, fleet: str | os.PathLike[str], **options: Unpack[Connecting]) -> None:
        self._options = Options(fleet=as_path("fleet", fleet), **options)
        self._clock: Clock = time.monotonic
        self._closed = False
        self._process = this_process()
        self._connection = FleetConnection(self._options, self._clock, stacklevel=4)

    @classmethod
    def connect(cls, fleet: str | os.PathLike[str], **options: Unpack[Connecting]) -> Self:
        """Connect to the agents of fleet.toml; those not there after `timeout_s` may come later.

        `fusion` is how answers are combined: `stacked`, the default, `boosted` or `bagged`.
        `key` is this client's secret key file, instead of the one that the fleet file names;
        `insecure` allows plain text to other machines, of which a warning is given. A device that
        has not answered after `hedge_after_ms`, or after what 95 % of its recent answers took, has
        its replica asked beside it, for at most `hedge_share` of all requests. With `cascade`, a
        few members are asked first, and the others only where their answer is not sure
        (docs/explanation/calls.md). With `opinions`, an answer's `members` say what each would have
        answered alone. Raises ConfigError if the fleet, its bundle or a key is wrong, and with
        `cascade` if the bundle does not say whom to ask first; InputError for an option.
        """
        return cls(fleet, **options)

    @property
    def fleet(self) -> Fleet:
        """The fleet that new calls go to."""
        return self._connection.fleet

    @property
    def bundle(self) -> Bundle:
        """The bundle by which new calls are answered."""
        return self._connection.bundle

    def leave_out(self, *devices: str) -> None:
        """Ask none of `devices` in calls that begin from now on, and all others again.

        Answers say `left out` of them. Raises InputError for a device that the fleet lacks.
        """
        known = [entry.device for entry in self.fleet.devices]
        for device in devices:
            if device not in known:
                raise InputError(f"no device {device!r}: expected some of {', '.join(known)}")
        self._dispatcher.left_out = frozenset(devices)

    @property
    def counters(self) -> dict[str, int]:
        """Replies that were ignored: `late`, `duplicate` and `malformed`."""
        return dict(self._dispatcher.counters)

    def _check_usable(self) -> None:
        """Raise InputError after `close`, and in a process that was forked off.

        The forked process has neither libzmq's thread nor a lock's holder: a call would never end.
        """
        if self._process is not this_process():
            raise InputError(FORKED)
        if self._closed:
            raise InputError(CLOSED)

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._connection.dispatcher

    @property
    def _transport(self) -> Dealers:
        return self._connection.transport

    def _adopt(self, connection: FleetConnection) -> FleetConnection:
        """From now on calls begin on `connection`; returns the one before."""
        former, self._connection = self._connection, connection
        LOG.info("%s: now in use, digest %s", connection.bundle.path, connection.bundle.digest[:12])
        connection.dispatcher.counters.update(former.dispatcher.counters)
        connection.dispatcher.left_out = former.dispatcher.left_out
        return former

    def _connection_of_call(self, user: object) -> FleetConnection:
        """The connection of a new call: its bundle and sockets stay until `user` is discarded."""
        self._check_usable()
        connection = self._connection
        connection.users.add(user)
        while connection is not self._connection:  # another thread has reloaded
            connection.users.discard(user)
            connection = self._connection
            connection.users.add(user)
        return connection

    def _deadline(self, deadline_ms: float) -> Deadline:
        """The deadline of a call that begins now; raises InputError."""
        begun_s = _begun_s.get()
        now_s = self._clock() if begun_s is None else begun_s
        return Deadline(now_s, check_deadline_ms(deadline_ms))

    def _camera_question(
        self, at: Moment, within_ms: float, *, maps: bool = False
    ) -> CameraQuestion:
        if maps and not self.bundle.manifest.inspection:
            raise InputError(
                f"maps: {self.bundle.path} has no anomaly heads: mdp-partition inspect adds them"
            )
        query = frame_query(at, within_ms=within_ms, now_s=self._clock())
        return CameraQuestion(query, self._dispatcher.disagreeing, maps=maps)

    def _too_late(self, deadline: Deadline, why: str) -> DeadlineExceeded:
        devices = [entry.device for entry in self.fleet.devices]
        return DeadlineExceeded(
            f"no answer within {deadline.ms:g} ms: {why}",
            dict.fromkeys(devices, str(NO_TIME)),
            dict.fromkeys(devices, NO_TIME.code),
        )

    def _ask_all(self) -> set[str]:
        """Ask every connected device for its status; returns those asked."""
        self._dispatcher.handle(self._transport.poll(0))
        self._dispatcher.statuses.clear()
        devices = [entry.device for entry in self.fleet.devices]
        return {device for device in devices if self._dispatcher.ask(device) is not None}

    def _all_told(self, asked: set[str]) -> bool:
        return asked & self._transport.connected <= self._dispatcher.statuses.keys()

    def _device_statuses(self, asked: set[str]) -> list[DeviceStatus]:
        told = [
            device_status(
                entry,
                self._dispatcher.statuses.get(entry.device),
                self.bundle,
                silent=entry.device in asked & self._transport.connected,
                refused=self._transport.refused.get(entry.device),
            )
            for entry in self.fleet.devices
        ]
        return with_camera_faults(told, self.fleet, self.bundle)


def client_keys(fleet: Fleet, options: Options) -> ClientKeys | None:
    """The keys to connect with; the options' stands above the one that the fleet file names."""
    path = None if options.key is None else Path(options.key)
    if path is None and fleet.key is not None:
        path = options.fleet.parent / fleet.key
    agents = agent_keys(fleet, has_key=path is not None, insecure=options.insecure)
    if path is None:
        return None
    own = load_pair(path, public_key_of)
    second = {entry.device: entry.keys[1] for entry in fleet.devices if len(entry.keys) == 2}
    return ClientKeys(public=own.public, secret=own.secret, agents=agents, second=second)
