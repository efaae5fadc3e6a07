"""The state of an agent without a connection."""

import math
from dataclasses import dataclass

import zmq

#: Why an agent that is reachable has no connection.
NOT_ACCEPTED = "the agent does not accept this client's key"
NO_MORE = "the agent allows no more connections of this client's key"
ANOTHER_KEY = "the agent's key is another one than the fleet file's"
AGENT_IS_PLAIN = "one side is encrypted, the other plain: the agent has no key"
CLIENT_IS_PLAIN = "one side is encrypted, the other plain: the fleet file has no key of the agent"
UNASKED = "the agent sends messages without requests"
#: By the agent's mechanism, and whether this client uses CURVE.
REASONS = {
    ("CURVE", True): ANOTHER_KEY,
    ("CURVE", False): CLIENT_IS_PLAIN,
    ("NULL", True): AGENT_IS_PLAIN,
}


@dataclass(slots=True)
class Outage:
    """Next moment to dial, and the diagnosis."""

    #: Consecutive failed handshakes.
    failures: int = 0
    #: When to dial with a new socket.
    redial_s: float = math.inf
    #: When to look up the address of its host's name.
    lookup_s: float = math.inf
    #: When the reason expires unless it is confirmed.
    doubt_s: float = math.inf
    #: Open while the agent's mechanism is probed, and the bytes received so far.
    probe: "zmq.Socket[bytes] | None" = None
    greeting: bytes = b""
