"""The agent's ROUTER, and the admission of its connections."""

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
from typing import Any, NamedTuple

import zmq

from mdp.closing import Closing
from mdp.errors import AddressUnavailable, AgentError
from mdp.protocol.messages import MAX_BUFFER_BYTES, Buffer
from mdp.transport import zap
from mdp.transport.admission.access import Access, AgentKeys, Audit
from mdp.transport.admission.tcp_peers import duplicate_socket, is_delivered, linger, peer_of
from mdp.transport.sockets import (
    HIGH_WATER_MARK,
    NOBLOCK,
    POLLIN,
    configure,
    descriptor,
    monitor_event,
    receive,
    send,
)

#: Replies that may wait for one client; they are small, and one more would be lost.
REPLIES_HIGH_WATER_MARK = 1024
_WATCHED = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
#: The socket option for the descriptor of a frame's connection.
_SOURCE = int(zmq.SRCFD)
_MONITOR = "inproc://connections"
#: How long replies may take to arrive after `close`; after as long, ZMTP's heartbeats end the
#: connection of a peer that does not answer.
LINGER_S = 3.0
#: Connections that the kernel may hold until this process takes them.
BACKLOG = 1024
#: Frames of fewer bytes are copied.
_SMALL_BYTES = 1024
#: Errors of an address that may be free, or of a network that may be there, a little later.
_PASSING = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV)
#: Connection events that are handled before messages get their turn.
WATCHED_AT_ONCE = 64


class Peer(NamedTuple):
    """The sender of a message."""

    #: The connection, as the ROUTER names it.
    route: bytes
    #: The client: its public key or, where there are none, the connection.
    client: str
    #: The connection's address and port, where it has a key; empty where it has ended since.
    address: str = ""


#: A message's sender and its frames.
Request = tuple[Peer, Sequence[Buffer]]


