"""Accounts of an agent's clients: computing time used, decoding time, refusals. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the client that has used the least
computing time is next. Unused time is not saved up: a client that returns starts from a virtual
time, which advances by each competing client's equal share of the computing time, so that new
clients never starve the others.
"""

from collections.abc import Container
from itertools import islice
from typing import Generic, TypeVar

#: Most accounts, unless more clients have requests waiting; the least recently used one is dropped
#: first.
REMEMBERED = 256
#: The most that a client is charged beyond its share: the process may have been suspended during
#: its computation.
LEAD_S = 5.0
#: Weight of the newest picture in a client's decoding time.
_NEWEST = 0.2

R = TypeVar("R")


class Account(Generic[R]):
    """One client's account, and its queue."""

    __slots__ = ("decoding_s", "factor", "held_bytes", "name", "used_s", "waiting")

    def __init__(self, name: str, used_s: float) -> None:
        self.name = name
        #: Computing seconds used, on the scale of the virtual time.
        self.used_s = used_s
        #: Typical seconds to decode one of its pictures.
        self.decoding_s = 0.0
        #: By which the estimated durations are multiplied for this client. Each refusal lowers it,
        #: so that estimates from a slow period do not refuse the client for ever.
        self.factor = 1.0
        self.waiting: list[R] = []
        #: The memory that they count as.
        self.held_bytes = 0


class Accounts(Generic[R]):
    """The accounts of all clients."""

    __slots__ = ("_accounts", "_latest", "_virtual_s")

    def __init__(self) -> None:
        self._virtual_s = 0.0
        #: The most recently used last.
        self._accounts: dict[str, Account[R]] = {}
        self._latest: Account[R] | None = None

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, name: str, kept: Container[str], computed: Container[Account[R]]) -> Account[R]:
        """The account of a client with a request.

        Accounts in `kept` are not dropped for it; those in `computed` have not been idle.
        """
        account = self._latest
        if account is None or account.name != name:
            account = self._latest = self._move_last(name, kept)
        if account.used_s < self._virtual_s and not account.waiting and account not in computed:
            account.used_s = self._virtual_s
        return account

    def _move_last(self, name: str, kept: Container[str]) -> Account[R]:
        account = self._accounts.pop(name, None)
        if account is None:
            account = Account(name, self._virtual_s)
            idle = (other for other in list(self._accounts) if other not in kept)
            for other in islice(idle, max(0, len(self._accounts) + 1 - REMEMBERED)):
                del self._accounts[other]
        self._accounts[name] = account
        return account

    def charge(self, account: Account[R], computing_s: float, decoding_s: float) -> None:
        """Charge a client for one computed picture."""
        used_s, most_s = account.used_s + computing_s + decoding_s, self._virtual_s + LEAD_S
        account.used_s = used_s if used_s < most_s else most_s
        account.decoding_s += _NEWEST * (decoding_s - account.decoding_s)

    def advance(self, computing_s: float, competing: int) -> None:
        """Advance the virtual time: `competing` clients shared `computing_s`."""
        self._virtual_s += computing_s / competing
