"""Deadlines of calls, and what is kept back of them. Pure."""

from msgspec import Struct

from mdp.arguments import check_number

#: Kept back from a deadline for fusing and for the operating system to wake the caller, who sleeps
#: in whole milliseconds in an event loop: a share of it, within bounds, and never more than half of
#: a short one.
RESERVE_SHARE = 0.02
RESERVE_MS = (2.0, 10.0)
MAX_DEADLINE_MS = 3_600_000.0
_EXPECTED = f"more than 0 and at most {MAX_DEADLINE_MS:,.0f}"


class Deadline(Struct, frozen=True):
    """A call's beginning, a reading of a monotonic clock, and how long it may take."""

    started_s: float
    ms: float

    @property
    def decide_s(self) -> float:
        """The moment of decision: the deadline less the reserve."""
        return self.started_s + self.ms / 1e3 - reserve_s(self.ms)

    def remaining_s(self, now_s: float) -> float:
        """Seconds until the moment of decision, at least 0."""
        return max(0.0, self.decide_s - now_s)


def check_deadline_ms(deadline_ms: float, name: str = "deadline_ms") -> float:
    """`deadline_ms` if one can wait so many milliseconds; raises InputError, which names `name`."""
    check_number(name, deadline_ms, _EXPECTED, lambda value: 0 < value <= MAX_DEADLINE_MS)
    # Of NumPy's numbers too, which no message can hold.
    return float(deadline_ms)


def reserve_s(deadline_ms: float) -> float:
    """Seconds of a deadline that are not spent waiting."""
    least_ms, most_ms = RESERVE_MS
    wanted_ms = min(max(RESERVE_SHARE * deadline_ms, least_ms), most_ms)
    return min(wanted_ms, 0.5 * deadline_ms) / 1e3


def deadline_ms_for(needed_ms: float) -> float:
    """The deadline of which `needed_ms` (2 or more) are left, rounded to 0.1 ms."""
    least_ms, most_ms = RESERVE_MS
    share_ms = needed_ms * RESERVE_SHARE / (1 - RESERVE_SHARE)
    return round(needed_ms + min(max(share_ms, least_ms), most_ms), 1)
