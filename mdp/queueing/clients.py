"""What an agent remembers of its clients: computing time used, decoding time, refusals. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the client that has used the least
computing time is next, whatever its requests cost. Time that was not asked for is not saved up: who
comes back starts from a virtual time, which advances by each client's equal share of what was
computed, so that no stream of newcomers keeps anybody waiting for ever.
"""

from collections.abc import Container
from typing import Generic, TypeVar

#: Clients remembered; the ones forgotten first are those not heard of for longest.
REMEMBERED = 256
#: A client is charged for at most so much more than its share: the process may have been stopped
#: during its computation.
LEAD_S = 5.0
#: Weight of the newest picture in a client's decoding time.
_NEWEST = 0.2

R = TypeVar("R")


class Client(Generic[R]):
    """One client's account, and its own queue."""

    __slots__ = ("decoding_s", "name", "trust", "used_s", "waiting")

    def __init__(self, name: str, used_s: float) -> None:
        self.name = name
        #: Computing seconds used, on the scale of the virtual time.
        self.used_s = used_s
        #: Typical seconds to decode one of its pictures.
        self.decoding_s = 0.0
        #: Share of the estimated durations that it is judged by. Each refusal lowers it, so that
        #: one slow spell cannot keep the client out for good; other clients are judged as before.
        self.trust = 1.0
        self.waiting: list[R] = []


class Clients(Generic[R]):
    """The accounts of all clients."""

    __slots__ = ("_accounts", "_latest", "_virtual_s")

    def __init__(self) -> None:
        self._virtual_s = 0.0
        #: Those heard of last come last.
        self._accounts: dict[str, Client[R]] = {}
        self._latest: Client[R] | None = None

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, name: str, kept: Container[str], computed: Container[Client[R]]) -> Client[R]:
        """The account of a client that has something to compute.

        Those whose names are `kept` are not forgotten for it; those `computed` have not been idle.
        """
        account = self._latest
        if account is None or account.name != name:
            account = self._latest = self._moved_last(name, kept)
        if account.used_s < self._virtual_s and not account.waiting and account not in computed:
            account.used_s = self._virtual_s
        return account

    def _moved_last(self, name: str, kept: Container[str]) -> Client[R]:
        account = self._accounts.pop(name, None)
        if account is None:
            account = Client(name, self._virtual_s)
            if len(self._accounts) >= REMEMBERED:
                del self._accounts[next(other for other in self._accounts if other not in kept)]
        self._accounts[name] = account
        return account

    def charge(self, account: Client[R], computing_s: float, decoding_s: float) -> None:
        """Charge a client for one computed picture."""
        used_s, most_s = account.used_s + computing_s + decoding_s, self._virtual_s + LEAD_S
        account.used_s = used_s if used_s < most_s else most_s
        account.decoding_s += _NEWEST * (decoding_s - account.decoding_s)

    def advance(self, computing_s: float, competing: int) -> None:
        """So much has been computed while so many clients competed for it."""
        self._virtual_s += computing_s / competing
