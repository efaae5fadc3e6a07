"""What an agent's queue holds: an admitted request and what answers it takes."""

from msgspec import Struct

from devices.camera.frames import Sighting
from mdp.protocol.messages import Buffer, Infer, Look


class Job(Struct, frozen=True, kw_only=True, eq=False):
    """One admitted request; `deadline_s` is this device's own reading of the budget's end."""

    #: Where the reply goes.
    peer: bytes
    #: Who has to share fairly with others.
    client: str
    infer: Infer | Look
    #: Of an Infer; nothing for a Look.
    pixels: Buffer
    arrived_s: float
    deadline_s: float
    #: Of a Look.
    sighting: Sighting | None = None

    @property
    def digest(self) -> str:
        """Of the bundle that answers it."""
        return self.infer.digest
