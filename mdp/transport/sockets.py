"""Limits, heartbeats, sending and receiving of both sides' sockets."""

import math
import os
import select
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import Any

import zmq

from mdp.errors import ConfigError
from mdp.protocol.messages import Buffer

#: Messages that may wait in one direction of one connection.
HIGH_WATER_MARK = 64
#: ZeroMQ's heartbeats detect a frozen or unplugged peer on an idle connection.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
#: The longest handshake.
HANDSHAKE_MS = 5000
#: More than CURVE adds to a frame: command name, nonce, flags and seal, 33 bytes in all.
SEAL_BYTES = 64
#: Frames of this size and more are sent without a copy; below, copying is cheaper than tracking
#: (three crops of 150 kB: 1.5 ms a call with tracking, 1.2 ms with copies).
ZERO_COPY_BYTES = 512 * 1024

#: Descriptors from here on are too large for `select` (Linux's FD_SETSIZE).
_SELECTABLE = 1024

# Plain integers: pyzmq's enumerations cost a microsecond at each use.
NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE)
# Freeing a mapped block has glibc keep memory up to its size (mallopt(3), M_MMAP_THRESHOLD); else
# the pages of every crop are mapped, cleared and unmapped anew: a tenth of a call's computing.
bytes(8 * 2**20)
#: Bypasses the Python wrapper of `Socket.send`, which takes a microsecond.
_send: Any = zmq.backend.Socket.send


def new_pair() -> tuple[str, str]:
    """A new CURVE key pair, public and secret, each 40 characters of Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_key_of(secret: str) -> str:
    """The public key of `secret`; raises ValueError if that is no key."""
    try:
        return zmq.curve_public(secret.encode()).decode()
    except zmq.ZMQError as error:
        raise ValueError(f"no CURVE key: {error}") from error


def configure(zmq_socket: "zmq.Socket[bytes]", address: str, max_frame_bytes: int) -> None:
    """Set the limits that hold on both sides, before the socket is bound or connected."""
    zmq_socket.ipv6 = "[" in address
    zmq_socket.linger = 0
    zmq_socket.sndhwm = zmq_socket.rcvhwm = HIGH_WATER_MARK
    # A larger frame ends the connection before memory is allocated for it.
    zmq_socket.maxmsgsize = max_frame_bytes + SEAL_BYTES
    zmq_socket.handshake_ivl = HANDSHAKE_MS
    zmq_socket.heartbeat_ivl = HEARTBEAT_MS
    zmq_socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS


#: A monitor's first frame (zmq_socket_monitor(3)): event and value. pyzmq's own parser brings in
#: asyncio, a seventh of the client's import.
_EVENT = struct.Struct("=Hi")


def monitor_event(frames: Sequence[zmq.Frame]) -> tuple[int, int]:
    """The event that a monitor reports, and its value: a descriptor or an error's number."""
    event, value = _EVENT.unpack(frames[0].bytes)
    return event, value


#: Names of monitors within this process.
_MONITORS = count()


def monitor_of(zmq_socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """A socket that receives `events` of another one, without a bound.

    At a bound, libzmq's only I/O thread would wait for a reader.
    """
    address = f"inproc://monitor-{next(_MONITORS)}"
    monitor: zmq.Socket[bytes] = zmq_socket.context.socket(zmq.PAIR)
    monitor.linger = monitor.rcvhwm = 0
    try:
        zmq_socket.monitor(address, events)
    except zmq.ZMQError:
        monitor.close()
        raise
    monitor.connect(address)
    return monitor


def _renew() -> None:
    global _process
    _process = object()


_process = object()
os.register_at_fork(after_in_child=_renew)


def this_process() -> object:
    """Identity of this process, another one in a forked child; `os.getpid` is a system call."""
    return _process


def end(
    context: "zmq.Context[zmq.Socket[bytes]]",
    sockets: Collection["zmq.Socket[bytes]"],
    process: object,
) -> None:
    """Close `sockets` and their context, only in the process that has made them."""
    if process is not _process or context.closed:
        return
    for zmq_socket in sockets:
        # Before the monitor's reader closes, for which libzmq's thread would wait.
        if zmq_socket.type in (zmq.DEALER, zmq.ROUTER) and not zmq_socket.closed:
            zmq_socket.disable_monitor()
    for zmq_socket in sockets:
        zmq_socket.close(linger=0)
    context.term()


def require_descriptors(number: int) -> None:
    """Raise ConfigError unless this process can open `number` more descriptors."""
    opened = []
    try:
        for _ in range(number):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}: expected {number} free file descriptors, found {len(opened)} "
            "(`ulimit -n` allows more)"
        ) from error
    finally:
        for descriptor_number in opened:
            os.close(descriptor_number)


def send(zmq_socket: "zmq.Socket[bytes]", frames: Sequence[Buffer]) -> None:
    """Send `frames` without waiting, or raise zmq.Again. Only the last one may be large."""
    *others, last = frames
    for frame in others:
        _send(zmq_socket, frame, NOBLOCK | _MORE)
    _send(zmq_socket, last, NOBLOCK, len(last) < ZERO_COPY_BYTES)


def descriptor(zmq_socket: "zmq.Socket[bytes]") -> int:
    """The edge-triggered descriptor; see `readable`."""
    return int(zmq_socket.getsockopt(zmq.FD))


def readable(sockets: Iterable["zmq.Socket[bytes]"]) -> list["zmq.Socket[bytes]"]:
    """Those of `sockets` with a message; a call for all takes as long as for one."""
    ready: list[tuple[Any, int]] = zmq.zmq_poll([(one, POLLIN) for one in sockets], 0)
    return [one for one, _ in ready]


def receive(zmq_socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """The frames of the next message; empty without one."""
    # Frames have `more`; with copies, it is a socket option to be read each time.
    try:
        frames = [zmq_socket.recv(NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while frames[-1].more:
        frames.append(zmq_socket.recv(NOBLOCK, copy=False))
    return frames


def poll_within(epoll: select.epoll, timeout_s: float | None) -> list[tuple[int, int]]:
    """Events of `epoll`, waiting at most `timeout_s` (None: for ever) with fine resolution.

    `epoll` waits in whole milliseconds, rounded up: 0.65 ms late at p50 and 1.1 at p90, on an idle
    machine. Here `select` waits for the rest of the last one: 0.17 and 0.22 ms late.
    """
    if timeout_s is None or timeout_s <= 0:
        return epoll.poll(timeout_s)
    until_s = time.monotonic() + timeout_s
    # Half a millisecond less, as a float may be just above a whole one.
    whole_s = (math.floor(timeout_s * 1e3) - 0.5) / 1e3
    if events := epoll.poll(max(0.0, whole_s)):
        return events
    rest_s = until_s - time.monotonic()
    if rest_s <= 0:
        return []
    if epoll.fileno() >= _SELECTABLE:
        return epoll.poll(rest_s)
    select.select([epoll], [], [], rest_s)
    return epoll.poll(0)
