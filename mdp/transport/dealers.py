"""The client's DEALERs, one per agent, and what is known of agents that are not there.

A socket monitor tells when a connection is really up (its handshake has succeeded) or gone, and
requests are handed over only while it is up. While nobody polls, ZeroMQ reconnects by itself.
`poll` replaces the socket of a connection that has ended, once what it had received is read, so
that requests left in it are not sent to an agent that comes back. ZMQ_IMMEDIATE would drop these
too, but also every reply that was received and not yet read. After a failed handshake only `poll`
dials.
"""

import contextlib
import math
import select
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from mdp.errors import ConfigError, InputError
from mdp.protocol.messages import MAX_BUFFER_BYTES, Buffer
from mdp.transport import zap
from mdp.transport.absence import NO_MORE, NOT_ACCEPTED, REASONS, UNASKED, Absence
from mdp.transport.dealer import FAILED, RECONNECT_MAX_MS, RECONNECT_MS, Dealer, open_dealer
from mdp.transport.events import ClientKeys, Connected, Disconnected, Received, TransportEvent
from mdp.transport.greeting import QUESTION, mechanism_of
from mdp.transport.names import Names, has_address
from mdp.transport.sockets import (
    HIGH_WATER_MARK,
    descriptor,
    end,
    readable,
    receive,
    require_descriptors,
    send,
    this_process,
    told_within,
)

