"""Files over the desk's store: in pieces, with a digest, written whole or not at all."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from mdp.errors import InputError, TransferError
from mdp.files import replacing
from mdp.formats.bundle import sha256_of
from partitioner.crew.exchange.store import SignedStore, reaching

PIECE_BYTES = 4_000_000

#: Readers that may still come: no number of them deletes a file of the run.
EVERYBODY = 2**31


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts of a file that precede its pieces."""

    bytes: int
    pieces: int
    sha256: str
    #: How many trainers fetch it; the last one deletes it.
    readers: int


def send_file(store: SignedStore, key: str, path: Path, readers: int) -> Head:
    """Offer a file under `key` to so many readers; returns the head of what others get.

    That is the file of another trainer of the crew where it was first. Raises Tampered where the
    head is not of the crew. A file stays in the desk's memory until all have it, or until
    `forget_file`. The head is sent last, so that nobody sees a file whose sender was lost; several
    may send at once.
    """
    if store.check([f"file/{key}"]):
        return _head(store, key)
    digest, sent_bytes, pieces = sha256_of(path), 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            store.set(_piece(key, digest, pieces), piece)
            sent_bytes, pieces = sent_bytes + len(piece), pieces + 1
    head = Head(sent_bytes, pieces, digest, readers)
    # Unlike a set, this is answered: the desk has all of it.
    there = store.set_first(f"file/{key}", msgspec.msgpack.encode(head))
    return msgspec.msgpack.decode(there, type=Head)


def _head(store: SignedStore, key: str) -> Head:
    return msgspec.msgpack.decode(store.get(f"file/{key}"), type=Head)


def _piece(key: str, digest: str, number: int) -> str:
    return f"file/{key}/{digest[:16]}/{number}"


def fetch_file(store: SignedStore, key: str, path: Path, sha256: str = "") -> int:
    """Wait for a file and write it to `path`; returns its bytes.

    Waits as long as the store's timeout. Raises InputError where it cannot be written, Tampered,
    and TransferError where it is not what was sent, or not that of a given `sha256`; either way
    `path` stays as it was.
    """
    head = _head(store, key)
    if sha256 and head.sha256 != sha256:
        raise TransferError(
            f"{path}: expected the file that its trainer has told of, SHA-256 {sha256}, "
            f"got {head.sha256}"
        )
    digest, got_bytes = hashlib.sha256(), 0
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                for number in range(head.pieces):
                    piece = store.get(_piece(key, head.sha256, number))
                    digest.update(piece)
                    got_bytes += file.write(piece)
            if (got_bytes, digest.hexdigest()) != (head.bytes, head.sha256):
                raise TransferError(f"{path}: expected {head.bytes} bytes of the desk's digest")
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise InputError(f"{path}: cannot be written: {reason}") from error
    if store.add(f"file/{key}/had", 1) == head.readers:
        forget_file(store, key)
    return got_bytes


def forget_file(store: SignedStore, key: str) -> None:
    """Delete a file that some of its readers will not fetch any more; nothing if it is not there.

    A reader that is at it still raises an error of the store.
    """
    if not store.check([f"file/{key}"]):
        return
    head = _head(store, key)
    pieces = [_piece(key, head.sha256, number) for number in range(head.pieces)]
    for name in (f"file/{key}", f"file/{key}/had", *pieces):
        with contextlib.suppress(RuntimeError):
            store.delete_key(name)


class StoreFiles:
    """Files of a run in the desk's store; used by one thread.

    digest_of: what is known of a file's SHA-256 by its name; empty where nothing is.
    """

    def __init__(
        self, store: SignedStore, digest_of: Callable[[str], str] = lambda name: ""
    ) -> None:
        self._store, self._digest_of = store, digest_of

    def send(self, name: str, path: Path, readers: int = EVERYBODY) -> str:
        """Hand a file in, unless there is one; returns the SHA-256 of what others get.

        The last of its readers deletes it. Raises DeskLost and Tampered.
        """
        with reaching(self._store):
            return send_file(self._store, name, path, readers).sha256

    def has(self, name: str) -> bool:
        """Tell whether there is one, which not all its readers have."""
        with reaching(self._store):
            return self._store.check([f"file/{name}"])

    def forget(self, name: str) -> None:
        """Delete a file that nobody needs any more; raises DeskLost."""
        with reaching(self._store):
            forget_file(self._store, name)

    def fetch(self, name: str, path: Path) -> bool:
        """Wait for a file and write it to `path`, unless it is the same; whether it was another.

        Raises DeskLost, and what `fetch_file` does.
        """
        with reaching(self._store):
            if path.exists() and sha256_of(path) == _head(self._store, name).sha256:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch_file(self._store, name, path, self._digest_of(name))
            return True
