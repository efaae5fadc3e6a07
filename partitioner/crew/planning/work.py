"""The networks to train, and how quick and large it is on a trainer. Pure."""

from dataclasses import dataclass
from typing import Literal

from partitioner.crew.coordinator.sizes import CodecName
from partitioner.crew.planning.costs import (
    FORWARD,
    PICTURE_COPIES,
    WORKING_BYTES,
    Arithmetic,
    What,
    memory_bytes,
)
from partitioner.crew.planning.facts import ANSWERS, Trainer

#: Weights that a network's training begins with: given ones, those cut from the teacher's or of an
#: earlier sub-model, or drawn ones.
Start = Literal["given", "cut", "drawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWork:
    """One network: `teacher` or `member-K`."""

    name: str
    #: Of its parameters in fp32.
    size_bytes: float
    #: Of one epoch.
    pictures: int
    epochs: int
    start: Start = "drawn"
    #: Pictures of a step of all trainers together.
    batch: int = 64
    #: A training step's work, for trainers whose pace was not measured; 0: unknown.
    gflop_per_picture: float = 0.0
    #: Kept for the backward pass, for each picture of a step.
    activation_bytes: float = 0.0
    #: Of the output of one block for a picture, and the number of blocks: for stages.
    boundary_bytes: float = 0.0
    blocks: int = 0
    #: Of a picture as the network takes it: for stages.
    picture_bytes: float = 0.0
    arithmetic: Arithmetic = "fp32"

    @property
    def all_pictures(self) -> int:
        """Pictures of all epochs."""
        return self.pictures * self.epochs

    def memory_bytes(
        self,
        what: What,
        codec: CodecName,
        trainers: int,
        *,
        outer: bool = False,
        masked: bool = False,
        received: float = 0.0,
    ) -> float:
        """Memory of one of so many trainers."""
        here = -(-self.batch // trainers)
        kept = here * self.activation_bytes
        return memory_bytes(
            what, codec, self.size_bytes, kept, outer=outer, masked=masked, received=received
        )

    def stage_bytes(
        self, blocks: float, in_flight: int, micro_batches: int, *, is_first: bool
    ) -> float:
        """Memory of a stage that keeps so many of a batch's micro-batches.

        The first one has the pictures of a batch, and copies of those that it keeps. By what
        pipelines were measured to have (benchmarks.crew.stages).
        """
        kept = min(in_flight, micro_batches) * self.batch / micro_batches
        network_bytes = memory_bytes("gradients", "fp32", self.size_bytes)
        network_bytes += kept * self.activation_bytes
        found = WORKING_BYTES[self.arithmetic] + blocks * network_bytes / self.blocks
        if is_first:
            copies = PICTURE_COPIES[self.arithmetic]
            found += (self.batch + copies * kept) * self.picture_bytes
        return found

    def most_blocks(self, memory_bytes: float, in_flight: int, micro_batches: int) -> int:
        """The blocks that fit in so much memory, in whatever stage."""
        none, one = (self.stage_bytes(n, in_flight, micro_batches, is_first=True) for n in (0, 1))
        return max(0, int((memory_bytes - none) // (one - none)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPasses:
    """The teacher's answers, or what the successors of another network learn from, once."""

    #: Of all variants.
    pictures: int
    #: Numbers of a picture's outputs, which have two bytes each.
    numbers: int
    network: str = "teacher"
    gflop_per_picture: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Networks that are to be trained: the teacher, if any, then the members in their order."""

    networks: tuple[NetworkWork, ...]
    answers: FrozenPasses | None = None
    #: Of each member but the last, where later ones learn from its outputs.
    outputs: tuple[FrozenPasses, ...] = ()

    def of(self, name: str) -> NetworkWork:
        """A network by its name; raises KeyError."""
        return {network.name: network for network in self.networks}[name]


def pace(trainer: Trainer, network: NetworkWork | FrozenPasses) -> float:
    """Pictures/s of a trainer alone; as measured, else by its arithmetic, else 0."""
    paces = trainer.pictures_per_s
    if isinstance(network, FrozenPasses) and network.network != "teacher":
        measured = paces.get(network.network)
        measured = None if measured is None else measured / FORWARD
    else:
        measured = paces.get(network.name if isinstance(network, NetworkWork) else ANSWERS)
    if measured is not None:
        return measured
    if trainer.gflops and network.gflop_per_picture:
        return trainer.gflops / network.gflop_per_picture
    return 0.0
