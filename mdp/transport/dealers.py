"""The client's DEALERs, one per agent, and the diagnosis of agents without a connection.

A socket monitor reports when a connection is up (its handshake has succeeded) or has ended, and
requests are sent only while it is up. Between polls, ZeroMQ reconnects by itself. `poll` replaces
the socket of an ended connection once its received messages are read, so that requests left in it
are not sent to a restarted agent. ZMQ_IMMEDIATE would drop these too, but also unread replies.
After a failed handshake only `poll` dials.
"""

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import zmq

from mdp.errors import ConfigError, InputError
from mdp.protocol.messages import MAX_BUFFER_BYTES, Buffer
from mdp.transport import zap
from mdp.transport.dealer import FAILED, RECONNECT_MAX_MS, RECONNECT_MS, Dealer, open_dealer
from mdp.transport.events import ClientKeys, Connected, Disconnected, Received, TransportEvent
from mdp.transport.greeting import PROBE, mechanism_of
from mdp.transport.names import Names, has_address
from mdp.transport.outage import NO_MORE, NOT_ACCEPTED, REASONS, UNASKED, Outage
from mdp.transport.sockets import (
    HIGH_WATER_MARK,
    descriptor,
    end,
    monitor_event,
    poll_within,
    readable,
    receive,
    require_descriptors,
    send,
    this_process,
)

#: A shorter connection is redialled after RECONNECT_MAX_MS: an agent that always disconnects would
#: be dialled ten times a second.
BRIEF_S = 1.0
#: A monitor with more events is not read to its end: the connection, which has flapped while the
#: client was idle, is replaced.
MOST_EVENTS = 256
#: A connection with so many messages more than requests is closed for so long.
MOST_UNASKED, UNASKED_S = 256, 10.0
#: Time between two lookups of a name without an address.
LOOKUP_S = 0.02
#: Descriptors of a context, this client's epoll and what wakes it; those of a device: its DEALER,
#: both ends of the monitor, the connection.
CONTEXT_DESCRIPTORS, DEVICE_DESCRIPTORS = 7, 4
#: Consecutive failed handshakes before a diagnosis: a single one may be a stopped agent.
CERTAIN_FAILURES = 2
#: A reason that is not confirmed for so long after dialling expires.
DOUBT_S = 3.0

CLOSED = "this client is closed"
FORKED = "this client was made in another process: expected one that is made after the fork"


