"""Frames over ZeroMQ: the client's DEALERs and the agent's ROUTER. The only file that imports zmq.

A client keeps one DEALER per agent, so that one slow peer never blocks another. ZeroMQ reconnects
by itself; a socket monitor tells when a connection is really up (its handshake has succeeded) or
gone, and nothing is queued for a peer that is not there.
"""

import contextlib
import errno
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from mdp.errors import AgentError, ConfigError, InputError
from mdp.wire import MAX_BUFFER_BYTES, Buffer

#: Messages that may wait in one direction of one connection.
HIGH_WATER_MARK = 64
#: Replies that may wait for one client; they are small, and one more would be lost.
REPLIES_HIGH_WATER_MARK = 1024
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
#: ZeroMQ's own heartbeats notice a peer that is frozen or unplugged, without any traffic of ours.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
#: Frames of this size and more travel without a copy; below, copying is cheaper than tracking when
#: the last user is done (three crops of 150 kB: 1.5 ms a call with tracking, 1.2 ms with copies).
ZERO_COPY_BYTES = 512 * 1024

# Plain integers: pyzmq's enumerations cost a microsecond at each use.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_BROKEN = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | _BROKEN


@dataclass(frozen=True, slots=True)
class Received:
    """A device sent a message."""

    device: str
    frames: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to a device is up."""

    device: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to a device is gone; what was on its way is lost."""

    device: str


TransportEvent = Received | Connected | Disconnected


