"""Events of the client's connections, and their keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from mdp.protocol.messages import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """This client's key pair, and the public key of every agent that has one, by device."""

    public: str
    secret: str = field(repr=False)
    agents: Mapping[str, str]
    #: Second keys, of devices whose key is being replaced.
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
    """The connection to a device has ended; messages in transit are lost."""

    device: str


TransportEvent = Received | Connected | Disconnected
