"""The first message of a training together, by the coordinator."""

from typing import Literal

import msgspec

from mdp import __version__
from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import Plan
from partitioner.crew.averaging.groups import TIMEOUT_S
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import NetworkSync, SyncPlan
from partitioner.run.settings import Settings

Ending = Literal[".safetensors", ".pth", ".pt", ".bin"]


class Begin(Record, frozen=True, kw_only=True):
    """Facts that a trainer needs before it can join."""

    version: str
    names: tuple[str, ...]
    settings: Settings
    plan: Plan
    #: None where trainers and lines are measured, or candidates are tried.
    crew: SyncPlan | None = None
    facts: Facts | None = None
    #: The candidates that are tried, instead of a training.
    trials: tuple[NetworkSync, ...] = ()
    #: Timeout of the groups in which trainers meet.
    meeting_s: float = TIMEOUT_S
    #: Sub-models that start from the user's weights, and how the files' names end.
    weights: dict[int, Ending] = msgspec.field(default_factory=dict)


def begin_of(address: str, said: bytes) -> Begin:
    """Read what the coordinator says to a trainer before it joins; raises InputError."""
    try:
        return msgspec.msgpack.decode(said, type=Begin)
    except msgspec.DecodeError as error:
        raise InputError(
            f"{address}: expected a coordinator of version {__version__}: {error}"
        ) from error
