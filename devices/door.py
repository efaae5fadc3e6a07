"""Who may reach an agent: its address, its key, and the clients it lets in."""

import resource
import sys
from pathlib import Path

from devices.events import Events
from mdp.errors import InputError, MDPError
from mdp.fleet import PLAIN_TEXT
from mdp.keys import check_bind_address, is_loopback, load_allowed, load_pair
from mdp.transport import AgentKeys, Router, public_key_of

#: Open files and connections; many systems allow 1,024, which a crowd of strangers could hold.
DESCRIPTORS = 4096


def agent_keys(
    bind: str, key: Path | None, clients: Path | None, *, insecure: bool
) -> AgentKeys | None:
    """What to listen on `bind` with; None for plain text. Raises InputError or ConfigError."""
    check_bind_address(bind)
    if (key is None) != (clients is None):
        raise InputError("--key and --clients: expected both, or neither")
    if key is not None and clients is not None:
        if insecure:
            raise InputError("--insecure: expected no --key with it, or --key alone")
        allowed = load_allowed(clients)
        return AgentKeys(secret=load_pair(key, public_key_of).secret, allowed=allowed)
    if not insecure and not is_loopback(bind):
        raise InputError(
            f"--bind {bind}: other machines can reach it: expected --key and --clients "
            "(`mdp keys new` makes keys), or --insecure for plain text"
        )
    return None


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


def allow_anew(router: Router, clients: Path) -> str:
    """Read the allowed clients once more; returns what came of it, for people.

    What was allowed stays so if the files are wrong.
    """
    try:
        allowed = load_allowed(clients)
    except MDPError as error:
        return f"clients as before: {error}"
    router.allow(allowed)
    return f"{len(allowed)} clients allowed"
