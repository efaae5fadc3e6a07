"""Messages that send a bundle to an agent or fetch the one that it serves.

A file is one of `PART_FILES`: no message has a path.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from mdp.files import Record
from mdp.formats.bundle import FileEntry, Sha256
from mdp.formats.device_part import PartFile, Version
from mdp.protocol.fields import RequestId, Text, check_printable

#: Of a file, in one message: 5 ms of a link of 100 Mbit/s.
PIECE_BYTES = 64 * 1024

Offset = Annotated[int, Meta(ge=0, le=2**40)]


class BundleRequest(Record, frozen=True):
    """Client -> agent: tell the state; accept these files; serve this version. No buffer."""

    kind: ClassVar[int] = 8
    buffers: ClassVar[int] = 0

    request_id: RequestId
    action: Literal["state", "offer", "switch"]
    #: SHA-256 of the offered or wanted manifest; absent for `state`.
    manifest: Sha256 | None = None
    #: The offered files.
    files: dict[PartFile, FileEntry] = msgspec.field(default_factory=dict)


class BundlePiece(Record, frozen=True):
    """Client -> agent: part of an offered file, the only buffer, to be appended at `offset`."""

    kind: ClassVar[int] = 9
    buffers: ClassVar[int] = 1

    request_id: RequestId
    manifest: Sha256
    file: PartFile
    offset: Offset


class BundleRead(Record, frozen=True):
    """Client -> agent: request up to PIECE_BYTES of a file of the current version. No buffer."""

    kind: ClassVar[int] = 10
    buffers: ClassVar[int] = 0

    request_id: RequestId
    manifest: Sha256
    file: PartFile
    offset: Offset


class BundleState(Record, frozen=True):
    """Agent -> client: the reply to a BundleRequest or BundlePiece. No buffer."""

    kind: ClassVar[int] = 11
    buffers: ClassVar[int] = 0

    request_id: RequestId
    #: The agent's name in bundles' plans.
    device: Text
    #: The version to serve, also after a restart, and the one for a rollback; None before a first.
    current: Version | None
    previous: Version | None
    #: The one that is served in fact: after three failures in a row, the previous one.
    serves: Version | None
    #: Bytes of each offered file that are there.
    received: dict[PartFile, Offset]
    #: Whether a switch is under way, and why the last one failed.
    switching: bool
    error: Text

    def __post_init__(self) -> None:
        check_printable(self, "device", "error")


class BundleContent(Record, frozen=True):
    """Agent -> client: the reply to a BundleRead, with the bytes from `offset`."""

    kind: ClassVar[int] = 12
    buffers: ClassVar[int] = 1

    request_id: RequestId
    #: Of the whole file; 0 for a signature that is not there.
    size_bytes: Offset


class BundleRefusal(Record, frozen=True):
    """Agent -> client: why a message about bundles is refused. No buffer."""

    kind: ClassVar[int] = 13
    buffers: ClassVar[int] = 0

    request_id: RequestId
    text: Text

    def __post_init__(self) -> None:
        check_printable(self, "text")
