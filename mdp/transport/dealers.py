"""The client's DEALERs, one per agent, and what is known of agents that are not there.

ZeroMQ reconnects by itself after a loss; a socket monitor tells when a connection is really up (its
handshake has succeeded) or gone, and nothing is queued for a peer that is not there. After a failed
handshake it is told to stop, and `poll` dials again: a monitor that nobody reads would otherwise
fill up and hold libzmq's only thread.
"""

import contextlib
import math
import select
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from mdp.errors import ConfigError, InputError
from mdp.transport.greeting import QUESTION, mechanism_of
from mdp.transport.sockets import (
    HIGH_WATER_MARK,
    configure,
    descriptor,
    readable,
    receive,
    send,
    told_within,
)
from mdp.wire import MAX_BUFFER_BYTES, Buffer

RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
#: An attempt to connect that nobody answers is given up and made anew. TCP itself tries ever more
#: seldom: after 45 s without a network, a device was found again only 29 s after it was back.
CONNECT_MS = 2000
#: Failed handshakes in a row until a reason is given: one may be an agent that was just stopped.
CERTAIN_FAILURES = 2
#: A reason that is not seen again for so long after dialling is dropped.
DOUBT_S = 3.0
#: ZMQ_RECONNECT_STOP_HANDSHAKE_FAILED (zmq.h)
_STOP_AFTER_FAILED_HANDSHAKE = 2
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED

