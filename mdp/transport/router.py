"""The agent's ROUTER, who is let in to it, and who has to leave."""

import contextlib
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from mdp.errors import AgentError
from mdp.protocol.messages import MAX_BUFFER_BYTES, Buffer
from mdp.transport import zap
from mdp.transport.admission.access import Access, AgentKeys, Audit
from mdp.transport.admission.tcp_peers import (
    duplicate_of,
    is_delivered,
    linger,
    visitor_at,
)
from mdp.transport.sockets import (
    HIGH_WATER_MARK,
    NOBLOCK,
    POLLIN,
    configure,
    descriptor,
    receive,
    send,
)

#: Replies that may wait for one client; they are small, and one more would be lost.
REPLIES_HIGH_WATER_MARK = 1024
_WATCHED = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
#: Of which connection a frame is.
_SOURCE = int(zmq.SRCFD)
_MONITOR = "inproc://connections"
#: How long replies may take to arrive after the end. ZMTP's heartbeats end a connection whose other
#: end stands still after as long.
LINGER_S = 3.0
#: Connections that the kernel may hold until this process takes them.
BACKLOG = 1024
#: Frames of fewer bytes are copied.
_SMALL_BYTES = 1024
#: Arrivals and departures that are taken in before messages get their turn.
WATCHED_AT_ONCE = 64


class Peer(NamedTuple):
    """Who has sent a message."""

    #: The connection, as the ROUTER names it.
    route: bytes
    #: The client: its public key or, where there are none, the connection.
    client: str


#: A message's sender and its frames.
Request = tuple[Peer, Sequence[Buffer]]


