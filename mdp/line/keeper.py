"""Writes items with their pictures to a folder of bounded size; layout: `mdp.line.kept`."""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mdp.errors import InputError
from mdp.files import replacing_folder
from mdp.line.kept import RECORD, folder_name, list_kept, picture_name

#: Files and folders take whole blocks.
_BLOCK_BYTES = 4096
#: Errors of a full disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LEFT_OVER = re.compile(r"\..*\.[0-9a-f]{8}\.(partial|old)")


class KeptFolder:
    """The folder of kept items, of which the oldest ones make room for new ones."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Make the folder; raises InputError if it cannot be written, ConfigError if not be read.

        Items that are there already count, and are removed first. What is no item stays.
        """
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: expected a folder or nothing, found a file")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            # A full disk is waited for, as later.
            if error.errno not in _NO_ROOM:
                reason = error.strerror or error
                raise InputError(f"{path}: cannot be made: {reason}") from error
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise InputError(f"{path}: cannot be written")
        self.path, self._most_bytes = path, most_bytes
        #: Folder's name -> its bytes on the disk, the oldest item first.
        self._bytes: dict[str, int] = {}
        for kept in list_kept(path, order="oldest"):
            # Who looks through them may take one away.
            with suppress(OSError):
                self._bytes[kept.folder.name] = _bytes_of(kept.folder)
        if path.is_dir():
            for one in path.iterdir():
                # Of a watcher that was killed.
                if _LEFT_OVER.fullmatch(one.name):
                    shutil.rmtree(one, ignore_errors=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kept items."""
        return sum(self._bytes.values())

    def write(self, item: str, record: bytes, pictures: Mapping[str, bytes]) -> Path:
        """Keep an item, whole or not at all; raises InputError, also on a full disk.

        `pictures` are JPEGs by device. An item whose id was kept before has a name of its own.
        """
        content = record + b"\n"
        needed = _BLOCK_BYTES + sum(map(_blocks, (len(content), *map(len, pictures.values()))))
        if needed > self._most_bytes:
            raise InputError(
                f"{self.path}: item {item} has {needed:,} bytes: expected at most "
                f"{self._most_bytes:,}, all that may be kept"
            )
        self._make_room(needed)
        name, number = folder_name(item), 1
        # What is no item may have the name, too: it stays.
        while name in self._bytes or (self.path / name).exists():
            number += 1
            name = folder_name(f"{item}+{number}")
        folder = self.path / name
        try:
            with replacing_folder(folder) as inside:
                (inside / RECORD).write_bytes(content)
                for device, picture in pictures.items():
                    (inside / picture_name(device)).write_bytes(picture)
        except OSError as error:
            text = f"{folder}: cannot be written: {error.strerror or error}"
            raise InputError(text) from error
        self._bytes[name] = needed
        return folder

    def _make_room(self, needed: int) -> None:
        """Remove the oldest items until `needed` bytes more are within the bound."""
        if self.total_bytes + needed > self._most_bytes:
            # Who looks through them takes some away.
            for name in [one for one in self._bytes if not (self.path / one).is_dir()]:
                del self._bytes[name]
        total = self.total_bytes
        while self._bytes and total + needed > self._most_bytes:
            oldest = next(iter(self._bytes))
            shutil.rmtree(self.path / oldest, ignore_errors=True)
            total -= self._bytes.pop(oldest)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _bytes_of(folder: Path) -> int:
    return _BLOCK_BYTES + sum(_blocks(file.stat().st_size) for file in folder.iterdir())
