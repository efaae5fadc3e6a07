"""Messages of trainers and desk about a frozen pass, and the ends that carry it."""

from typing import Annotated, Protocol

import msgspec

from partitioner.crew.machine.leases import Chunk
from partitioner.run.settings import Autocast


class DeskEnd(Protocol):
    """The desk's end of a log and of mailboxes; one thread uses it."""

    def read(self, timeout_s: float) -> bytes | None:
        """The log's next message, None when there is none within `timeout_s`."""

    def post(self, rank: int, message: bytes) -> None:
        """Put a message into a trainer's mailbox."""

    def close(self, work: str) -> None:
        """Let every trainer, also one that comes later, know that this pass is over."""


class TrainerEnd(Protocol):
    """A trainer's end; one thread uses it."""

    @property
    def rank(self) -> int:
        """The own rank."""

    def append(self, message: bytes) -> None:
        """Append to the log."""

    def next(self, timeout_s: float) -> bytes | None:
        """The mailbox's next message, None when there is none within `timeout_s`."""

    def closed(self, work: str) -> bool:
        """Tell whether this pass is over."""


class FromTrainer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    work: str
    rank: Annotated[int, msgspec.Meta(ge=0)]


class Offer(FromTrainer, frozen=True, tag="offer"):
    """A trainer would take part; `reference` are its outputs for the first pictures, float32."""

    arithmetic: Autocast
    reference: bytes


class Ask(FromTrainer, frozen=True, tag="ask"):
    """A trainer is free."""


class Alive(FromTrainer, frozen=True, tag="alive"):
    """A trainer computes still."""


class Rows(FromTrainer, frozen=True, tag="rows"):
    """One of `parts` pieces of a chunk's rows, output by output."""

    chunk: Chunk
    part: int
    parts: int
    took_s: float
    data: bytes


class Broken(FromTrainer, frozen=True, tag="broken"):
    """A trainer's outputs are of no use."""

    reason: str


class FromDesk(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    work: str


class Compute(FromDesk, frozen=True, tag="compute"):
    chunk: Chunk


class Refuse(FromDesk, frozen=True, tag="refuse"):
    """The trainer takes no part, for a `reason`."""

    reason: str


read_event = msgspec.msgpack.Decoder(Offer | Ask | Alive | Rows | Broken).decode
read_action = msgspec.msgpack.Decoder(Compute | Refuse).decode
encode = msgspec.msgpack.Encoder().encode
