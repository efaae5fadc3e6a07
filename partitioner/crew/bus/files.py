"""Files of a run: piece by piece from disk to disk, with a digest, whole or not at all.

Whoever has a file waits to be asked for each piece of it: the trainer that hands one in by the
coordinator, the coordinator by every trainer that fetches it. So of a file no more than one piece
for each trainer that sends or fetches it is in anybody's memory.
"""

import contextlib
import hashlib
import itertools
import os
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from torch.distributed import DistError

from mdp.errors import InputError, TransferError
from mdp.files import replacing
from mdp.formats.bundle import sha256_of
from partitioner.crew.bus.control import CoordinatorClient
from partitioner.crew.messages import (
    AnyFileMessage,
    FileHead,
    FileMessage,
    FileQuery,
    Gone,
    NoFile,
    Piece,
    PieceQuery,
    Rank,
)

PIECE_BYTES = 4_000_000
_CHANGED = "it has changed meanwhile"


class Files(Protocol):
    """Files of the run by name, which one trainer hands in and others get."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that went from here to other trainers through the coordinator's store."""

    def send(self, name: str, path: Path) -> str:
        """Hand a file in, unless there is one; returns the SHA-256 of what others get."""

    def has(self, name: str) -> bool:
        """Tell whether a file was handed in."""

    def fetch(self, name: str, path: Path) -> bool:
        """Write the file to `path`, whole or not at all; waits until there is one.

        Returns whether `path` is another one now.
        """


class TrainerFiles:
    """Files of a run at a trainer, which the coordinator keeps; used by one thread."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client, self._rank = client, client.rank

    @property
    def bytes_sent(self) -> int:
        """Bytes of files, and of rows, which have the same connection."""
        return self._client.bytes_sent

    def send(self, name: str, path: Path) -> str:
        """Hand a file in, unless there is one; returns the SHA-256 of what others get.

        Raises CoordinatorLost, and TransferError where the coordinator cannot keep it.
        """
        digest, size = sha256_of(path), path.stat().st_size
        self._client.append(FileHead(rank=self._rank, name=name, bytes=size, sha256=digest))
        while not isinstance(message := self._next(name), FileHead):
            if isinstance(message, NoFile):
                raise TransferError(f"{path}: the coordinator cannot keep it: {message.reason}")
            if isinstance(message, PieceQuery):
                number = message.number
                data = read_piece(path, number)
                self._client.send(Piece(rank=self._rank, name=name, number=number, data=data))
        return message.sha256

    def has(self, name: str) -> bool:
        """Tell whether a file was handed in; raises CoordinatorLost."""
        self._client.append(FileQuery(rank=self._rank, name=name, waits=False))
        while not isinstance(message := self._next(name), FileHead | NoFile):
            pass
        return isinstance(message, FileHead)

    def fetch(self, name: str, path: Path) -> bool:
        """Wait for a file and write it to `path`, unless it is the same; whether it was another.

        Raises CoordinatorLost, and what `write_file` does.
        """
        self._client.append(FileQuery(rank=self._rank, name=name, waits=True))
        while not isinstance(head := self._next(name), FileHead):
            pass

        def piece(number: int) -> bytes:
            self._client.append(PieceQuery(rank=self._rank, name=name, number=number))
            while not isinstance(message := self._next(name), Piece):
                if isinstance(message, NoFile):
                    raise TransferError(f"{path}: {message.reason}")
            return message.data

        return write_file(path, head.bytes, head.sha256, piece)

    def _next(self, name: str) -> AnyFileMessage:
        while True:
            message = self._client.reply()
            # Others are of passes that are over.
            if isinstance(message, FileMessage) and message.name == name:
                return message


class _KeptFile(NamedTuple):
    """A file that is on the coordinator's disk."""

    path: Path
    bytes: int
    sha256: str