class Dealers:
    """The client's connections, one per device; to be used by one thread at a time."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        keys: ClientKeys | None = None,
        max_frame_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        """Dial `addresses`, encrypted where `keys` has the agent's key; raises ConfigError."""
        self.connected: set[str] = set()
        #: Reachable devices that refuse this client, with the reason.
        self.refused: dict[str, str] = {}
        self._addresses = dict(addresses)
        self._keys = keys
        self._max_frame_bytes = max_frame_bytes
        self._names = Names()
        self._outages: dict[str, Outage] = {}
        self._dealers: dict[str, Dealer] = {}
        #: By descriptor: the device and its dealer, monitor or probe.
        self._owned: dict[int, tuple[str, zmq.Socket[bytes]]] = {}
        self._sockets: set[zmq.Socket[bytes]] = set()
        #: Sockets that may hold a message without an event of their descriptor, and their devices.
        self._unsure: dict[zmq.Socket[bytes], str] = {}
        #: Events found by a failed send, for the next `poll`.
        self._early: list[TransportEvent] = []
        self._process = this_process()
        # With too few, libzmq ends the process.
        require_descriptors(CONTEXT_DESCRIPTORS + DEVICE_DESCRIPTORS * len(addresses))
        #: Waits on the sockets' descriptors, at the same cost for one and for many devices.
        self._epoll = select.epoll()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Guards the waker, which another thread may use as it is closed.
        self._waking = threading.Lock()
        self._close_waker = weakref.finalize(self, os.close, self._waker)
        self._close_waker.atexit = False
        self._epoll.register(self._waker, select.EPOLLIN)
        self._context = zmq.Context()
        #: For a client that is not closed: pyzmq's destructor of a context waits for ever for
        #: sockets that were collected before it.
        self._end = weakref.finalize(self, end, self._context, self._sockets, self._process)
        self._end.atexit = False
        try:
            for device in addresses:
                self._dial(device)
        except zmq.ZMQError as error:
            self.close()
            text = f"device {device!r}: cannot connect to {addresses[device]}: {error}"
            raise ConfigError(text) from error
        except BaseException:
            self.close()
            raise

    def _dial(self, device: str) -> None:
        """Connect with a new socket, unless the host's name has no address; raises ZMQError."""
        self._shut(device)
        named = self._addresses[device]
        address = self._names.resolve(named)
        if not has_address(named):
            # Also for a resolved name, whose address may change.
            outage = self._outages.setdefault(device, Outage())
            wait_s = LOOKUP_S if address is None else RECONNECT_MAX_MS / 1e3
            outage.lookup_s = time.monotonic() + wait_s
        if address is not None:
            self._open(device, address)

    def _open(self, device: str, address: str) -> None:
        outage = self._outages.get(device)
        failures = 0 if outage is None else outage.failures
        dealer = open_dealer(
            self._context, device, address, self._keys, failures, self._max_frame_bytes
        )
        self._dealers[device] = dealer
        self._listen(device, dealer.socket)
        self._listen(device, dealer.monitor)
        dealer.socket.connect(address)

    def _shut(self, device: str) -> None:
        """Close the sockets of `device`, with what they hold."""
        dealer = self._dealers.pop(device, None)
        if dealer is not None:
            # Before the monitor's reader closes, for which libzmq's thread would wait.
            dealer.socket.disable_monitor()
            self._close(dealer.socket)
            self._close(dealer.monitor)

    def _listen(self, device: str, owned: "zmq.Socket[bytes]") -> None:
        number = descriptor(owned)
        self._epoll.register(number, select.EPOLLIN)
        self._owned[number] = device, owned
        self._sockets.add(owned)
        self._unsure[owned] = device

    def _close(self, owned: "zmq.Socket[bytes]") -> None:
        number = descriptor(owned)
        if self._owned.pop(number, None) is not None:
            self._epoll.unregister(number)
        self._unsure.pop(owned, None)
        self._sockets.discard(owned)
        owned.close(linger=0)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, for event loops."""
        return self._epoll.fileno()

    @property
    def may_have_more(self) -> bool:
        """Tell whether `poll` may have more, without an event of the descriptor."""
        return bool(self._unsure or self._early)

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Send `frames` to `device`; False if it is not connected or its queue is full."""
        if device not in self.connected:
            self._check(device)
            if device not in self.connected:
                return False
        dealer = self._dealers[device]
        # Sending consumes the descriptor's event for an arrived message.
        self._unsure[dealer.socket] = device
        try:
            send(dealer.socket, frames)
        except zmq.Again:
            # The queue is full; the connection may have ended.
            self._check(device)
            return False
        dealer.unasked -= 1
        return True

    def _check(self, device: str) -> None:
        """Handle changes of the connection to `device`."""
        if dealer := self._dealers.get(device):
            self._early += self._collect([(device, dealer.monitor)])

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        """Events, waiting at most `timeout_s` (None: for ever) for the first.

        May return early without any, when agents have to be redialled. Receives of each device at
        most as much as may wait; see `may_have_more`.
        """
        if self._process is not this_process():
            raise InputError(FORKED)
        if self._context.closed:
            raise InputError(CLOSED)
        events, self._early = self._early, []
        ready: list[tuple[str, zmq.Socket[bytes]]] = []
        if self._unsure:
            unsure, self._unsure = self._unsure, {}
            ready = [(unsure[owned], owned) for owned in readable(unsure)]
        if events or ready:
            timeout_s = 0.0
        elif self._outages:
            timeout_s = self._until_redial_s(timeout_s)
        # Also where something is ready, so that a flooding device does not starve the others.
        for number, _ in poll_within(self._epoll, timeout_s):
            if number == self._waker:
                os.eventfd_read(number)
            else:
                ready.append(self._owned[number])
        if ready:
            events += self._collect(ready)
        if self._outages:
            self._redial()
        return events

    def _collect(self, ready: Iterable[tuple[str, "zmq.Socket[bytes]"]]) -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        sockets = {}
        for device, owned in ready:
            dealer = self._dealers.get(device)
            if dealer is not None and owned is dealer.monitor:
                changes += self._changes(device, dealer)
            elif dealer is None or owned is not dealer.socket:
                self._read_greeting(device, owned)
            if dealer is not None:
                # Also after its monitor: a lost connection's last messages count.
                sockets[dealer.socket] = device
        events = self._messages(sockets) + changes
        if changes:
            for device in {change.device for change in changes} - self.connected:
                self._shut(device)
        for device in sockets.values():
            dealer = self._dealers.get(device)
            if dealer is not None and dealer.unasked >= MOST_UNASKED:
                events += self._cut(device)
        return events

    def _messages(self, sockets: dict["zmq.Socket[bytes]", str]) -> list[TransportEvent]:
        """Messages of `sockets`, of each at most as many as may wait."""
        received: list[TransportEvent] = []
        waiting = list(sockets)
        for _ in range(HIGH_WATER_MARK):
            for owned in waiting:
                if frames := receive(owned):
                    device = sockets[owned]
                    self._dealers[device].unasked += 1
                    received.append(Received(device, [frame.bytes for frame in frames]))
            waiting = readable(waiting)
            if not waiting:
                break
        for owned in waiting:
            self._unsure[owned] = sockets[owned]
        return received

    def _changes(self, device: str, dealer: Dealer) -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        for _ in range(MOST_EVENTS):
            frames = receive(dealer.monitor)
            if not frames:
                return changes
            event, value = monitor_event(frames)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._present(device)
                dealer.up_s, dealer.unasked = time.monotonic(), 0
                if device not in self.connected:
                    self.connected.add(device)
                    changes.append(Connected(device))
                continue
            self._absent(device, dealer, event, value)
            if event == zmq.Event.DISCONNECTED:
                changes += self._mark_lost(device)
        dealer.up_s = time.monotonic()
        self._absent(device, dealer, zmq.Event.DISCONNECTED)
        return changes + self._mark_lost(device)

    def _mark_lost(self, device: str) -> list[TransportEvent]:
        if device not in self.connected:
            return []
        self.connected.remove(device)
        return [Disconnected(device)]

    def _cut(self, device: str) -> list[TransportEvent]:
        """End the connection of an agent that sends far more messages than requested."""
        self._shut(device)
        outage = self._outages.setdefault(device, Outage())
        outage.redial_s = time.monotonic() + UNASKED_S
        self.refused[device] = UNASKED
        return self._mark_lost(device)

    def _present(self, device: str) -> None:
        self.refused.pop(device, None)
        self._end_probe(self._outages.pop(device, None))

    def _absent(self, device: str, dealer: Dealer, event: int, value: int = 0) -> None:
        """A connection has ended, or could not be made."""
        now_s, outage = time.monotonic(), self._outages.setdefault(device, Outage())
        outage.failures += bool(event & FAILED)
        sure = outage.failures >= CERTAIN_FAILURES
        wait_ms = RECONNECT_MS if outage.failures and not sure else RECONNECT_MAX_MS
        if dealer.up_s <= now_s - BRIEF_S:
            wait_ms = 0
        dealer.up_s = math.inf
        outage.redial_s = now_s + wait_ms / 1e3
        if event & FAILED:
            outage.doubt_s = math.inf
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.refused[device] = NO_MORE if value == int(zap.FULL) else NOT_ACCEPTED
        elif event & FAILED and sure and outage.probe is None:
            self._probe(device, outage)

    def _probe(self, device: str, outage: Outage) -> None:
        """Find out whether an agent that ends each handshake is encrypted."""
        address = self._dealers[device].address
        outage.probe, outage.greeting = self._context.socket(zmq.STREAM), b""
        outage.probe.linger = 0
        outage.probe.ipv6 = "[" in address
        outage.probe.connect(address)
        self._listen(device, outage.probe)

    def _read_greeting(self, device: str, probe: "zmq.Socket[bytes]") -> None:
        outage = self._outages.get(device)
        if outage is None or outage.probe is not probe:
            return
        while frames := receive(probe):
            peer, data = (frame.bytes for frame in frames)
            outage.greeting += data
            mechanism = mechanism_of(outage.greeting)
            if data and mechanism is not None:
                encrypted = self._keys is not None and device in self._keys.agents
                reason = REASONS.get((mechanism, encrypted))
                if reason is not None:
                    self.refused[device] = reason
                self._end_probe(outage)
                return
            if not data and not outage.greeting:
                # The connection was made or has ended.
                with contextlib.suppress(zmq.ZMQError):
                    probe.send_multipart([peer, PROBE], zmq.NOBLOCK)

    def _end_probe(self, outage: Outage | None) -> None:
        if outage is not None and outage.probe is not None:
            self._close(outage.probe)
            outage.probe = None

    def _until_redial_s(self, timeout_s: float | None) -> float | None:
        due_s = min(min(a.redial_s, a.lookup_s, a.doubt_s) for a in self._outages.values())
        if due_s == math.inf:
            return timeout_s
        left_s = max(0.0, due_s - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _redial(self) -> None:
        now_s = time.monotonic()
        for device, outage in self._outages.items():
            if outage.doubt_s <= now_s:
                self.refused.pop(device, None)
                outage.doubt_s = math.inf
            if outage.lookup_s <= now_s:
                self._look_up(device, outage, now_s)
            if outage.redial_s > now_s:
                continue
            outage.redial_s, outage.doubt_s = math.inf, now_s + DOUBT_S
            self._end_probe(outage)
            # Out of descriptors or memory, perhaps not for long.
            try:
                self._dial(device)
            except zmq.ZMQError:
                outage.redial_s = now_s + RECONNECT_MAX_MS / 1e3

    def _look_up(self, device: str, outage: Outage, now_s: float) -> None:
        """Dial if its host's name has a new address."""
        dealer = self._dealers.get(device)
        address = self._names.resolve(self._addresses[device])
        wait_s = LOOKUP_S if address is None else RECONNECT_MAX_MS / 1e3
        outage.lookup_s = now_s + wait_s
        if (
            address is not None
            and outage.redial_s == math.inf
            and (dealer is None or dealer.address != address)
        ):
            outage.redial_s = now_s

    def wake(self) -> None:
        """Have the thread that waits in `poll`, or the next one, return at once. Any thread."""
        with self._waking:
            if self._process is this_process() and not self._epoll.closed:
                os.eventfd_write(self._waker, 1)

    @property
    def closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._context.closed

    def close(self) -> None:
        """Close every socket; unsent messages are dropped."""
        if self._process is this_process() and not self._context.closed:
            with self._waking:
                self._epoll.close()
                self._close_waker()
            self._end()