class Router(Closing):
    """The agent's socket: one thread polls, any thread may send.

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
        """Listen on `address`, in plain text without `keys`; raises AgentError.

        That is an AddressUnavailable where `address` may be free later.
        """
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._epoll = select.epoll()
        #: Whether a thread waits at the descriptors.
        self._waiting = False
        #: Whether a poll timed out, or another descriptor than the router's had an event.
        self._woken = False
        #: Whether more connection events wait than are handled in one turn.
        self._crowded = False
        #: Whether a message may wait without an event of the router's descriptor.
        self._unsure = True
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        #: The argument of `zmq_poll`.
        self._poll_items = [(self._router, POLLIN)]
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._access = Access(keys, audit)
        configure(self._router, address, max_frame_bytes)
        self._router.router_mandatory = True
        self._router.sndhwm = REPLIES_HIGH_WATER_MARK
        self._router.backlog = BACKLOG
        # Without a bound: libzmq's only thread would wait for room, and `close` for that thread.
        self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._router.monitor(_MONITOR, _WATCHED)
        self._monitor.connect(_MONITOR)
        #: Also for a router that is not closed: a context waits for open sockets for ever.
        self._finalizer = weakref.finalize(
            self,
            _release,
            self._context,
            [self._router, self._monitor, self._zap],
            [self._waker, self._wakee, self._epoll],
        )
        try:
            if keys is not None:
                self._require_keys(keys)
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
            kind = AddressUnavailable if error.errno in _PASSING else AgentError
            raise kind(f"cannot listen on {address}: {reason}") from error
        #: Descriptor -> handler of its events.
        self._handlers = {
            self._wakee.fileno(): self._clear_wake,
            descriptor(self._zap): self._answer_zap,
            descriptor(self._monitor): self._handle_connections,
        }
        for number in (*self._handlers, descriptor(self._router)):
            self._epoll.register(number, select.EPOLLIN)
        # Descriptors are edge-triggered: nothing announces what came before the first read.
        self._answer_zap()
        self._handle_connections()

    def _require_keys(self, keys: AgentKeys) -> None:
        # Bound before the router: without a ZAP handler, libzmq accepts every key.
        self._zap.bind(zap.ENDPOINT)
        self._router.zap_domain = zap.DOMAIN
        # Fail closed: without an answer of the ZAP handler, a handshake fails.
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.secret.encode()

    @property
    def address(self) -> str:
        """Address that this socket listens on, with the port that the system has chosen."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def allow(self, public_keys: frozenset[str], connections: Mapping[str, int]) -> None:
        """Replace the allowed clients; connections of all others end.

        `connections` are the limits of keys, by default `PER_KEY`.
        """
        with self._lock:
            self._access.allow(public_keys, connections)

    def take_rejections(self) -> dict[str, int]:
        """Connections and messages rejected since the last call, by reason."""
        if not self._access.rejected:
            return {}
        with self._lock:
            counted, self._access.rejected = self._access.rejected, Counter()
        return dict(counted)

    def poll(self, timeout_s: float | None) -> Iterator[Request]:
        """Messages as (peer, frames), waiting at most `timeout_s` or until `wake` for the first.

        They are received one by one, so that each may be answered before the next is received; at
        most as many as may wait for one client.
        """
        self._await(timeout_s)
        if not self._unsure:
            return
        for _ in range(HIGH_WATER_MARK):
            with self._lock:
                request = self._receive()
            if request is not None:
                yield request
            # Check after yielding: a reply sent meanwhile resets the edge-triggered events.
            with self._lock:
                if not self._has_more():
                    return

    def was_woken(self) -> bool:
        """Tell whether a `poll` since the last call timed out or ended without messages.

        That is `wake`, or a connection that came, ended or was refused. For the thread that polls.
        """
        woken, self._woken = self._woken, False
        return woken

    def _await(self, timeout_s: float | None) -> None:
        with self._lock:
            # First, so that hosts are unblocked in time on a busy socket too.
            timeout_s = self._access.unblock(timeout_s)
            if self._unsure and self._has_more():
                timeout_s = 0.0
            self._waiting = True
        events = self._epoll.poll(timeout_s)
        with self._lock:
            self._waiting = False
            if self._crowded:
                self._handle_connections()
            for number, _ in events:
                if handle := self._handlers.get(number):
                    handle()
                    self._woken = True
                else:
                    self._unsure = True
            self._woken |= not events and not self._unsure

    def _has_more(self) -> bool:
        """Tell whether a message waits; if none does, the descriptor announces the next one."""
        self._unsure = bool(zmq.zmq_poll(self._poll_items, 0))
        return self._unsure

    def _receive(self) -> Request | None:
        """The next message; None without one, or for a rejected one."""
        try:
            route = self._router.recv(NOBLOCK)
        except zmq.Again:
            return None
        # At least one more frame follows: the ROUTER prepends the route.
        frames = receive(self._router)
        # Of the last frame: the prepended one has no metadata.
        last: Any = frames[-1]
        if self._access.allowed is None:
            peer = Peer(route, route.hex())
        else:
            client, source = last.get("User-Id"), last.get(_SOURCE)
            if not self._access.accepts(client, source):
                return None
            peer = Peer(route, client, self._access.connections.address_of(source))
        # Copying a small frame is cheaper than keeping it.
        return peer, [
            frame.bytes if len(frame) < _SMALL_BYTES else frame.buffer for frame in frames
        ]

    def _clear_wake(self) -> None:
        self._wakee.recv(4096)

    def _answer_zap(self) -> None:
        """Answer libzmq's ZAP requests; there is one at a time per connection."""
        # First, while the connections of rejected peers are known.
        self._handle_connections()
        while frames := receive(self._zap):
            self._zap.send_multipart(self._access.authenticate([frame.bytes for frame in frames]))

    def _handle_connections(self, at_once: int | None = WATCHED_AT_ONCE) -> None:
        """Handle connection events, at most `at_once` of them; all of them for None."""
        self._crowded = False
        for _ in repeat(None) if at_once is None else range(at_once):
            frames = receive(self._monitor)
            if not frames:
                return
            event, number = monitor_event(frames)
            if event == zmq.Event.DISCONNECTED:
                self._access.on_close(number)
            elif event == zmq.Event.LISTENING:
                self._access.listener = socket.socket(fileno=os.dup(number))
            elif peer := peer_of(number):
                self._access.on_open(peer)
        # There may be more, which the descriptor does not announce again.
        self._crowded = True
        self.wake()

    def send(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Send a reply to the peer at `route`; False if it has disconnected or does not read.

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
            # Sending, also in vain, consumes the descriptor's event for an arrived message, which
            # the polling thread then would miss.
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

    def has_delivered(self) -> bool:
        """Tell whether the peers' kernels have all that libzmq has written."""
        with self._lock:
            return all(map(is_delivered, self._access.connections.all))

    def close(self) -> None:
        """Close the socket; replies already handed over have `LINGER_S` to arrive."""
        until_s = time.monotonic() + LINGER_S
        with self._lock:
            if not self._finalizer.alive:
                return
            self._handle_connections(at_once=None)
            # Not unbound first: that drops replies that libzmq has not written. libzmq closes a
            # connection once it has written, which may be before the reply has arrived.
            peers = list(filter(None, map(duplicate_socket, self._access.connections.all)))
            if self._access.listener is not None:
                self._access.listener.close()
            self._router.disable_monitor()
            self._router.close(linger=int(LINGER_S * 1000))
            self._finalizer()
        linger(peers, until_s)


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
