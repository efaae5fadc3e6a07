"""Files over the desk's store: in pieces, with a digest, written whole or not at all."""

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from mdp.errors import InputError, TransferError
from mdp.files import replacing
from partitioner.crew.exchange.store import put

PIECE_BYTES = 4_000_000

#: Readers that may still come: no number of them deletes a file of the run.
EVERYBODY = 2**31


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a file before its pieces."""

    bytes: int
    pieces: int
    sha256: str
    #: How many trainers fetch it; the last one deletes it.
    readers: int


def send_file(store: Store, key: str, path: Path, readers: int) -> int:
    """Offer a file under `key`, unused so far, to so many readers; returns its bytes.

    It stays in the desk's memory until all have it, or until `forget_file`. The head is sent last,
    so that nobody sees a file whose sender was lost.
    """
    digest, sent_bytes, pieces = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            put(store, f"file/{key}/{pieces}", piece)
            sent_bytes, pieces = sent_bytes + len(piece), pieces + 1
    head = Head(sent_bytes, pieces, digest.hexdigest(), readers)
    put(store, f"file/{key}", msgspec.msgpack.encode(head))
    return sent_bytes


def fetch_file(store: Store, key: str, path: Path) -> int:
    """Wait for a file and write it to `path`; returns its bytes.

    Waits as long as the store's timeout. Raises InputError where it cannot be written, and
    TransferError where it is not what was sent; either way `path` stays as it was.
    """
    head = msgspec.msgpack.decode(store.get(f"file/{key}"), type=Head)
    digest, got_bytes = hashlib.sha256(), 0
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                for number in range(head.pieces):
                    piece = store.get(f"file/{key}/{number}")
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


def forget_file(store: Store, key: str) -> None:
    """Delete a file that some of its readers will not fetch any more; nothing if it is not there.

    A reader that is at it still raises an error of the store.
    """
    if not store.check([f"file/{key}"]):
        return
    head = msgspec.msgpack.decode(store.get(f"file/{key}"), type=Head)
    names = [f"file/{key}", f"file/{key}/had", *(f"file/{key}/{n}" for n in range(head.pieces))]
    for name in names:
        with contextlib.suppress(RuntimeError):
            store.delete_key(name)


class StoreFiles:
    """Files of a run in the desk's store; used by one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, name: str, path: Path) -> None:
        """Hand a file in."""
        send_file(self._store, name, path, EVERYBODY)

    def fetch(self, name: str, path: Path) -> None:
        """Write the file to `path`; waits until there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fetch_file(self._store, name, path)