#: A connection that ended sooner is dialled again after RECONNECT_MAX_MS: an agent that hangs up
#: each time would be dialled ten times a second.
BRIEF_S = 1.0
#: A monitor with more events than that is not read to its end: the connection has come and gone
#: while the client was idle, and is made anew.
MOST_EVENTS = 256
#: A connection that brought so many messages more than were asked for is ended, for so long.
MOST_UNASKED, UNASKED_S = 256, 10.0
#: How soon to look again whether a name that had no address has been resolved.
LOOKUP_S = 0.02
#: Descriptors of a context and this client's epoll; those of a device: its DEALER, both ends of the
#: monitor, the connection.
CONTEXT_DESCRIPTORS, DEVICE_DESCRIPTORS = 6, 4
#: Failed handshakes in a row until a reason is given: one may be an agent that was just stopped.
CERTAIN_FAILURES = 2
#: A reason that is not seen again for so long after dialling is dropped.
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
        """Dial `addresses`, encrypted where `keys` know the agent's key; raises ConfigError."""
        self.connected: set[str] = set()
        #: Devices that are there, but not for this client, with the reason.
        self.refused: dict[str, str] = {}
        self._addresses = dict(addresses)
        self._keys = keys
        self._max_frame_bytes = max_frame_bytes
        self._names = Names()
        self._absences: dict[str, Absence] = {}
        self._dealers: dict[str, Dealer] = {}
        #: By descriptor: the device and its dealer, its monitor or the question to it.
        self._owned: dict[int, tuple[str, zmq.Socket[bytes]]] = {}
        self._sockets: set[zmq.Socket[bytes]] = set()
        #: Sockets whose descriptor may stay quiet although something has come, and their devices.
        self._unsure: dict[zmq.Socket[bytes], str] = {}
        #: What a send in vain has found out, to be reported by the next `poll`.
        self._early: list[TransportEvent] = []
        self._process = this_process()
        # libzmq ends the process where there are too few.
        require_descriptors(CONTEXT_DESCRIPTORS + DEVICE_DESCRIPTORS * len(addresses))
        #: Waits on the sockets' descriptors, which costs the same for one device and for many.
        self._epoll = select.epoll()
        self._context = zmq.Context()
        #: For a client that is dropped without `close`: pyzmq's own destructor of a context waits
        #: for ever for sockets that the garbage collector has taken before it.
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
        address = self._names.resolved(named)
        if not has_address(named):
            # Also where it has an address: that may be another one by now.
            absence = self._absences.setdefault(device, Absence())
            wait_s = LOOKUP_S if address is None else RECONNECT_MAX_MS / 1e3
            absence.lookup_s = time.monotonic() + wait_s
        if address is not None:
            self._open(device, address)

    def _open(self, device: str, address: str) -> None:
        absence = self._absences.get(device)
        failures = 0 if absence is None else absence.failures
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
            # Before its reader goes: libzmq's thread would wait for one.
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
    def unfinished(self) -> bool:
        """Whether `poll` may have more of which the descriptor does not tell."""
        return bool(self._unsure or self._early)

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if it is not connected or its queue is full."""
        if device not in self.connected:
            self._look(device)
            if device not in self.connected:
                return False
        dealer = self._dealers[device]
        # Sending takes in what ZeroMQ has to tell, and with it perhaps a message's arrival.
        self._unsure[dealer.socket] = device
        try:
            send(dealer.socket, frames)
        except zmq.Again:
            # Its queue is full, perhaps of a connection that has gone.
            self._look(device)
            return False
        dealer.unasked -= 1
        return True

    def _look(self, device: str) -> None:
        """Take in whether the connection to `device` has just come or gone."""
        if dealer := self._dealers.get(device):
            self._early += self._collect([(device, dealer.monitor)])

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        """What has happened, waiting at most `timeout_s` (None: until something does).

        May return early with nothing, when agents that are not there have to be dialled again.
        Takes in as much of one device as may wait at most; see `unfinished`.
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
        elif self._absences:
            timeout_s = self._until_redial_s(timeout_s)
        # Also where something is ready: a device that never stops sending keeps no other one out.
        ready += [self._owned[number] for number, _ in told_within(self._epoll, timeout_s)]
        if ready:
            events += self._collect(ready)
        if self._absences:
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
                self._hear(device, owned)
            if dealer is not None:
                # Also after its monitor: what a lost connection still delivered counts.
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
        """What has come to `sockets`, of each as much as may wait at most."""
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
            said = parse_monitor_message([frame.bytes for frame in frames])
            event = said["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._present(device)
                dealer.up_s, dealer.unasked = time.monotonic(), 0
                if device not in self.connected:
                    self.connected.add(device)
                    changes.append(Connected(device))
                continue
            self._absent(device, dealer, event, said["value"])
            if event == zmq.Event.DISCONNECTED:
                changes += self._lost(device)
        dealer.up_s = time.monotonic()
        self._absent(device, dealer, zmq.Event.DISCONNECTED)
        return changes + self._lost(device)

    def _lost(self, device: str) -> list[TransportEvent]:
        if device not in self.connected:
            return []
        self.connected.remove(device)
        return [Disconnected(device)]

    def _cut(self, device: str) -> list[TransportEvent]:
        """End the connection of an agent that sends far more than it is asked for."""
        self._shut(device)
        absence = self._absences.setdefault(device, Absence())
        absence.redial_s = time.monotonic() + UNASKED_S
        self.refused[device] = UNASKED
        return self._lost(device)

    def _present(self, device: str) -> None:
        self.refused.pop(device, None)
        self._end_question(self._absences.pop(device, None))

    def _absent(self, device: str, dealer: Dealer, event: int, value: int = 0) -> None:
        """A connection has ended, or could not be made."""
        now_s, absence = time.monotonic(), self._absences.setdefault(device, Absence())
        absence.failures += bool(event & FAILED)
        sure = absence.failures >= CERTAIN_FAILURES
        wait_ms = RECONNECT_MS if absence.failures and not sure else RECONNECT_MAX_MS
        if dealer.up_s <= now_s - BRIEF_S:
            wait_ms = 0
        dealer.up_s = math.inf
        absence.redial_s = now_s + wait_ms / 1e3
        if event & FAILED:
            absence.doubt_s = math.inf
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.refused[device] = NO_MORE if value == int(zap.FULL) else NOT_ACCEPTED
        elif event & FAILED and sure and absence.question is None:
            self._ask(device, absence)

    def _ask(self, device: str, absence: Absence) -> None:
        """Ask an agent whether it is encrypted: who hangs up often does not say why."""
        address = self._dealers[device].address
        absence.question, absence.heard = self._context.socket(zmq.STREAM), b""
        absence.question.linger = 0
        absence.question.ipv6 = "[" in address
        absence.question.connect(address)
        self._listen(device, absence.question)

    def _hear(self, device: str, question: "zmq.Socket[bytes]") -> None:
        absence = self._absences.get(device)
        if absence is None or absence.question is not question:
            return
        while frames := receive(question):
            peer, data = (frame.bytes for frame in frames)
            absence.heard += data
            mechanism = mechanism_of(absence.heard)
            if data and mechanism is not None:
                encrypted = self._keys is not None and device in self._keys.agents
                reason = REASONS.get((mechanism, encrypted))
                if reason is not None:
                    self.refused[device] = reason
                self._end_question(absence)
                return
            if not data and not absence.heard:
                # The connection is up, or has gone again.
                with contextlib.suppress(zmq.ZMQError):
                    question.send_multipart([peer, QUESTION], zmq.NOBLOCK)

    def _end_question(self, absence: Absence | None) -> None:
        if absence is not None and absence.question is not None:
            self._close(absence.question)
            absence.question = None

    def _until_redial_s(self, timeout_s: float | None) -> float | None:
        due_s = min(min(a.redial_s, a.lookup_s, a.doubt_s) for a in self._absences.values())
        if due_s == math.inf:
            return timeout_s
        left_s = max(0.0, due_s - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _redial(self) -> None:
        now_s = time.monotonic()
        for device, absence in self._absences.items():
            if absence.doubt_s <= now_s:
                self.refused.pop(device, None)
                absence.doubt_s = math.inf
            if absence.lookup_s <= now_s:
                self._look_up(device, absence, now_s)
            if absence.redial_s > now_s:
                continue
            absence.redial_s, absence.doubt_s = math.inf, now_s + DOUBT_S
            self._end_question(absence)
            # Out of descriptors, or of memory: perhaps not for long.
            try:
                self._dial(device)
            except zmq.ZMQError:
                absence.redial_s = now_s + RECONNECT_MAX_MS / 1e3

    def _look_up(self, device: str, absence: Absence, now_s: float) -> None:
        """Dial if the name of its host has an address by now, or another one."""
        dealer = self._dealers.get(device)
        address = self._names.resolved(self._addresses[device])
        wait_s = LOOKUP_S if address is None else RECONNECT_MAX_MS / 1e3
        absence.lookup_s = now_s + wait_s
        if (
            address is not None
            and absence.redial_s == math.inf
            and (dealer is None or dealer.address != address)
        ):
            absence.redial_s = now_s

    def close(self) -> None:
        """Close every socket; what was still on its way is dropped."""
        if self._process is this_process() and not self._context.closed:
            self._epoll.close()
            self._end()
