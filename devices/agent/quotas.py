"""Limits of a client's use in the long run: bytes, and a share of the computing time. Pure.

Virtual scheduling (ITU-T I.371), a token bucket of one number a client: the time at which its use
so far is paid for. Its burst is what it may use in a second.
"""

import threading
from collections.abc import Mapping, Sequence

from mdp.formats.keys import ClientLimits

#: How much of its share, in seconds, a client may use at once.
BURST_S = 1.0
_UNLIMITED = ClientLimits()


class Quotas:
    """Accounts of the limited clients; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[str, ClientLimits] = {}
        #: By client: when its bytes, and its computing time, are paid for.
        self._bytes_s: dict[str, float] = {}
        self._computing_s: dict[str, float] = {}

    def limit(self, limits: Mapping[str, ClientLimits]) -> None:
        """Replace the limits, by client."""
        with self._lock:
            self._limits = {
                client: own
                for client, own in limits.items()
                if own.bytes_per_s is not None or own.computing_share is not None
            }
            for used in (self._bytes_s, self._computing_s):
                for client in used.keys() - self._limits.keys():
                    del used[client]

    def refusal(self, client: str, request_bytes: int, now_s: float) -> str:
        """Reason why a request of `client` is refused; empty, and charged, if it is not."""
        if client not in self._limits:
            return ""
        with self._lock:
            limits = self._limits.get(client, _UNLIMITED)
            if self._computing_s.get(client, now_s) > now_s + BURST_S:
                share = limits.computing_share or 1.0
                return f"this client's {share:.0%} of the computing time are used up"
            if limits.bytes_per_s is not None:
                paid_s = self._bytes_s.get(client, now_s)
                if paid_s > now_s + BURST_S:
                    return f"this client's {limits.bytes_per_s:,.0f} bytes a second are used up"
                self._bytes_s[client] = max(paid_s, now_s) + request_bytes / limits.bytes_per_s
        return ""

    def charge(self, clients: Sequence[str], started_s: float, now_s: float) -> None:
        """Charge `clients` for a batch computed since `started_s`, one request of each."""
        if self._limits.keys().isdisjoint(clients):
            return
        took_s = (now_s - started_s) / len(clients)
        with self._lock:
            for client in clients:
                share = self._limits.get(client, _UNLIMITED).computing_share
                if share is not None:
                    paid_s = max(self._computing_s.get(client, now_s), now_s)
                    self._computing_s[client] = paid_s + took_s / share