class CoordinatorFiles:
    """Files of a run at the coordinator: its own where they are, those of trainers in `folder`.

    The folder is made anew, and removed at the end. A file of the coordinator has to stay as it is
    for as long as others may fetch it. `post` sends an answer, by the thread of `serve`;
    `digest_of` is what is known of a file's SHA-256 by its name, empty where nothing is.
    """

    def __init__(
        self,
        folder: Path,
        post: Callable[[AnyFileMessage], None],
        digest_of: Callable[[str], str] = lambda name: "",
    ) -> None:
        self._folder, self._post, self._digest_of = folder, post, digest_of
        self._kept: dict[str, _KeptFile] = {}
        self._changed = threading.Condition()
        #: Files that trainers hand in, and where they are written.
        self._arriving: dict[tuple[Rank, str], tuple[FileHead, Path]] = {}
        self._numbers = itertools.count()
        #: Trainers that wait for a file, by its name.
        self._waiting: dict[str, list[Rank]] = {}
        #: None: the end.
        self._inbox: queue.SimpleQueue[AnyFileMessage | Gone | str | None] = queue.SimpleQueue()
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self.serve, name="crew-files", daemon=True)

    def __enter__(self) -> "CoordinatorFiles":
        shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._inbox.put(None)
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def bytes_sent(self) -> int:
        """Bytes of pieces that trainers were sent."""
        return self._sent_bytes

    def send(self, name: str, path: Path) -> str:
        """Offer an own file, unless there is one; returns the SHA-256 of what others get."""
        return self._keep(name, _KeptFile(path, path.stat().st_size, sha256_of(path))).sha256

    def has(self, name: str) -> bool:
        """Tell whether a file was handed in."""
        return name in self._kept

    def fetch(self, name: str, path: Path) -> bool:
        """Wait for a file and write it to `path`, unless it is the same; whether it was another.

        Raises what `write_file` does, and TransferError where it is not that of a known digest.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._kept)
            kept = self._kept[name]
        wanted = self._digest_of(name)
        if wanted and kept.sha256 != wanted:
            raise TransferError(
                f"{path}: expected the file that its trainer has told of, SHA-256 {wanted}, "
                f"got {kept.sha256}"
            )
        return write_file(path, kept.bytes, kept.sha256, lambda n: read_piece(kept.path, n))

    def put(self, message: AnyFileMessage | Gone) -> None:
        """Take a trainer's message, or that it has gone, for the thread of `serve`."""
        self._inbox.put(message)

    def serve(self) -> None:
        """Answer messages until the end."""
        with contextlib.suppress(DistError):  # of a store that ends
            while (message := self._inbox.get()) is not None:
                if not isinstance(message, str):
                    self.handle(message)
                    continue
                for rank in self._waiting.pop(message, ()):
                    self._post(self._head(rank, message))

    def handle(self, message: AnyFileMessage | Gone) -> None:
        """Answer one message of a trainer."""
        match message:
            case Gone(rank=rank):
                self._forget(rank)
            case FileQuery(rank=rank, name=name) if name in self._kept:
                self._post(self._head(rank, name))
            case FileQuery(rank=rank, name=name, waits=True):
                self._waiting.setdefault(name, []).append(rank)
            case FileQuery(rank=rank, name=name):
                self._post(NoFile(rank=rank, name=name))
            case PieceQuery():
                self._give(message)
            case FileHead(rank=rank, name=name):
                self._arriving[rank, name] = message, self._folder / str(next(self._numbers))
                self._write(rank, name, b"")
            case Piece(rank=rank, name=name, data=b"") if (rank, name) in self._arriving:
                self._refuse(rank, name, _CHANGED)
            case Piece(rank=rank, name=name, data=data) if (rank, name) in self._arriving:
                self._write(rank, name, data)

    def _head(self, rank: Rank, name: str) -> FileHead:
        kept = self._kept[name]
        return FileHead(rank=rank, name=name, bytes=kept.bytes, sha256=kept.sha256)

    def _give(self, wanted: PieceQuery) -> None:
        rank, name = wanted.rank, wanted.name
        kept = self._kept.get(name)
        try:
            data = read_piece(kept.path, wanted.number) if kept else b""
        except OSError as error:
            reason = f"the coordinator cannot read its {name}: {error.strerror}"
            self._post(NoFile(rank=rank, name=name, reason=reason))
            return
        self._post(Piece(rank=rank, name=name, number=wanted.number, data=data))
        self._sent_bytes += len(data)

    def _write(self, rank: Rank, name: str, data: bytes) -> None:
        """Write what came of a file; then ask for more of it, or offer it to all."""
        head, path = self._arriving[rank, name]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
                size = file.tell()
            # Of two that hand it in, the first one that is whole counts.
            misses = name not in self._kept and size < head.bytes and size % PIECE_BYTES == 0
            differs = name not in self._kept and not misses and sha256_of(path) != head.sha256
        except OSError as error:
            self._refuse(rank, name, f"{path}: cannot be kept: {error.strerror}")
            return
        if misses:
            self._post(PieceQuery(rank=rank, name=name, number=size // PIECE_BYTES))
        elif differs:
            self._refuse(rank, name, _CHANGED)
        else:
            del self._arriving[rank, name]
            if self._keep(name, _KeptFile(path, head.bytes, head.sha256)).path != path:
                _delete(path)
            self._post(self._head(rank, name))

    def _refuse(self, rank: Rank, name: str, reason: str) -> None:
        """Give a file up that a trainer hands in."""
        _delete(self._arriving.pop((rank, name))[1])
        self._post(NoFile(rank=rank, name=name, reason=reason))

    def _forget(self, rank: Rank) -> None:
        """Give up what a trainer hands in that is gone, and wait with it for no file."""
        for key in [key for key in self._arriving if key[0] == rank]:
            _delete(self._arriving.pop(key)[1])
        for name, ranks in self._waiting.items():
            self._waiting[name] = [one for one in ranks if one != rank]

    def _keep(self, name: str, kept: _KeptFile) -> _KeptFile:
        """Offer a file to all, unless there is one; returns the one that there is."""
        with self._changed:
            kept = self._kept.setdefault(name, kept)
            self._changed.notify_all()
        self._inbox.put(name)
        return kept


def _delete(path: Path) -> None:
    """Delete a file of the folder, which goes at the end in any case."""
    with contextlib.suppress(OSError):
        path.unlink()


def read_piece(path: Path, number: int) -> bytes:
    """A piece of a file, from its place on disk."""
    with path.open("rb") as file:
        file.seek(number * PIECE_BYTES)
        return file.read(PIECE_BYTES)


def write_file(path: Path, size: int, sha256: str, piece: Callable[[int], bytes]) -> bool:
    """Write a file of `size` bytes from its pieces, unless it is there; whether it was another.

    Raises InputError where it cannot be written, and TransferError where the pieces are not those
    of this digest; either way `path` stays as it was.
    """
    if path.exists() and sha256_of(path) == sha256:
        return False
    digest, got_bytes = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                for number in range(-(-size // PIECE_BYTES)):
                    data = piece(number)
                    digest.update(data)
                    got_bytes += file.write(data)
            if (got_bytes, digest.hexdigest()) != (size, sha256):
                raise TransferError(f"{path}: expected {size} bytes of the coordinator's digest")
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise InputError(f"{path}: cannot be written: {reason}") from error
    return True
