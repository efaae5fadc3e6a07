"""Shares of what all callers of a gateway need: connections, and memory for bodies. Pure.

One rule for both: nobody holds more than half, and where there is no room, of whoever holds most
leaves what has not moved for longest. What the gateway is answering stays, as long as it is read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


def _stay() -> None:
    """Nothing: for a claim that its owner has not set up yet."""


@dataclass(slots=True, eq=False)
class Claim:
    """The share of a `Pool` that one connection, or one body, holds."""

    #: The caller that is let in, or the network address of a connection that has asked nothing.
    who: str
    #: When a byte of it came last, in seconds.
    moved_s: float
    amount: int = 0
    #: Whether the gateway is answering it, and neither waits for a body nor for its reader.
    busy: bool = False
    #: Ends it, where it has to leave.
    leave: Callable[[], None] = _stay


def first_to_leave(
    claims: Iterable[Claim], held: Mapping[str, int], newcomer: Claim
) -> Claim | None:
    """The one of `claims` that leaves for `newcomer`; None where the newcomer has to.

    `held` is how much each holds, with what the newcomer wants. Nobody makes those leave who hold
    less.
    """
    oldest: dict[str, Claim] = {}
    for claim in claims:
        if claim.busy or claim is newcomer or held[claim.who] < held[newcomer.who]:
            continue
        if claim.who not in oldest or claim.moved_s < oldest[claim.who].moved_s:
            oldest[claim.who] = claim
    return max(oldest.values(), key=lambda claim: held[claim.who], default=None)


class Pool:
    """So much of something, and who holds it."""

    def __init__(self, limit: int) -> None:
        """At most `limit` in all, and half of it for one."""
        self._limit = limit
        self._claims: dict[Claim, None] = {}
        self._held: Counter[str] = Counter()

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._claims

    def take(self, claim: Claim, amount: int = 1) -> bool:
        """Let `claim` hold `amount` more, at the cost of others; whether there is room.

        Without room it holds what it held before.
        """
        self._add(claim, amount)
        while (too_much := self._held[claim.who] > max(1, self._limit // 2)) or (
            self._held.total() > self._limit
        ):
            among = (c for c in self._claims if c.who == claim.who or not too_much)
            leaving = first_to_leave(among, self._held, claim)
            if leaving is None:
                self._add(claim, -amount)
                return False
            self.release(leaving)
            leaving.leave()
        return True

    def release(self, claim: Claim) -> None:
        """Let go of all that `claim` holds."""
        self._add(claim, -claim.amount)

    def _add(self, claim: Claim, amount: int) -> None:
        claim.amount += amount
        self._held[claim.who] += amount
        if not self._held[claim.who]:
            del self._held[claim.who]
        if claim.amount:
            self._claims[claim] = None
        else:
            self._claims.pop(claim, None)


class ConnectionPlaces:
    """Connections at a time: a quarter for those of which no request was let in yet."""

    def __init__(self, limit: int) -> None:
        """At most `limit` connections."""
        self._new, self._known = Pool(limit // 4), Pool(limit - limit // 4)

    def arrive(self, claim: Claim) -> None:
        """A connection was accepted; it is ended at once where there is no place."""
        if not self._new.take(claim):
            claim.leave()

    def admit(self, claim: Claim, caller: str) -> bool:
        """A request of `caller` on this connection was let in; whether there is a place for it."""
        if claim in self._known:
            return True
        address = claim.who
        self._new.release(claim)
        claim.who = caller
        if self._known.take(claim):
            return True
        claim.who = address
        self.arrive(claim)
        return False

    def leave(self, claim: Claim) -> None:
        """A connection has ended."""
        for pool in (self._new, self._known):
            if claim in pool:
                pool.release(claim)
