"""Whom an agent lets in, read again while it serves; what is wrong lets nobody in."""

import datetime
from collections.abc import Mapping
from pathlib import Path

from mdp.formats.keys import AllowedClient, Limits, load_allowed, load_clients
from mdp.protocol.messages import as_line


class AllowedClients:
    """The clients in `--clients`, by public key."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError unless at least one is allowed and all files are right."""
        self._path = path
        self._clients: Mapping[str, AllowedClient] = load_allowed(path)
        #: What was wrong when the files were read last.
        self.trouble = ""

    def read_again(self) -> str:
        """Read the files once more; returns what came of it, for people.

        If a file is wrong, nobody is allowed who was not before, nor anybody whose file is wrong.
        """
        clients, problems = load_clients(self._path)
        if not problems:
            self._clients, self.trouble = clients, ""
            return f"{len(clients)} clients allowed"
        self._clients = {key: kept for key, kept in clients.items() if key in self._clients}
        self.trouble = as_line(f"clients: {'; '.join(problems)}")
        return as_line(f"{len(self._clients)} clients allowed, no new ones: {'; '.join(problems)}")

    def name(self, key: str) -> str:
        """What the file of `key` is called; empty for a key that is not allowed."""
        client = self._clients.get(key)
        return "" if client is None else client.name

    def allowed(self, now: datetime.datetime) -> frozenset[str]:
        """Keys that are let in at `now`."""
        return frozenset(
            key
            for key, client in self._clients.items()
            if client.limits.expires is None or now < client.limits.expires
        )

    def limits(self) -> dict[str, Limits]:
        """Limits by key."""
        return {key: client.limits for key, client in self._clients.items()}

    def connections(self) -> dict[str, int]:
        """Connections that a key may have, where its limits say so."""
        limits = self.limits().items()
        return {key: own.connections for key, own in limits if own.connections is not None}
