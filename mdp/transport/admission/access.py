"""Admission of connections: allowed keys, limits of connections, descriptors and rates.

`Router` reports libzmq's events, one thread at a time; nothing here uses a ZeroMQ socket.
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
from mdp.transport.admission import pending
from mdp.transport.admission.connection_rate import ConnectionRate
from mdp.transport.admission.connections import KEPT_DESCRIPTORS, PER_KEY, Connections
from mdp.transport.admission.pending import PendingConnections, TcpPeer
from mdp.transport.admission.syn_filter import block
from mdp.transport.admission.tcp_peers import (
    CURVE_HANDSHAKE_BYTES,
    PLAIN_HANDSHAKE_BYTES,
    bytes_received,
    hang_up,
    socket_of,
)

#: Why connections or messages were turned away, as `Access.rejected` counts them.
UNKNOWN_KEY, CROWDED_OUT = "unknown key", "handshakes crowded out"
TOO_OFTEN, TOO_MANY = "host connecting too often", "connections beyond a key's number"
DESCRIPTORS_SHORT, REVOKED = "connections for want of descriptors", "connections of a revoked key"

#: Gets "connect", "refuse" or "revoke", key, address and reason. It must not wait.
Audit = Callable[[str, str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKeys:
    """The agent's secret key, and its allowed clients' public keys."""

    secret: str = field(repr=False)
    allowed: frozenset[str]
    #: Connections that a key may have at a time, by default `PER_KEY`.
    connections: Mapping[str, int] = field(default_factory=dict)


class Access:
    """Allows, limits and ends connections."""

    def __init__(self, keys: AgentKeys | None, audit: Audit) -> None:
        #: None for plain text.
        self.allowed = keys.allowed if keys else None
        self.connections = Connections()
        self.rate = ConnectionRate()
        #: The socket that libzmq listens on, once it does.
        self.listener: socket.socket | None = None
        self.rejected: Counter[str] = Counter()
        self._most = keys.connections if keys else {}
        self._audit = audit
        self._descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._descriptors == resource.RLIM_INFINITY:
            self._descriptors = sys.maxsize
        # Half of the descriptors are reserved for allowed clients and the process itself.
        self._pending = PendingConnections(max(1, min(pending.MAX_PENDING, self._descriptors // 2)))
        self._per_key = max(1, min(PER_KEY, self._descriptors // 4))
        self._kept = max(4, min(KEPT_DESCRIPTORS, self._descriptors // 8))

    def allow(self, public_keys: frozenset[str], connections: Mapping[str, int]) -> None:
        """Replace the allowed keys and their limits; connections of other keys end."""
        self.allowed, self._most = public_keys, connections
        for key in set(self.connections.keys) - public_keys:
            for peer in self.connections.of(key):
                self._disconnect(peer, "revoke", REVOKED)

    def authenticate(self, request: Sequence[bytes]) -> list[bytes]:
        """The reply to a ZAP request."""
        key, host = zap.key_of(request), zap.host_of(request)
        refusal = self._refusal(key)
        allowed = frozenset() if refusal == UNKNOWN_KEY else frozenset([key])
        reply, let_in = zap.answer(request, allowed, full=bool(refusal))
        if let_in:
            peer = self.connections.assign(key, host, self._handshake_done)
            self._audit("connect", key, host if peer is None else peer.address, "")
        else:
            self.rejected[refusal or UNKNOWN_KEY] += 1
            self._audit("refuse", key, host, refusal or UNKNOWN_KEY)
        return reply

    def _refusal(self, key: str) -> str:
        """Reason why a key is refused; empty if it is not."""
        if not self.allowed or key not in self.allowed:
            return UNKNOWN_KEY
        count = self.connections.count(key)
        if count >= self._most.get(key, self._per_key):
            return TOO_MANY
        # The last ones are reserved for keys without any connection.
        return DESCRIPTORS_SHORT if count and self._is_short(self._kept) else ""

    def accepts(self, key: str, descriptor: int) -> bool:
        """Tell whether to accept a message that came with `key` on this connection."""
        self.connections.correct(descriptor, key)
        if self.allowed is not None and key in self.allowed:
            return True
        self.rejected[UNKNOWN_KEY] += 1
        # When the key was revoked, this connection was not known to be its.
        for peer in self.connections.of(key):
            self._disconnect(peer, "revoke", REVOKED)
        return False

    def on_open(self, peer: TcpPeer) -> None:
        """A connection was accepted."""
        self.connections.on_open(peer)
        leaving = self._pending.on_open(peer, self._may_be_done)
        if leaving is not None:
            self._disconnect(leaving, "refuse", CROWDED_OUT)
        if (
            self._is_short(self._kept // 2)
            and (one := self.connections.oldest_of_most()) is not None
        ):
            self._disconnect(one, "refuse", DESCRIPTORS_SHORT)
        if self.allowed is None:
            self._audit("connect", "", peer.address, "")
        if self.rate.count_connection(peer.host, time.monotonic()):
            self.rejected[TOO_OFTEN] += 1
            self._audit("refuse", "", peer.host, TOO_OFTEN)
            self._update_filter()

    def on_close(self, descriptor: int) -> None:
        """A connection has ended."""
        self._pending.on_close(descriptor)
        self.connections.on_close(descriptor)

    def unblock(self, timeout_s: float | None) -> float | None:
        """Unblock hosts that are due; returns the timeout until the next one."""
        if self.rate.due_s == math.inf:
            return timeout_s
        now_s = time.monotonic()
        if self.rate.unblock(now_s):
            self._update_filter()
        if self.rate.due_s == math.inf:
            return timeout_s
        left_s = max(0.0, self.rate.due_s - now_s)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _update_filter(self) -> None:
        # Without a filter in the kernel, hosts are not blocked.
        if self.listener is not None:
            with contextlib.suppress(OSError):
                block(self.listener, self.rate.hosts_to_block)

    def _is_short(self, kept: int) -> bool:
        """Tell whether fewer than `kept` descriptors are left."""
        # Counting is slow, and unnecessary with few connections.
        if len(self.connections) < self._descriptors // 8:
            return False
        try:
            used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError:
            # Listing needs a descriptor, and none is left.
            return True
        return self._descriptors - used < kept

    def _disconnect(self, peer: TcpPeer, event: str, reason: str) -> None:
        if hang_up(peer):
            self.rejected[reason] += 1
            self._audit(event, self.connections.key_of(peer), peer.address, reason)
            self.connections.on_close(peer.descriptor)

    def _handshake_done(self, peer: TcpPeer) -> bool:
        """Tell whether a connection is open and has sent enough for a handshake."""
        with socket_of(peer) as open_socket:
            return open_socket is not None and self._suffices(open_socket)

    def _may_be_done(self, peer: TcpPeer) -> bool:
        """As `_handshake_done`, also for a closed connection."""
        with socket_of(peer) as open_socket:
            return open_socket is None or self._suffices(open_socket)

    def _suffices(self, open_socket: socket.socket) -> bool:
        least = PLAIN_HANDSHAKE_BYTES if self.allowed is None else CURVE_HANDSHAKE_BYTES
        return bytes_received(open_socket) >= least
