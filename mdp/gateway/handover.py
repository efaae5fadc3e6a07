"""Messages between a gateway and its workers: a head in msgpack, then pictures as they are. Pure.

Both ends are of one program of one version; heads are decoded by their types all the same.
"""

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mdp.errors import (
    ConfigError,
    DeadlineExceeded,
    InferenceError,
    InputError,
    MDPError,
    PictureError,
    QuorumNotMet,
    WireError,
)
from mdp.fusion.fuse import Fusion
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction

#: Lengths of a message's head and of the pictures behind it.
_LENGTHS = struct.Struct(">IQ")
#: Bytes of a head, and of all pictures of one request, which bodies bound first.
MAX_HEAD_BYTES, MAX_PICTURES_BYTES = 2**26, 2**28
#: Errors that travel as themselves; others as the nearest of these that they are.
_ERRORS: dict[str, type[MDPError]] = {
    kind.__name__: kind
    for kind in (
        DeadlineExceeded,
        QuorumNotMet,
        InferenceError,
        PictureError,
        InputError,
        ConfigError,
        MDPError,
    )
}

Buffer = bytes | bytearray | memoryview


class WorkerFleet(Struct, frozen=True, kw_only=True):
    """A fleet as a worker connects to it: its file, and a client's options."""

    path: str
    fusion: Fusion = "stacked"
    key: str | None = None
    insecure: bool = False
    cascade: bool = False


class Opening(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a worker."""

    #: By the models' names.
    fleets: dict[str, WorkerFleet]
    #: Pictures that it decodes at a time.
    slots: int


class Asked(Struct, frozen=True, kw_only=True, tag=True):
    """Pictures of one request."""

    number: int
    model: str
    deadline_ms: float
    #: The machine's monotonic clock at the call, in seconds.
    at_s: float
    traceparent: str = ""
    #: Of each picture its bytes, and the shape of pixels; no shape of a file.
    pictures: list[tuple[int, tuple[int, ...]]]


class DevicesLeftOut(Struct, frozen=True, kw_only=True, tag=True):
    """All devices of a fleet that later requests do without."""

    model: str
    devices: list[str]


class WorkerReady(Struct, frozen=True, kw_only=True, tag=True):
    """A worker has opened its fleets."""


class Answered(Struct, frozen=True, kw_only=True, tag=True):
    """The answers to a request's pictures."""

    number: int
    answers: list[Prediction]


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """A request, or of number 0 the opening, without an answer."""

    number: int
    #: The name of an exception; empty for an unforeseen one.
    kind: str
    text: str
    outcomes: dict[str, str] = {}
    codes: dict[str, str] = {}


ToWorker = Opening | Asked | DevicesLeftOut
FromWorker = WorkerReady | Answered | Failed


def encode(message: ToWorker | FromWorker, pictures: Sequence[Buffer] = ()) -> list[Buffer]:
    """The parts of a message in their order."""
    head = msgspec.msgpack.encode(message)
    length = sum(memoryview(picture).nbytes for picture in pictures)
    return [_LENGTHS.pack(len(head), length) + head, *pictures]


async def read_to_worker(reader: asyncio.StreamReader) -> tuple[ToWorker, memoryview]:
    """The next message to a worker, with its pictures; raises IncompleteReadError, WireError."""
    head, content = await _read(reader)
    return _decode(head, ToWorker), memoryview(content)


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker:
    """The next message from a worker; raises IncompleteReadError, WireError."""
    head, _ = await _read(reader)
    message: FromWorker = _decode(head, FromWorker)
    return message


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    length, behind = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if length > MAX_HEAD_BYTES or behind > MAX_PICTURES_BYTES:
        raise WireError(f"expected a message between gateway and worker, got {length} bytes")
    head = await reader.readexactly(length)
    return head, await reader.readexactly(behind) if behind else b""


def _decode(head: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"expected a message between gateway and worker: {error}") from error


def ask(
    number: int,
    model: str,
    pictures: Sequence[Picture],
    deadline_ms: float,
    at_s: float,
    traceparent: str = "",
) -> list[Buffer]:
    """The parts of a request about `pictures`, files' bytes or uint8 `[H, W, 3]`."""
    told: list[tuple[int, tuple[int, ...]]] = []
    contents: list[Buffer] = []
    for picture in pictures:
        if isinstance(picture, np.ndarray):
            content = np.ascontiguousarray(picture).reshape(-1).data
            told.append((content.nbytes, picture.shape))
        else:
            assert isinstance(picture, bytes | bytearray | memoryview)
            content = memoryview(picture)
            told.append((content.nbytes, ()))
        contents.append(content)
    head = Asked(
        number=number,
        model=model,
        deadline_ms=deadline_ms,
        at_s=at_s,
        traceparent=traceparent,
        pictures=told,
    )
    return encode(head, contents)


def pictures_of(asked: Asked, content: memoryview) -> list[Picture]:
    """The pictures of a request, without a copy; raises WireError."""
    found: list[Picture] = []
    at = 0
    for size, shape in asked.pictures:
        part, at = content[at : at + size], at + size
        if len(part) != size:
            raise WireError(f"expected {size} bytes of a picture, got {len(part)}")
        found.append(np.frombuffer(part, np.uint8).reshape(shape) if shape else part)
    return found


def failure_of(number: int, error: BaseException) -> Failed:
    """`error` as it travels."""
    if not isinstance(error, MDPError):
        return Failed(number=number, kind="", text=f"{type(error).__name__}: {error}")
    kind = next(name for name, known in _ERRORS.items() if isinstance(error, known))
    outcomes: Mapping[str, str] = getattr(error, "outcomes", {})
    codes: Mapping[str, str] = getattr(error, "codes", {})
    return Failed(
        number=number, kind=kind, text=str(error), outcomes=dict(outcomes), codes=dict(codes)
    )


def error_of(failed: Failed) -> Exception:
    """The error that has travelled; RuntimeError for an unforeseen one."""
    kind = _ERRORS.get(failed.kind)
    if kind is None:
        return RuntimeError(f"in a worker: {failed.text}")
    if issubclass(kind, InferenceError):
        return kind(failed.text, failed.outcomes, failed.codes)
    return kind(failed.text)
