"""Who may reach an agent: its address, its key, and the clients it lets in."""

import datetime
import resource
import sys
from pathlib import Path

from devices.access.allowed import AllowedClients
from devices.agent.server import Agent, Report
from devices.events import Events
from mdp.errors import InputError
from mdp.formats.fleet import PLAIN_TEXT
from mdp.formats.keys import check_bind_address, is_loopback, load_pair
from mdp.transport import AgentKeys, Router, public_key_of

#: Open files and connections; many systems allow 1,024, which a crowd of strangers could hold.
DESCRIPTORS = 4096


def agent_keys(
    bind: str, key: Path | None, clients: Path | None, *, insecure: bool
) -> tuple[AgentKeys, AllowedClients] | None:
    """What to listen on `bind` with, and for whom; None for plain text.

    Raises InputError or ConfigError.
    """
    check_bind_address(bind)
    if (key is None) != (clients is None):
        raise InputError("--key and --clients: expected both, or neither")
    if key is not None and clients is not None:
        if insecure:
            raise InputError("--insecure: expected no --key with it, or --key alone")
        let_in = AllowedClients(clients)
        keys = AgentKeys(
            secret=load_pair(key, public_key_of).secret,
            allowed=let_in.allowed(now()),
            connections=let_in.connections(),
        )
        return keys, let_in
    if not insecure and not is_loopback(bind):
        raise InputError(
            f"--bind {bind}: other machines can reach it: expected --key and --clients "
            "(`mdp keys new` makes keys), or --insecure for plain text"
        )
    return None


def now() -> datetime.datetime:
    """The time of day, which only the expiry of keys and the audit log look at."""
    return datetime.datetime.now(tz=datetime.UTC)


class ClientWatch:
    """Lets clients in and out while an agent serves: files that changed, keys that expired."""

    def __init__(
        self,
        clients: AllowedClients,
        allowed: frozenset[str],
        router: Router,
        agent: Agent,
        report: Report,
    ) -> None:
        """`allowed` are the keys that the router lets in so far."""
        self._clients, self._router, self._agent, self._report = clients, router, agent, report
        self._allowed = allowed
        agent.quotas.limit(clients.limits())

    def read_again(self) -> None:
        """Read the files, and let in and out whom they say."""
        self._report(self._clients.read_again())
        self._agent.trouble = self._clients.trouble
        self._agent.quotas.limit(self._clients.limits())
        self._allow()

    def look(self) -> None:
        """Let nobody in any longer whose key has expired."""
        expired = self._allowed - self._clients.allowed(now())
        if expired:
            names = ", ".join(sorted(map(self._clients.name, expired)))
            self._report(f"the key of {names} has expired")
            self._allow()

    def _allow(self) -> None:
        self._allowed = self._clients.allowed(now())
        self._router.allow(self._allowed, self._clients.connections())


def make_room() -> None:
    """Let this process open as many connections as it needs, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def warn_of_plain_text(device: str, address: str, keys: AgentKeys | None) -> None:
    """Say on stderr, at every start, if strangers can read and use this agent."""
    if keys is None and not is_loopback(address):
        Events(sys.stderr, device, address, json=False).tell(f"WARNING: {address} is {PLAIN_TEXT}")
