"""Deadlines of calls, and what is kept back of them. Pure."""

from mdp.arguments import check_number

#: Kept back from a deadline for fusing and for the operating system to wake the caller, who sleeps
#: in whole milliseconds in an event loop: a share of it, within bounds, and never more than half of
#: a short one.
RESERVE_SHARE = 0.02
RESERVE_MS = (2.0, 10.0)
MAX_DEADLINE_MS = 3_600_000.0


def checked_deadline_ms(deadline_ms: float) -> float:
    """`deadline_ms` if it is a number of milliseconds one can wait; raises InputError."""
    expected = f"more than 0 and at most {MAX_DEADLINE_MS:g}"
    check_number("deadline_ms", deadline_ms, expected, lambda value: 0 < value <= MAX_DEADLINE_MS)
    return deadline_ms


def reserve_s(deadline_ms: float) -> float:
    """Seconds of a deadline that are not spent waiting."""
    least_ms, most_ms = RESERVE_MS
    wanted_ms = min(max(RESERVE_SHARE * deadline_ms, least_ms), most_ms)
    return min(wanted_ms, 0.5 * deadline_ms) / 1e3
