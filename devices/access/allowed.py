"""The clients that an agent allows, reloaded while it serves; a wrong file allows none."""

import contextlib
import datetime
import stat
from collections.abc import Mapping
from pathlib import Path

from mdp.formats.keys import LIMITS, PUBLIC, AllowedClient, ClientLimits, load_allowed, load_clients
from mdp.protocol.messages import as_line


class AllowedClients:
    """The clients in `--clients`, by public key."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError unless at least one is allowed and all files are right."""
        self._path = path
        self._read = self._seen = self._state()
        self._clients: Mapping[str, AllowedClient] = load_allowed(path)
        #: Those of before a reload, while their connections are ended.
        self._leaving: Mapping[str, AllowedClient] = {}
        #: What was wrong at the last reload.
        self.error = ""

    def reload(self) -> str:
        """Read the files again; returns the result as a sentence.

        If a file is wrong, no client is added, and the clients of wrong files are removed. Names
        of those that are removed are known until `forget_leaving`.
        """
        self._leaving = self._clients
        self._read = self._seen = self._state()
        clients, problems = load_clients(self._path)
        if not problems:
            self._clients, self.error = clients, ""
            return f"{len(clients)} clients allowed"
        self._clients = {key: kept for key, kept in clients.items() if key in self._clients}
        self.error = as_line(f"clients: {'; '.join(problems)}")
        return as_line(f"{len(self._clients)} clients allowed, no new ones: {'; '.join(problems)}")

    def have_changed(self) -> bool:
        """Tell whether the files are others than were read, and the same as at the last call.

        So that a file which is being copied is read when it is complete.
        """
        before, self._seen = self._seen, self._state()
        return self._read != self._seen == before

    def _state(self) -> frozenset[tuple[str, int, int, int]]:
        """Name, inode, size and time of change, of its mode too, of every file that counts."""
        files = [self._path, self._path.with_suffix(LIMITS)]
        with contextlib.suppress(OSError):
            files += [one for one in self._path.iterdir() if one.suffix in (PUBLIC, LIMITS)]
        found = []
        for file in files:
            with contextlib.suppress(OSError):
                status = file.stat()
                # A folder's own time changes with any file in it.
                if not stat.S_ISDIR(status.st_mode):
                    found.append((file.name, status.st_ino, status.st_size, status.st_ctime_ns))
        return frozenset(found)

    def name(self, key: str) -> str:
        """The name of `key`'s file; empty for a key that is not allowed."""
        client = self._clients.get(key) or self._leaving.get(key)
        return "" if client is None else client.name

    def forget_leaving(self) -> None:
        """Take in that the connections of removed clients have ended."""
        self._leaving = {}

    def valid_keys(self, now: datetime.datetime) -> frozenset[str]:
        """Keys that have not expired at `now`."""
        return frozenset(
            key
            for key, client in self._clients.items()
            if client.limits.expires is None or now < client.limits.expires
        )

    def limits(self) -> dict[str, ClientLimits]:
        """Limits by key."""
        return {key: client.limits for key, client in self._clients.items()}

    def may_push(self, key: str) -> bool:
        """Tell whether a client may push bundles. Any thread."""
        client = self._clients.get(key)
        return client is not None and client.limits.push

    def may_record(self, key: str) -> bool:
        """Tell whether a client may fetch pictures of the camera. Any thread."""
        client = self._clients.get(key)
        return client is not None and client.limits.record

    def may_mask(self, key: str) -> bool:
        """Tell whether a client may change the camera's mask. Any thread."""
        client = self._clients.get(key)
        return client is not None and client.limits.mask

    def connections(self) -> dict[str, int]:
        """Connection limits by key, where a key has one of its own."""
        limits = self.limits().items()
        return {key: own.connections for key, own in limits if own.connections is not None}
