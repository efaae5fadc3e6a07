"""A limit on the rate of each host's connections. Pure.

A handshake takes half a millisecond of the thread that moves all messages, and a host can start a
thousand a second. Each host has a token bucket (the virtual scheduling algorithm of ITU-T I.371,
with one number a host). A host whose bucket is empty is blocked until it has a second's tokens.
"""

import math
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from mdp.transport.admission.syn_filter import Network

#: Connections of one host a second, and in a burst: enough for thirty clients that start together,
#: or a few that look for an agent that is gone. With twice the rate, one call in fifty waits for a
#: handshake beside a host that connects without end.
PER_S, AT_ONCE = 4.0, 32
#: The longest block, however many connections preceded it.
LONGEST_S = 10.0
#: Number of hosts beyond which those with a full bucket are dropped.
_MANY = 256


class ConnectionRate:
    """Rates of connections by host, and the blocked hosts."""

    def __init__(self, per_s: float = PER_S, at_once: int = AT_ONCE) -> None:
        self._every_s, self._at_once = 1 / per_s, at_once
        #: A blocked host is unblocked with a second's tokens, so long before its bucket is full.
        self._early_s = (at_once - min(per_s, at_once)) / per_s
        #: When each host's bucket is full.
        self._full_s: dict[Network, float] = {}
        self._blocked_until_s: dict[Network, float] = {}
        #: When `unblock` is due; infinity while no host is blocked.
        self.due_s = math.inf

    @property
    def hosts_to_block(self) -> frozenset[Network]:
        """The blocked hosts."""
        return frozenset(self._blocked_until_s)

    def count_connection(self, host: str, now_s: float) -> bool:
        """Count a connection from `host`; whether it is now blocked and was not before."""
        network = network_of(host)
        if len(self._full_s) >= _MANY:
            self._full_s = {n: s for n, s in self._full_s.items() if s > now_s}
        full_s = max(self._full_s.get(network, now_s), now_s) + self._every_s
        full_s = min(full_s, now_s + LONGEST_S + self._early_s)
        self._full_s[network] = full_s
        left = self._at_once - (full_s - now_s) / self._every_s
        if left >= 1:
            return False
        is_new = network not in self._blocked_until_s
        # Connections accepted before the filter was installed are charged too.
        self._blocked_until_s[network] = full_s - self._early_s
        self.due_s = min(self._blocked_until_s.values())
        return is_new

    def unblock(self, now_s: float) -> bool:
        """Unblock hosts that are due; whether there are any."""
        if now_s < self.due_s:
            return False
        self._blocked_until_s = {n: s for n, s in self._blocked_until_s.items() if s > now_s}
        self.due_s = min(self._blocked_until_s.values(), default=math.inf)
        return True


def network_of(host: str) -> Network:
    """The network that counts as one host: an IPv4 address, or the /64 of an IPv6 address."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return IPv6Network((int(address) >> 64 << 64, 64))
        address = address.ipv4_mapped
    return ip_network(address)
