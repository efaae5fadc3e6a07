"""Follows a fleet file and its bundle, whoever has a client of them; no clock, no thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from mdp.errors import MDPError
from mdp.formats.fleet import Fleet, files_stamp, read_devices


class FleetUser(Protocol):
    """Interface of both clients, as far as following needs it."""

    @property
    def fleet(self) -> Fleet:
        """The fleet as it was read last."""


class FollowedFiles:
    """A fleet file and its bundle, which may change or be wrong for a while."""

    def __init__(self, path: Path, client: FleetUser, report: Callable[[str], None]) -> None:
        """Follow `path`, the fleet file of `client`; raises OSError.

        `report` gets one line on files that stay wrong.
        """
        self._path, self._client, self._report = path, client, report
        self._read = files_stamp(path, client.fleet)
        self._failures = 0
        self._said: set[str] = set()

    @contextmanager
    def following(self) -> Iterator[bool]:
        """Tell whether files have changed, for a block in which they are read again.

        What is wrong with them ends the block, not its caller: they are tried again the next time.
        """
        try:
            # Before they are read, so that no later change goes unseen.
            stamp = files_stamp(self._path, self._client.fleet)
        except OSError as error:
            self._fail(f"{self._path}: cannot be read: {error.strerror or error}")
            yield False
            return
        changed = stamp != self._read
        if changed:
            # By the bundle that the file names now; what is wrong with it is found in the block.
            with suppress(MDPError, OSError):
                stamp = files_stamp(self._path, read_devices(self._path))
        try:
            yield changed
        except (MDPError, OSError) as error:
            self._fail(str(error))
        else:
            self._read, self._failures = stamp, 0
            self._said.clear()

    def _fail(self, text: str) -> None:
        # Files that are being replaced are whole the next time.
        self._failures += 1
        if self._failures > 1 and text not in self._said:
            self._said.add(text)
            self._report(f"{text}; going on with what was read before")
