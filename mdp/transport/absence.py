"""What is known of an agent to which there is no connection. Pure, but for the socket it names."""

import math
from dataclasses import dataclass

import zmq

#: Why an agent is there, but not for this client.
NOT_ACCEPTED = "the agent does not accept this client's key"
NO_MORE = "the agent allows no more connections of this client's key"
ANOTHER_KEY = "the agent's key is another one than the fleet file's"
AGENT_IS_PLAIN = "one side is encrypted, the other plain: the agent has no key"
CLIENT_IS_PLAIN = "one side is encrypted, the other plain: the fleet file has no key of the agent"
UNASKED = "the agent sends messages that nobody asks for"
#: By what the agent speaks, and whether this client speaks encrypted to it.
REASONS = {
    ("CURVE", True): ANOTHER_KEY,
    ("CURVE", False): CLIENT_IS_PLAIN,
    ("NULL", True): AGENT_IS_PLAIN,
}


@dataclass(slots=True)
class Absence:
    """What is known of an agent to which there is no connection."""

    #: Handshakes that failed in a row.
    failures: int = 0
    #: When to dial with a new socket.
    redial_s: float = math.inf
    #: When to see whether the name of its host has an address by now, or another one.
    lookup_s: float = math.inf
    #: When to drop the reason, unless it is seen again before.
    doubt_s: float = math.inf
    #: Open while the agent is asked how it wants to be spoken to, and what it has said so far.
    question: "zmq.Socket[bytes] | None" = None
    heard: bytes = b""
