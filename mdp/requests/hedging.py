"""Rules of sending a request to a second replica, and a limit on how many are sent. Pure.

After Dean and Barroso (The Tail at Scale, CACM 2013): a second request goes out when the first has
been under way for longer than 95 % of its like take. A token bucket keeps the extra requests to a
share of all, so that a fleet that is slow as a whole is not asked twice as much.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from mdp.requests.request import DeviceEvent

DEFAULT_SHARE = 0.05
#: Extra requests that may be sent at once by a client that has not sent any for long.
BURST = 3.0
#: A hedge is sent after this quantile of a device's recent round trips.
QUANTILE = 0.95
#: How many round trips are recent, and how many tell enough.
RECENT, ENOUGH = 64, 10


class TokenBucket:
    """Tokens for extra requests: each ordinary one earns `share` of a token, up to BURST."""

    def __init__(self, share: float = DEFAULT_SHARE) -> None:
        self.share = share
        self.tokens = BURST if share else 0.0

    def earn(self, requests: int = 1) -> None:
        """So many ordinary requests were sent."""
        self.tokens = min(self.tokens + self.share * requests, BURST)

    def spend(self) -> bool:
        """Take one token for one extra request; False if there is none."""
        # A share like 0.05 adds up to a little less than what it stands for.
        if self.tokens < 1.0 - 1e-9:
            return False
        self.tokens -= 1.0
        return True


class RoundTrips:
    """One device's recent round trips in seconds."""

    def __init__(self) -> None:
        self._recent: list[float] = []
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """One more has been made."""
        if len(self._recent) == RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.pop(0))]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    @property
    def slow_s(self) -> float:
        """Seconds that 95 % of them take at most; infinity while there are too few."""
        count = len(self._sorted)
        return self._sorted[math.ceil(QUANTILE * count) - 1] if count >= ENOUGH else math.inf


class Hedging:
    """Rule of when to ask a second device beside a first one, and whether one may.

    After `fixed_s`, or after what was observed if that is None.

    `share` is how many of all requests may be hedges; with 0 there are none.
    """

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        k_of: Mapping[str, int],
        fixed_s: float | None,
        share: float,
    ) -> None:
        self._members, self._k_of, self._fixed_s = members, k_of, fixed_s
        self._bucket = TokenBucket(share)
        self._trips: dict[str, RoundTrips] = {}

    def handle(self, event: DeviceEvent) -> None:
        """Follow one event."""
        if event.what in ("answered", "refused"):
            self._trips.setdefault(event.device, RoundTrips()).add(event.trip_s)
        elif event.what == "sent" and event.request is not None and not event.request.hedged:
            self._bucket.earn()

    def after_s(self, device: str) -> float:
        """Seconds that `device` is given before its replica is asked beside it.

        Infinity if unknown: then half of what is left.
        """
        if self._fixed_s is not None:
            return self._fixed_s
        own, replicas = self.slow_s(device), self._members[self._k_of[device]]
        return own if own < math.inf else min(map(self.slow_s, replicas))

    def try_spend(self) -> bool:
        """Tell whether one more request may be spent on hedging now; True spends it."""
        return self._bucket.spend()

    def slow_s(self, device: str) -> float:
        """Seconds that 95 % of the round trips of `device` take at most; infinity if unknown."""
        trips = self._trips.get(device)
        return math.inf if trips is None else trips.slow_s
