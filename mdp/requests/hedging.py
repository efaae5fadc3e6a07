"""When a request is sent to a second replica, and how many may be. Pure.

After Dean and Barroso (The Tail at Scale, CACM 2013): a second request goes out when the first has
been under way for longer than 95 % of its like take. A token bucket keeps the extra requests to a
share of all, so that a fleet that is slow as a whole is not asked twice as much.
"""

import math
from bisect import bisect_left, insort

DEFAULT_SHARE = 0.05
#: Extra requests that may be sent at once by a client that has not sent any for long.
BURST = 3.0
#: A hedge is sent after this quantile of a device's recent round trips.
QUANTILE = 0.95
#: How many round trips are recent, and how many tell enough.
RECENT, ENOUGH = 64, 10


class Bucket:
    """Tokens for extra requests: each ordinary one earns `share` of a token, up to BURST."""

    def __init__(self, share: float = DEFAULT_SHARE) -> None:
        self.share = share
        self.tokens = BURST if share else 0.0

    def earn(self, requests: int) -> None:
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

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        # At most RECENT, for which a list does; thousands of them would be mostly empty deques.
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
        """What 95 % of them take at most; infinity while there are too few."""
        count = len(self._sorted)
        return self._sorted[math.ceil(QUANTILE * count) - 1] if count >= ENOUGH else math.inf
