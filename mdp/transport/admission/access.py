"""Who may connect to an agent: keys, connections of each, descriptors, and how often hosts come.

`Router` tells what libzmq does, one thread at a time; nothing here uses a ZeroMQ socket.
"""

import contextlib
import math
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mdp.transport import zap
from mdp.transport.admission import pending as door
from mdp.transport.admission.connection_rate import Arrivals
from mdp.transport.admission.connections import KEPT_DESCRIPTORS, PER_KEY, Connections
from mdp.transport.admission.pending import Door, Visitor
from mdp.transport.admission.syn_filter import keep_out
from mdp.transport.admission.tcp_peers import (
    CURVE_HANDSHAKE_BYTES,
    PLAIN_HANDSHAKE_BYTES,
    bytes_received,
    connection_of,
    hang_up,
)

#: Why connections or messages were turned away, as `Access.turned_away` counts them.
UNKNOWN_KEY, CROWDED_OUT = "unknown key", "handshakes crowded out"
TOO_OFTEN, TOO_MANY = "host connecting too often", "connections beyond a key's number"
DESCRIPTORS_SHORT, REVOKED = "connections for want of descriptors", "connections of a revoked key"

#: Told of "connect", "refuse" and "revoke", with key, address and reason. It must not wait.
Audit = Callable[[str, str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKeys:
    """The agent's secret key, and the public keys of the clients it lets in."""

    secret: str = field(repr=False)
    allowed: frozenset[str]
    #: Connections that a key may have at a time, where that is not `PER_KEY`.
    connections: Mapping[str, int] = field(default_factory=dict)


class Access:
    """Decides who is let in, and ends connections."""

    def __init__(self, keys: AgentKeys | None, audit: Audit) -> None:
        #: None for plain text.
        self.allowed = keys.allowed if keys else None
        self.connections = Connections()
        self.arrivals = Arrivals()
        #: The socket that libzmq listens on, as soon as it does.
        self.listener: socket.socket | None = None
        self.turned_away: Counter[str] = Counter()
        self._most = keys.connections if keys else {}
        self._audit = audit
        self._descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._descriptors == resource.RLIM_INFINITY:
            self._descriptors = sys.maxsize
        # Half of the descriptors are kept for those who are let in, and for the process itself.
        self._door = Door(max(1, min(door.MAX_STRANGERS, self._descriptors // 2)))
        self._per_key = max(1, min(PER_KEY, self._descriptors // 4))
        self._kept = max(4, min(KEPT_DESCRIPTORS, self._descriptors // 8))

    def allow(self, public_keys: frozenset[str], connections: Mapping[str, int]) -> None:
        """From now on only these keys are let in; connections of all others are ended."""
        self.allowed, self._most = public_keys, connections
        for key in set(self.connections.keys) - public_keys:
            for visitor in self.connections.of(key):
                self._turn_away(visitor, "revoke", REVOKED)

    def knocked(self, request: Sequence[bytes]) -> list[bytes]:
        """The reply to what libzmq asks about a key."""
        key, host = zap.key_of(request), zap.host_of(request)
        objection = self._objection(key)
        allowed = frozenset() if objection == UNKNOWN_KEY else frozenset([key])
        reply, let_in = zap.answer(request, allowed, full=bool(objection))
        if let_in:
            visitor = self.connections.let_in(key, host, self._proved)
            self._audit("connect", key, host if visitor is None else visitor.address, "")
        else:
            self.turned_away[objection or UNKNOWN_KEY] += 1
            self._audit("refuse", key, host, objection or UNKNOWN_KEY)
        return reply

    def _objection(self, key: str) -> str:
        """Why a key is not let in, or nothing."""
        if not self.allowed or key not in self.allowed:
            return UNKNOWN_KEY
        count = self.connections.count(key)
        if count >= self._most.get(key, self._per_key):
            return TOO_MANY
        # The last ones are for keys that have no connection yet.
        return DESCRIPTORS_SHORT if count and self._is_short(self._kept) else ""

    def heard(self, key: str, descriptor: int) -> bool:
        """A message came with `key` on this connection; whether it is heard."""
        self.connections.heard(descriptor, key)
        if self.allowed is not None and key in self.allowed:
            return True
        self.turned_away[UNKNOWN_KEY] += 1
        # It was not known whose connection this is when its key was revoked.
        for visitor in self.connections.of(key):
            self._turn_away(visitor, "revoke", REVOKED)
        return False

    def opened(self, visitor: Visitor) -> None:
        """A connection was accepted."""
        self.connections.opened(visitor)
        leaving = self._door.opened(visitor, self._may_have_proved)
        if leaving is not None:
            self._turn_away(leaving, "refuse", CROWDED_OUT)
        if self._is_short(self._kept // 2) and (one := self.connections.crowd()) is not None:
            self._turn_away(one, "refuse", DESCRIPTORS_SHORT)
        if self.allowed is None:
            self._audit("connect", "", visitor.address, "")
        if self.arrivals.came(visitor.host, time.monotonic()):
            self.turned_away[TOO_OFTEN] += 1
            self._audit("refuse", "", visitor.host, TOO_OFTEN)
            self._keep_out()

    def closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._door.closed(descriptor)
        self.connections.closed(descriptor)

    def let_in(self, timeout_s: float | None) -> float | None:
        """Let those connect again whose time has come; how long to wait at most until the next."""
        if self.arrivals.due_s == math.inf:
            return timeout_s
        now_s = time.monotonic()
        if self.arrivals.look(now_s):
            self._keep_out()
        if self.arrivals.due_s == math.inf:
            return timeout_s
        left_s = max(0.0, self.arrivals.due_s - now_s)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _keep_out(self) -> None:
        # Where the kernel does not filter, they are let in.
        if self.listener is not None:
            with contextlib.suppress(OSError):
                keep_out(self.listener, self.arrivals.kept_out)

    def _is_short(self, kept: int) -> bool:
        """Whether fewer than `kept` descriptors are left."""
        # Counting takes a while, and nothing is short where there are few connections.
        if len(self.connections) < self._descriptors // 8:
            return False
        try:
            used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError:
            # Looking takes one as well, and there is none.
            return True
        return self._descriptors - used < kept

    def _turn_away(self, visitor: Visitor, event: str, reason: str) -> None:
        if hang_up(visitor):
            self.turned_away[reason] += 1
            self._audit(event, self.connections.key_of(visitor), visitor.address, reason)
            self.connections.closed(visitor.descriptor)

    def _proved(self, visitor: Visitor) -> bool:
        """Whether a connection is there and has sent as much as a handshake takes."""
        with connection_of(visitor) as peer:
            return peer is not None and self._suffices(peer)

    def _may_have_proved(self, visitor: Visitor) -> bool:
        """As `_proved`, and for one that has left."""
        with connection_of(visitor) as peer:
            return peer is None or self._suffices(peer)

    def _suffices(self, peer: socket.socket) -> bool:
        least = PLAIN_HANDSHAKE_BYTES if self.allowed is None else CURVE_HANDSHAKE_BYTES
        return bytes_received(peer) >= least
