"""What the desk of a training together says first."""

from typing import Literal

import msgspec
from torch._C._distributed_c10d import TCPStore

from mdp import __version__
from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import Plan
from partitioner.crew.exchange.store import reaching
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.syncplan import SyncPlan
from partitioner.run.settings import Settings

Ending = Literal[".safetensors", ".pth", ".pt", ".bin"]


class Begin(Record, frozen=True, kw_only=True):
    """What a trainer has to know before it can join."""

    version: str
    names: tuple[str, ...]
    settings: Settings
    plan: Plan
    #: None where trainers and lines are measured.
    crew: SyncPlan | None = None
    facts: Facts | None = None
    #: Sub-models that start from the user's weights, and how the files' names end.
    weights: dict[int, Ending] = msgspec.field(default_factory=dict)


class _Version(msgspec.Struct):
    """What of Begin every version has."""

    version: str


def begin_of(address: str, store: TCPStore) -> Begin:
    """What the desk says first; raises InputError for another version."""
    with reaching(store):
        said = store.get("begin")
    try:
        version = msgspec.json.decode(said, type=_Version).version
        if version != __version__:
            raise InputError(f"{address}: the desk has version {version}, this is {__version__}")
        return msgspec.json.decode(said, type=Begin)
    except msgspec.DecodeError as error:
        raise InputError(f"{address}: expected a desk of version {__version__}: {error}") from error