class Router:
    """The agent's socket: one thread polls, any thread may send, so that no reply changes hands.

    A ZeroMQ socket may be used by several threads if they take turns: every use is under one lock,
    and waiting happens outside of it, on the sockets' file descriptors.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: AgentKeys | None = None,
        max_frame_bytes: int = MAX_BUFFER_BYTES,
        audit: Audit = lambda *_: None,
    ) -> None:
        """Listen on `address`, in plain text without `keys`; raises AgentError."""
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._epoll = select.epoll()
        #: Whether a thread waits at the descriptors.
        self._waiting = False
        #: Whether a descriptor other than the router's has told of a change.
        self._woken = False
        #: Whether more have come or gone than for one turn.
        self._crowded = False
        #: Whether the router's descriptor may stay quiet although something has come.
        self._unsure = True
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        #: What `zmq_poll` is asked about it.
        self._question = [(self._router, POLLIN)]
        self._keeper: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._access = Access(keys, audit)
        configure(self._router, address, max_frame_bytes)
        self._router.router_mandatory = True
        self._router.sndhwm = REPLIES_HIGH_WATER_MARK
        self._router.backlog = BACKLOG
        # Without a bound: libzmq's only thread waits for room, and whoever closes for that thread.
        self._watch: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._watch.rcvhwm = 0
        self._router.monitor(_MONITOR, _WATCHED)
        self._watch.connect(_MONITOR)
        #: Also for a router that is dropped: a context waits for open sockets for ever.
        self._finalizer = weakref.finalize(
            self,
            _release,
            self._context,
            [self._router, self._watch, self._keeper],
            [self._waker, self._wakee, self._epoll],
        )
        try:
            if keys is not None:
                self._lock_door(keys)
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
            raise AgentError(f"cannot listen on {address}: {reason}") from error
        #: What to do when a descriptor tells of a change, in this order.
        self._chores = {
            self._wakee.fileno(): self._clear_wake,
            descriptor(self._keeper): self._answer_knocks,
            descriptor(self._watch): self._watch_door,
        }
        for number in (*self._chores, descriptor(self._router)):
            self._epoll.register(number, select.EPOLLIN)
        # A descriptor does not tell of the first message to a socket that nobody has read from.
        self._answer_knocks()
        self._watch_door()

    def _lock_door(self, keys: AgentKeys) -> None:
        # Before anybody can knock: without a keeper, libzmq would have nobody to ask.
        self._keeper.bind(zap.ENDPOINT)
        self._router.zap_domain = zap.DOMAIN
        # Fail closed: a handshake that cannot be asked about fails.
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.secret.encode()

    @property
    def address(self) -> str:
        """Where this socket listens, with the port that was really given."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def allow(self, public_keys: frozenset[str], connections: Mapping[str, int]) -> None:
        """From now on only these clients are heard; connections of all others are ended.

        `connections` are how many a key may have, where that is not `PER_KEY`.
        """
        with self._lock:
            self._access.allow(public_keys, connections)

    def turned_away(self) -> dict[str, int]:
        """How many connections or messages were turned away since the last call, by reason."""
        if not self._access.turned_away:
            return {}
        with self._lock:
            counted, self._access.turned_away = self._access.turned_away, Counter()
        return dict(counted)

    def poll(self, timeout_s: float | None) -> Iterator[Request]:
        """Messages as (peer, frames), waiting at most `timeout_s` or until `wake` for the first.

        They are received one by one, so that each may be answered before the next is looked for;
        as many as may wait for one client at most.
        """
        self._await(timeout_s)
        if not self._unsure:
            return
        for _ in range(HIGH_WATER_MARK):
            with self._lock:
                request = self._receive()
            if request is not None:
                yield request
            # Only now: replying in between would have made the answer unsure again.
            with self._lock:
                if not self._has_more():
                    return

    def was_woken(self) -> bool:
        """Whether `wake` was called, or a connection came, ended or was refused, since last asked.

        For the thread that polls.
        """
        woken, self._woken = self._woken, False
        return woken

    def _await(self, timeout_s: float | None) -> None:
        with self._lock:
            # First: a socket that is never quiet shall not keep anybody out for longer.
            timeout_s = self._access.let_in(timeout_s)
            if self._unsure and self._has_more():
                timeout_s = 0.0
            self._waiting = True
        told = self._epoll.poll(timeout_s)
        with self._lock:
            self._waiting = False
            if self._crowded:
                self._watch_door()
            for number, _ in told:
                if chore := self._chores.get(number):
                    chore()
                    self._woken = True
                else:
                    self._unsure = True

    def _has_more(self) -> bool:
        """Whether a message is there; if none is, the descriptor will tell of the next one."""
        self._unsure = bool(zmq.zmq_poll(self._question, 0))
        return self._unsure

    def _receive(self) -> Request | None:
        """The next message; None if nobody who is let in has sent one."""
        try:
            route = self._router.recv(NOBLOCK)
        except zmq.Again:
            return None
        # At least one more follows: the ROUTER puts the route before what was sent.
        frames = receive(self._router)
        # Of the last frame: what the ROUTER puts before knows nobody.
        last: Any = frames[-1]
        client: str = route.hex() if self._access.allowed is None else last.get("User-Id")
        if self._access.allowed is not None and not self._access.heard(client, last.get(_SOURCE)):
            return None
        # Small ones are copied: that is cheaper than keeping the frame.
        return Peer(route, client), [
            frame.bytes if len(frame) < _SMALL_BYTES else frame.buffer for frame in frames
        ]

    def _clear_wake(self) -> None:
        self._wakee.recv(4096)

    def _answer_knocks(self) -> None:
        """Answer libzmq's questions about keys; it asks one at a time per connection."""
        # Before whoever is turned away has gone, and nobody can say who it was.
        self._watch_door()
        while frames := receive(self._keeper):
            self._keeper.send_multipart(self._access.knocked([frame.bytes for frame in frames]))

    def _watch_door(self, at_once: int | None = WATCHED_AT_ONCE) -> None:
        """Take in who has come and gone, as many as for one turn; all of them for None."""
        self._crowded = False
        for _ in repeat(None) if at_once is None else range(at_once):
            frames = receive(self._watch)
            if not frames:
                return
            said = parse_monitor_message([frame.bytes for frame in frames])
            event, number = said["event"], said["value"]
            if event == zmq.Event.DISCONNECTED:
                self._access.closed(number)
            elif event == zmq.Event.LISTENING:
                self._access.listener = socket.socket(fileno=os.dup(number))
            elif visitor := visitor_at(number):
                self._access.opened(visitor)
        # There may be more, of which the descriptor does not tell again.
        self._crowded = True
        self.wake()

    def send(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Hand a reply over to the peer at `route`; False if it has gone or does not read.

        Any thread.
        """
        with self._lock:
            try:
                send(self._router, [route, *frames])
                sent = True
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise
                sent = False
            # Sending, in vain as well, takes in what ZeroMQ has to tell, and with it perhaps a
            # message's arrival, of which who waits at the descriptors would not be told.
            self._unsure = True
            arrived = self._waiting and self._has_more()
        if arrived:
            self.wake()
        return sent

    def wake(self) -> None:
        """End the current or next `poll` at once. Safe from any thread and in a signal handler."""
        # A full pipe means that a wake-up is waiting already.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def delivered(self) -> bool:
        """Whether the peers' kernels have all that libzmq has written."""
        with self._lock:
            return all(map(is_delivered, self._access.connections.all))

    def close(self) -> None:
        """Close the socket; replies already handed over have `LINGER_S` to arrive."""
        until_s = time.monotonic() + LINGER_S
        with self._lock:
            if not self._finalizer.alive:
                return
            self._watch_door(at_once=None)
            # Not unbound first: that ends connections without what libzmq has not written yet. And
            # libzmq closes them as soon as it has written, which may be before it has arrived.
            peers = list(filter(None, map(duplicate_of, self._access.connections.all)))
            if self._access.listener is not None:
                self._access.listener.close()
            self._router.disable_monitor()
            self._router.close(linger=int(LINGER_S * 1000))
            self._finalizer()
        linger(peers, until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _release(
    context: zmq.Context[zmq.Socket[bytes]],
    sockets: Sequence["zmq.Socket[bytes]"],
    others: Sequence[Any],
) -> None:
    for one in sockets:
        one.close(linger=0)
    for other in others:
        other.close()
    context.term()