#: Why an agent is there, but not for this client.
NOT_ACCEPTED = "the agent does not accept this client's key"
ANOTHER_KEY = "the agent's key is another one than the fleet file's"
AGENT_IS_PLAIN = "one side is encrypted, the other plain: the agent has no key"
CLIENT_IS_PLAIN = "one side is encrypted, the other plain: the fleet file has no key of the agent"
#: By what the agent speaks, and whether this client speaks encrypted to it.
_REASONS = {
    ("CURVE", True): ANOTHER_KEY,
    ("CURVE", False): CLIENT_IS_PLAIN,
    ("NULL", True): AGENT_IS_PLAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """This client's key pair, and the public key of every agent that has one, by device."""

    public: str
    secret: str = field(repr=False)
    agents: Mapping[str, str]
    #: Second keys, of devices whose key is being changed.
    second: Mapping[str, str] = field(default_factory=dict)

    def of_agent(self, device: str, failures: int) -> bytes:
        """The key to expect of `device` after so many failed handshakes: each in turn."""
        first = self.agents[device]
        return (self.second.get(device, first) if failures % 2 else first).encode()


class Received(Struct, frozen=True):
    """A device sent a message."""

    device: str
    frames: Sequence[Buffer]


class Connected(Struct, frozen=True):
    """The connection to a device is up."""

    device: str


class Disconnected(Struct, frozen=True):
    """The connection to a device is gone; what was on its way is lost."""

    device: str


TransportEvent = Received | Connected | Disconnected


@dataclass(slots=True)
class _Absence:
    """What is known of an agent to which there is no connection."""

    #: Handshakes that failed in a row.
    failures: int = 0
    #: When to dial again. ZeroMQ does so by itself after a loss, but not after a failed handshake
    #: or bytes that no ZeroMQ peer would send.
    redial_s: float = math.inf
    #: When to drop the reason, unless it is seen again before.
    doubt_s: float = math.inf
    #: Open while the agent is asked how it wants to be spoken to, and what it has said so far.
    question: "zmq.Socket[bytes] | None" = None
    heard: bytes = b""


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
        self._absences: dict[str, _Absence] = {}
        self._context = zmq.Context()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        #: Waits on the sockets' descriptors, which costs the same for one device and for many.
        self._epoll = select.epoll()
        #: By descriptor: the device and its dealer, its monitor or the question to it.
        self._owned: dict[int, tuple[str, zmq.Socket[bytes]]] = {}
        #: Sockets whose descriptor may stay quiet although something has come, and their devices.
        self._unsure: dict[zmq.Socket[bytes], str] = {}
        #: What a send in vain has found out, to be reported by the next `poll`.
        self._early: list[TransportEvent] = []
        try:
            for device, address in addresses.items():
                self._open(device, address)
        except BaseException:
            self.close()
            raise

    def _open(self, device: str, address: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        self._dealers[device] = dealer
        configure(dealer, address, self._max_frame_bytes)
        dealer.immediate = True
        dealer.reconnect_ivl = RECONNECT_MS
        dealer.reconnect_ivl_max = RECONNECT_MAX_MS
        dealer.connect_timeout = CONNECT_MS
        dealer.setsockopt(zmq.RECONNECT_STOP, _STOP_AFTER_FAILED_HANDSHAKE)
        if self._keys is not None and device in self._keys.agents:
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
            dealer.curve_serverkey = self._keys.of_agent(device, 0)
        monitor = dealer.get_monitor_socket(_WATCHED)
        monitor.linger = 0
        self._monitors[device] = monitor
        self._listen(device, dealer)
        self._listen(device, monitor)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"device {device!r}: cannot connect to {address}: {error}") from error

    def _listen(self, device: str, owned: "zmq.Socket[bytes]") -> None:
        number = descriptor(owned)
        self._epoll.register(number, select.EPOLLIN)
        self._owned[number] = device, owned
        self._unsure[owned] = device

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, for event loops."""
        return self._epoll.fileno()

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Hand `frames` over for `device`; False if it is not connected or its queue is full."""
        dealer = self._dealers[device]
        # Sending takes in what ZeroMQ has to tell, and with it perhaps a message's arrival.
        self._unsure[dealer] = device
        try:
            send(dealer, frames)
        except zmq.Again:
            return self._send_now_or_never(device, frames)
        return True

    def _send_now_or_never(self, device: str, frames: Sequence[Buffer]) -> bool:
        """Send once more, now that all is taken in: the connection may just have come or gone."""
        self._early += self._collect([(device, self._monitors[device])])
        if device in self.connected:
            with contextlib.suppress(zmq.Again):
                send(self._dealers[device], frames)
                return True
        return False

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        """What has happened, waiting at most `timeout_s` (None: until something does).

        May return early with nothing, when agents that are not there have to be dialled again.
        """
        if self._context.closed:
            raise InputError("this client is closed")
        events, self._early = self._early, []
        if self._unsure:
            unsure, self._unsure = self._unsure, {}
            if ready := readable(unsure):
                events += self._collect([(unsure[owned], owned) for owned in ready])
        if not events:
            if self._absences:
                timeout_s = self._until_redial_s(timeout_s)
            if told := told_within(self._epoll, timeout_s):
                events = self._collect([self._owned[number] for number, _ in told])
        if self._absences:
            self._redial()
        return events

    def _collect(self, ready: Iterable[tuple[str, "zmq.Socket[bytes]"]]) -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        dealers = {}
        for device, owned in ready:
            dealer = self._dealers[device]
            if owned is self._monitors[device]:
                changes += self._changes(device)
            elif owned is not dealer:
                self._hear(device, owned)
            # Also after its monitor: what a lost connection still delivered counts.
            dealers[dealer] = device
        return self._messages(dealers) + changes

    def _messages(self, dealers: dict["zmq.Socket[bytes]", str]) -> list[TransportEvent]:
        """What has come to `dealers`, of each as much as may wait at most."""
        received: list[TransportEvent] = []
        waiting = list(dealers)
        for _ in range(HIGH_WATER_MARK):
            for dealer in waiting:
                if frames := receive(dealer):
                    content = [frame.bytes for frame in frames]
                    received.append(Received(dealers[dealer], content))
            waiting = readable(waiting)
            if not waiting:
                break
        for dealer in waiting:
            self._unsure[dealer] = dealers[dealer]
        return received

    def _changes(self, device: str) -> list[TransportEvent]:
        changes: list[TransportEvent] = []
        while frames := receive(self._monitors[device]):
            event = parse_monitor_message([frame.bytes for frame in frames])["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._present(device)
                if device not in self.connected:
                    self.connected.add(device)
                    changes.append(Connected(device))
                continue
            self._absent(device, event)
            if event == zmq.Event.DISCONNECTED and device in self.connected:
                self.connected.remove(device)
                changes.append(Disconnected(device))
        return changes

    def _present(self, device: str) -> None:
        self.refused.pop(device, None)
        self._end_question(self._absences.pop(device, None))

    def _absent(self, device: str, event: int) -> None:
        """A connection has ended, or could not be made."""
        absence = self._absences.setdefault(device, _Absence())
        absence.failures += bool(event & _FAILED)
        sure = absence.failures >= CERTAIN_FAILURES
        wait_ms = RECONNECT_MS if absence.failures and not sure else RECONNECT_MAX_MS
        absence.redial_s = time.monotonic() + wait_ms / 1e3
        if event & _FAILED:
            absence.doubt_s = math.inf
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.refused[device] = NOT_ACCEPTED
        elif event & _FAILED and sure and absence.question is None:
            self._ask(device, absence)

    def _ask(self, device: str, absence: _Absence) -> None:
        """Ask an agent whether it is encrypted: who hangs up often does not say why."""
        absence.question, absence.heard = self._context.socket(zmq.STREAM), b""
        absence.question.linger = 0
        absence.question.ipv6 = "[" in self._addresses[device]
        absence.question.connect(self._addresses[device])
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
                reason = _REASONS.get((mechanism, encrypted))
                if reason is not None:
                    self.refused[device] = reason
                self._end_question(absence)
                return
            if not data and not absence.heard:
                # The connection is up, or has gone again.
                with contextlib.suppress(zmq.ZMQError):
                    question.send_multipart([peer, QUESTION], zmq.NOBLOCK)

    def _end_question(self, absence: _Absence | None) -> None:
        if absence is not None and absence.question is not None:
            number = descriptor(absence.question)
            self._epoll.unregister(number)
            del self._owned[number]
            absence.question.close(linger=0)
            absence.question = None

    def _until_redial_s(self, timeout_s: float | None) -> float | None:
        due_s = min((min(a.redial_s, a.doubt_s) for a in self._absences.values()), default=math.inf)
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
            if absence.redial_s > now_s:
                continue
            absence.redial_s, absence.doubt_s = math.inf, now_s + DOUBT_S
            self._end_question(absence)
            dealer, address = self._dealers[device], self._addresses[device]
            # Where ZeroMQ has given up there is nothing left to disconnect.
            with contextlib.suppress(zmq.ZMQError):
                dealer.disconnect(address)
            if self._keys is not None and device in self._keys.second:
                dealer.curve_serverkey = self._keys.of_agent(device, absence.failures)
            dealer.connect(address)
            self._unsure[dealer] = device

    def close(self) -> None:
        """Close every socket; what was still on its way is dropped."""
        if self._context.closed:
            return
        for absence in self._absences.values():
            self._end_question(absence)
        self._epoll.close()
        for device, dealer in self._dealers.items():
            if device in self._monitors:
                dealer.disable_monitor()
                self._monitors[device].close(linger=0)
            dealer.close(linger=0)
        self._context.term()
