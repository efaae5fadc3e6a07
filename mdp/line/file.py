"""Files to which whole lines are appended, or none."""

import io
from pathlib import Path

from mdp.closing import Closing
from mdp.errors import InputError


class LineFile(Closing):
    """Appends lines to a file."""

    def __init__(self, path: Path) -> None:
        """Raises InputError unless `path` can be written."""
        self._path = path
        try:
            # Without a buffer, a full disk is met where a line is written, and only there.
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        size = self._file.seek(0, io.SEEK_END)
        # The watcher before may have been killed in the middle of a line.
        self._gap = b""
        if size:
            self._file.seek(size - 1)
            self._gap = b"" if self._file.read(1) == b"\n" else b"\n"

    def read_first(self, size: int) -> bytes:
        """The first bytes of what is there, at most `size`."""
        self._file.seek(0)
        return self._file.read(size) or b""

    def append(self, line: bytes) -> None:
        """Append a line, whole or not at all; raises InputError."""
        line = self._gap + line + b"\n"
        before = self._file.seek(0, io.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                # Some file systems write what still fits.
                self._file.truncate(before)
                raise InputError(f"{self._path}: cannot be written: No space left on device")
        except OSError as error:
            raise self._unwritable(error) from error
        self._gap = b""

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RecordFile(LineFile):
    """Appends records to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """Raises InputError unless `path` can be written and is called .jsonl."""
        if path.suffix != ".jsonl":
            raise InputError(f"--out {path}: expected a file that ends in .jsonl, for records")
        super().__init__(path)
