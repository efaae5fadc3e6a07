"""How often a host may connect. Pure.

A handshake costs an agent half a millisecond on the one thread that also moves everybody's
messages, and a host can begin a thousand a second. So each host has an allowance, as of a token
bucket: so many at once, and so many a second from then on (the virtual scheduling algorithm of
ITU-T I.371, which keeps a single number per host). Whoever has used it up is kept out until it has
a second's worth again.
"""

import math
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from mdp.transport.admission.syn_filter import Network

#: Connections a second from one host, in the long run, and at once after a quiet time: enough for
#: thirty clients there that all begin together, or a few that look for an agent that is gone. Twice
#: as many would make one call in fifty wait for a handshake, beside one who knocks without end.
PER_S, AT_ONCE = 4.0, 32
#: The longest that a host is kept out, however many came before that could take effect.
LONGEST_S = 10.0
#: Hosts that are remembered before those are forgotten that have their whole allowance.
_MANY = 256


class Arrivals:
    """Counts connections by host, and says who has to wait."""

    def __init__(self, per_s: float = PER_S, at_once: int = AT_ONCE) -> None:
        self._every_s, self._at_once = 1 / per_s, at_once
        #: Once it has what one second brings, a host that was kept out is let in again: so long
        #: before it has its whole allowance.
        self._before_s = (at_once - min(per_s, at_once)) / per_s
        #: When each has its whole allowance again.
        self._whole_s: dict[Network, float] = {}
        self._until_s: dict[Network, float] = {}
        #: When to `look` again; infinity while nobody is kept out.
        self.due_s = math.inf

    @property
    def kept_out(self) -> frozenset[Network]:
        """Who may not connect now."""
        return frozenset(self._until_s)

    def came(self, host: str, now_s: float) -> bool:
        """A connection from `host` was made; whether it is the one after which it is kept out."""
        network = network_of(host)
        if len(self._whole_s) >= _MANY:
            self._whole_s = {n: s for n, s in self._whole_s.items() if s > now_s}
        whole_s = max(self._whole_s.get(network, now_s), now_s) + self._every_s
        whole_s = min(whole_s, now_s + LONGEST_S + self._before_s)
        self._whole_s[network] = whole_s
        left = self._at_once - (whole_s - now_s) / self._every_s
        # The last one that is allowed is the last for a while.
        if left >= 1:
            return False
        is_new = network not in self._until_s
        # Those that came nevertheless, before anybody could do something about it, are paid back.
        self._until_s[network] = whole_s - self._before_s
        self.due_s = min(self._until_s.values())
        return is_new

    def look(self, now_s: float) -> bool:
        """Let those back in whose time has come; whether there are any."""
        if now_s < self.due_s:
            return False
        self._until_s = {n: s for n, s in self._until_s.items() if s > now_s}
        self.due_s = min(self._until_s.values(), default=math.inf)
        return True


def network_of(host: str) -> Network:
    """What counts as one: an IPv4 address, or the 64 bits of an IPv6 address that a site has."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return IPv6Network((int(address) >> 64 << 64, 64))
        address = address.ipv4_mapped
    return ip_network(address)
