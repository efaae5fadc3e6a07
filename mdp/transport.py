"""Frames over ZeroMQ: the client's DEALERs and the agent's ROUTER. The only file that imports zmq.

A client keeps one DEALER per agent, so that one slow peer never blocks another. ZeroMQ reconnects
by itself; a socket monitor tells when a connection is really up (its handshake has succeeded) or
gone, and nothing is queued for a peer that is not there.
"""

import contextlib
import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from mdp.errors import AgentError, ConfigError
from mdp.wire import MAX_BUFFER_BYTES, Buffer

#: Messages that may wait in one direction of one connection.
HIGH_WATER_MARK = 64
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
#: ZeroMQ's own heartbeats notice a peer that is frozen or unplugged, without any traffic of ours.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
#: Frames of this size and more are handed over without a copy; below, copying is cheaper.
ZERO_COPY_BYTES = 64 * 1024

_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


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
        self._context = zmq.Context()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._owners: dict[zmq.Socket[bytes], str] = {}
        self._poller = zmq.Poller()
        self._async_poller: zmq.asyncio.Poller | None = None
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
        for readable in (monitor, dealer):
            self._owners[readable] = device
            self._poller.register(readable, zmq.POLLIN)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"device {device!r}: cannot connect to {address}: {error}") from error

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if it is not connected or its queue is full."""
        try:
            _send(self._dealers[device], frames)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        """What has happened, waiting at most `timeout_s` (None: until something does)."""
        ready = self._poller.poll(_milliseconds(timeout_s))
        return self._collect([readable for readable, _ in ready])

    async def poll_async(self) -> list[TransportEvent]:
        """What has happened, waiting until something does."""
        if self._async_poller is None:
            self._async_poller = zmq.asyncio.Poller()
            for readable in self._owners:
                self._async_poller.register(readable, zmq.POLLIN)
        await self._async_poller.poll()
        return self.poll(0)

    def _collect(self, ready: Sequence[Any]) -> list[TransportEvent]:
        received: list[TransportEvent] = []
        changes: list[TransportEvent] = []
        for readable in ready:
            device = self._owners[readable]
            if readable is self._monitors[device]:
                changes += self._changes(device, readable)
            else:
                received += [Received(device, frames) for frames in _receive_all(readable)]
        # A lost connection comes last: what it still delivered counts.
        return received + changes

    def _changes(self, device: str, monitor: "zmq.Socket[bytes]") -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        for frames in _receive_all(monitor):
            event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED and device not in self.connected:
                self.connected.add(device)
                changes.append(Connected(device))
            elif event == zmq.Event.DISCONNECTED and device in self.connected:
                self.connected.remove(device)
                changes.append(Disconnected(device))
        return changes

    def close(self) -> None:
        """Close every socket; what was still on its way is dropped."""
        for device, dealer in self._dealers.items():
            if device in self._monitors:
                dealer.disable_monitor()
                self._monitors[device].close(linger=0)
            dealer.close(linger=0)
        self._context.term()


class Router:
    """The agent's socket; one thread polls and sends, any thread may `wake` it."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        try:
            _configure(self._router, address)
            self._router.router_mandatory = True
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
            raise AgentError(f"cannot listen on {address}: {reason}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakee, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where this socket listens, with the port that was really given."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def poll(self, timeout_s: float | None) -> list[tuple[bytes, Sequence[Buffer]]]:
        """Messages as (peer, frames), waiting at most `timeout_s` or until `wake`."""
        ready = dict(self._poller.poll(_milliseconds(timeout_s)))
        if self._wakee.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wakee.recv(4096)
        if self._router not in ready:
            return []
        return [(bytes(frames[0]), frames[1:]) for frames in _receive_all(self._router)]

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Hand a reply over for `peer`; False if it has gone or does not read."""
        try:
            _send(self._router, [peer, *frames])
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def wake(self) -> None:
        """End the current or next `poll` at once. Safe from any thread and in a signal handler."""
        # A full pipe means that a wake-up is waiting already.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the socket; replies already handed over have a moment to leave."""
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
    zmq_socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def _receive_all(zmq_socket: "zmq.Socket[bytes]") -> list[Sequence[Buffer]]:
    """Every message that is there now, large frames as views of ZeroMQ's own memory."""
    messages: list[Sequence[Buffer]] = []
    while int(zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN and len(messages) < HIGH_WATER_MARK:
        frames = zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
        messages.append([frame.buffer for frame in frames])
    return messages
