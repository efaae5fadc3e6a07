"""What the desk of a training together says first."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
from torch._C._distributed_c10d import TCPStore

from mdp import __version__
from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import Plan
from partitioner.crew.exchange.groups import TIMEOUT_S
from partitioner.crew.exchange.store import put, reaching
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
    #: Timeout of the groups in which trainers meet.
    meeting_s: float = TIMEOUT_S
    #: Sub-models that start from the user's weights, and how the files' names end.
    weights: dict[int, Ending] = msgspec.field(default_factory=dict)


class _Version(msgspec.Struct):
    """What anyone may read; desks of other versions say more here."""

    version: str


def say_version(store: TCPStore) -> None:
    """Let trainers know the desk's version, before they show their token."""
    put(store, "begin", msgspec.json.encode(_Version(__version__)))


def check_version(address: str, store: TCPStore) -> None:
    """Raise InputError for a desk of another version."""
    with reaching(store):
        said = store.get("begin")
    with _decoding(address):
        version = msgspec.json.decode(said, type=_Version).version
    if version != __version__:
        raise InputError(f"{address}: the desk has version {version}, this is {__version__}")


def begin_of(address: str, said: bytes) -> Begin:
    """What the desk says to a trainer that has shown its token; raises InputError."""
    with _decoding(address):
        return msgspec.json.decode(said, type=Begin)


@contextmanager
def _decoding(address: str) -> Iterator[None]:
    try:
        yield
    except msgspec.DecodeError as error:
        raise InputError(f"{address}: expected a desk of version {__version__}: {error}") from error