class Dealers:
    """The client's connections, one per device; to be used by one thread at a time."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.connected: set[str] = set()
        self._addresses = dict(addresses)
        #: When to dial again, for devices whose connection broke: ZeroMQ reconnects by itself after
        #: a loss, but never after it has read bytes that no ZeroMQ peer would send.
        self._redial_s: dict[str, float] = {}
        self._context = zmq.Context()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        #: Waits on the sockets' file descriptors, which costs the same for one device and for many.
        self._selector = selectors.DefaultSelector()
        #: Sockets whose descriptor may stay quiet although something has come.
        self._unsure: set[tuple[str, zmq.Socket[bytes]]] = set()
        try:
            for device, address in addresses.items():
                self._open(device, address)
        except BaseException:
            self.close()
            raise

    def _open(self, device: str, address: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        self._dealers[device] = dealer
        _configure(dealer, address)
        dealer.immediate = True
        dealer.reconnect_ivl = RECONNECT_MS
        dealer.reconnect_ivl_max = RECONNECT_MAX_MS
        monitor = dealer.get_monitor_socket(_WATCHED)
        monitor.linger = 0
        self._monitors[device] = monitor
        for readable in (dealer, monitor):
            owned = (device, readable)
            self._selector.register(_descriptor(readable), selectors.EVENT_READ, owned)
            self._unsure.add(owned)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"device {device!r}: cannot connect to {address}: {error}") from error

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, for event loops."""
        return int(self._selector.fileno())

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if it is not connected or its queue is full."""
        dealer = self._dealers[device]
        # Sending takes in what ZeroMQ has to tell, and with it perhaps a message's arrival.
        self._unsure.add((device, dealer))
        try:
            _send(dealer, frames)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        """What has happened, waiting at most `timeout_s` (None: until something does)."""
        if self._context.closed:
            raise InputError("this client is closed")
        unsure, self._unsure = self._unsure, set()
        events = self._collect(unsure)
        if not events:
            events = self._collect(key.data for key, _ in self._selector.select(timeout_s))
        if self._redial_s:
            self._redial()
        return events

    def _collect(self, sockets: Iterable[tuple[str, "zmq.Socket[bytes]"]]) -> list[TransportEvent]:
        received: list[TransportEvent] = []
        changes: list[TransportEvent] = []
        for device, readable in sockets:
            if readable is self._monitors[device]:
                changes += self._changes(device)
            # Also after its monitor: what a lost connection still delivered counts.
            messages = self._messages(device, self._dealers[device])
            received += [Received(device, frames) for frames in messages]
        return received + changes

    def _messages(self, device: str, readable: "zmq.Socket[bytes]") -> list[Any]:
        messages = _receive_all(readable, copy=True)
        if len(messages) == HIGH_WATER_MARK:
            self._unsure.add((device, readable))
        return messages

    def _changes(self, device: str) -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        for frames in self._messages(device, self._monitors[device]):
            event = parse_monitor_message(frames)["event"]
            if event & _BROKEN:
                self._redial_s[device] = time.monotonic() + RECONNECT_MAX_MS / 1e3
            else:
                self._redial_s.pop(device, None)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED and device not in self.connected:
                self.connected.add(device)
                changes.append(Connected(device))
            elif event == zmq.Event.DISCONNECTED and device in self.connected:
                self.connected.remove(device)
                changes.append(Disconnected(device))
        return changes

    def _redial(self) -> None:
        now_s = time.monotonic()
        for device in [device for device, at_s in self._redial_s.items() if at_s <= now_s]:
            del self._redial_s[device]
            dealer, address = self._dealers[device], self._addresses[device]
            # Where ZeroMQ has given up there is nothing left to disconnect.
            with contextlib.suppress(zmq.ZMQError):
                dealer.disconnect(address)
            dealer.connect(address)
            self._unsure.add((device, dealer))

    def close(self) -> None:
        """Close every socket; what was still on its way is dropped."""
        if self._context.closed:
            return
        self._selector.close()
        for device, dealer in self._dealers.items():
            if device in self._monitors:
                dealer.disable_monitor()
                self._monitors[device].close(linger=0)
            dealer.close(linger=0)
        self._context.term()


class Router:
    """The agent's socket: one thread polls, any thread may send, so that no reply changes hands.

    A ZeroMQ socket may be used by several threads if they take turns: every use is under one lock,
    and waiting happens outside of it, on the socket's file descriptor.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._lock = threading.Lock()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        try:
            _configure(self._router, address)
            self._router.router_mandatory = True
            self._router.sndhwm = REPLIES_HIGH_WATER_MARK
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
            raise AgentError(f"cannot listen on {address}: {reason}") from error
        self._poller = select.poll()
        self._poller.register(_descriptor(self._router), select.POLLIN)
        self._poller.register(self._wakee, select.POLLIN)

    @property
    def address(self) -> str:
        """Where this socket listens, with the port that was really given."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def poll(self, timeout_s: float | None) -> list[tuple[bytes, Sequence[Buffer]]]:
        """Messages as (peer, frames), waiting at most `timeout_s` or until `wake`."""
        if messages := self._receive():
            return messages
        # The descriptor only tells of changes, hence the look at what is there before and after.
        ready = self._poller.poll(_milliseconds(timeout_s))
        if any(descriptor == self._wakee.fileno() for descriptor, _ in ready):
            self._wakee.recv(4096)
        return self._receive()

    def _receive(self) -> list[tuple[bytes, Sequence[Buffer]]]:
        with self._lock:
            messages = _receive_all(self._router, copy=False)
        return [(bytes(frames[0]), frames[1:]) for frames in messages]

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Hand a reply over for `peer`; False if it has gone or does not read. Any thread."""
        with self._lock:
            try:
                _send(self._router, [peer, *frames])
                sent = True
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise
                sent = False
            # Sending, in vain as well, takes in what ZeroMQ has to tell, and with it perhaps a
            # message's arrival.
            arrived = _readable(self._router)
        if arrived:
            self.wake()
        return sent

    def wake(self) -> None:
        """End the current or next `poll` at once. Safe from any thread and in a signal handler."""
        # A full pipe means that a wake-up is waiting already.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the socket; replies already handed over have a moment to leave."""
        with self._lock:
            self._router.close(linger=200)
        self._waker.close()
        self._wakee.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _configure(zmq_socket: "zmq.Socket[bytes]", address: str) -> None:
    zmq_socket.ipv6 = "[" in address
    zmq_socket.linger = 0
    zmq_socket.sndhwm = zmq_socket.rcvhwm = HIGH_WATER_MARK
    # A larger frame ends the connection before memory is taken for it.
    zmq_socket.maxmsgsize = MAX_BUFFER_BYTES
    zmq_socket.heartbeat_ivl = HEARTBEAT_MS
    zmq_socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS


def _milliseconds(timeout_s: float | None) -> int | None:
    # Rounded up: a poll that ends a moment early would only be repeated.
    return None if timeout_s is None else max(0, -int(-timeout_s * 1000 // 1))


def _send(zmq_socket: "zmq.Socket[bytes]", frames: Sequence[Buffer]) -> None:
    large = any(len(frame) >= ZERO_COPY_BYTES for frame in frames)
    zmq_socket.send_multipart(frames, _NOBLOCK, copy=not large)


def _descriptor(zmq_socket: "zmq.Socket[bytes]") -> int:
    return int(zmq_socket.getsockopt(zmq.FD))


def _readable(zmq_socket: "zmq.Socket[bytes]") -> bool:
    return bool(zmq_socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]


def _receive_all(zmq_socket: "zmq.Socket[bytes]", *, copy: bool) -> list[Any]:
    """Every message that is there now; without `copy`, frames are views of ZeroMQ's own memory."""
    messages: list[Any] = []
    while _readable(zmq_socket) and len(messages) < HIGH_WATER_MARK:
        frames: list[Any] = zmq_socket.recv_multipart(_NOBLOCK, copy=copy)
        messages.append(frames if copy else [frame.buffer for frame in frames])
    return messages
