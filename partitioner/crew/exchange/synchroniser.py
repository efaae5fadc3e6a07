"""From a plan's choices for a network to what its training asks, on one trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from partitioner.crew.exchange.codecs import CodecName
from partitioner.crew.exchange.gradients import Gradients
from partitioner.crew.exchange.mean import Means, Route, Shards
from partitioner.crew.exchange.parameters import Groups, Rounds
from partitioner.crew.machine.events import Trainer
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import EveryStep, Synchroniser

#: Bytes of a bucket where a plan says nothing: torch's own.
_BUCKET_BYTES = 25 * 2**20


class Choices(Protocol):
    """A network's part of a plan; `partitioner.crew.planning.syncplan.NetworkSync` is one."""

    @property
    def what(self) -> Literal["gradients", "parameters"]:
        """What is averaged."""

    @property
    def shares(self) -> Literal["equal", "pace"]:
        """Of gradients: how batches are shared out."""

    @property
    def way(self) -> Route:
        """The route of a mean."""

    @property
    def shards(self) -> Shards:
        """Who averages how much of a vector."""

    @property
    def bucket_bytes(self) -> int | None:
        """Of gradients: how many are averaged at once."""

    def codec_of(self, tensor: str) -> CodecName:
        """The codec of a parameter by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A trainer's place in the crew of one network; trainers by their rank in the control."""

    trainer: Trainer
    groups: Groups
    #: Of all trainers of this network: pictures/s, bytes/s that they can send, sites.
    paces: Mapping[int, float]
    uplink: Mapping[int, float]
    sites: Mapping[int, str]
    #: Whether this trainer keeps checkpoints and the outcome.
    first: bool
    #: Of gradients: this trainer's rank among those that average them, and their group.
    crew: Crew


def synchroniser(network: str, choices: Choices, seat: Seat) -> Synchroniser:
    """What a training of `network` asks on this trainer; used for one training."""
    members = sorted(seat.paces)
    means = Means(route=choices.way, shards=choices.shards, uplink=seat.uplink, sites=seat.sites)
    if choices.what == "parameters":
        return Rounds(
            network,
            seat.trainer,
            seat.groups,
            len(members),
            first=seat.first,
            means=means,
            codec_of=choices.codec_of,
        )
    if len(members) == 1:
        return EveryStep(Crew())
    return Gradients(
        seat.crew,
        means,
        choices.codec_of,
        paces=[seat.paces[rank] for rank in members] if choices.shares == "pace" else (),
        bucket_bytes=choices.bucket_bytes or _BUCKET_BYTES,
        members=tuple(members),
    )
