"""An agent's address and keys, checked before it listens and kept current while it serves."""

import datetime
import resource
from pathlib import Path
from typing import Protocol

from devices.access.allowed import AllowedClients
from devices.agent.lifecycle import Report
from devices.agent.quotas import Quotas
from mdp.errors import InputError
from mdp.formats.keys import check_bind_address, is_loopback, load_pair
from mdp.transport import AgentKeys, Router, public_key_of

#: Open files and connections; many systems allow 1,024, which a connection flood can use up.
DESCRIPTORS = 4096


def agent_keys(
    bind: str, key: Path | None, clients: Path | None, *, insecure: bool
) -> tuple[AgentKeys, AllowedClients] | None:
    """The keys to listen on `bind` with, and the allowed clients; None for plain text.

    Raises InputError or ConfigError.
    """
    check_bind_address(bind)
    if (key is None) != (clients is None):
        raise InputError("--key and --clients: expected both, or neither")
    if key is not None and clients is not None:
        if insecure:
            raise InputError("--insecure: expected no --key with it, or --key alone")
        allowed = AllowedClients(clients)
        keys = AgentKeys(
            secret=load_pair(key, public_key_of).secret,
            allowed=allowed.valid_keys(now()),
            connections=allowed.connections(),
        )
        return keys, allowed
    if not insecure and not is_loopback(bind):
        raise InputError(
            f"--bind {bind}: other machines can reach it: expected --key and --clients "
            "(`mdp keys new` makes keys), or --insecure for plain text"
        )
    return None


def now() -> datetime.datetime:
    """The time of day, by which keys expire."""
    return datetime.datetime.now(tz=datetime.UTC)


class Health(Protocol):
    """The facts that an agent's statuses are made of."""

    #: What is wrong with the clients' files; empty if nothing is.
    clients_error: str


class ClientWatch:
    """Updates a router's allowed keys: after changes of the files, and as keys expire."""

    def __init__(
        self,
        clients: AllowedClients,
        allowed: frozenset[str],
        router: Router,
        quotas: Quotas,
        health: Health,
        report: Report,
    ) -> None:
        """`allowed` are the keys that the router allows so far."""
        self._clients, self._router, self._report = clients, router, report
        self._quotas, self._health, self._allowed = quotas, health, allowed
        quotas.limit(clients.limits())

    def reload(self) -> None:
        """Read the files again."""
        self._report(self._clients.reload())
        self._health.clients_error = self._clients.error
        self._quotas.limit(self._clients.limits())
        self._allow()
        self._clients.forget_leaving()

    def tend(self) -> None:
        """Read changed files again, and revoke keys that have expired. About once a second."""
        if self._clients.have_changed():
            self.reload()
        expired = self._allowed - self._clients.valid_keys(now())
        if expired:
            names = ", ".join(sorted(map(self._clients.name, expired)))
            self._report(f"the key of {names} has expired")
            self._allow()

    def _allow(self) -> None:
        self._allowed = self._clients.valid_keys(now())
        self._router.allow(self._allowed, self._clients.connections())


def raise_descriptor_limit() -> None:
    """Raise this process's limit to DESCRIPTORS, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
