"""Which devices answer, but too late, and for which calls. Pure; the clock is an argument.

A late answer says two things: its device lives, and how long it took. Whoever has missed a deadline
has its round trips remembered until it has long been in time. Each of them tells, whatever time its
own call had, whether a call with so much time would have got it: too long a trip is a strike, one
in time takes off half of one, as in `mdp.requests.health`. With three, calls with so much time or
less go on without the device, and those that have more wait for it as before.

It is tried again by one call at a time, which does not wait for it: at once, after 0.1 s, and after
twice as long each time up to a bound. It is waited for again when it has answered in time as often
as makes up for the strikes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mdp.requests.health import (
    FORGIVEN_BY_ANSWER,
    LONGEST_PROBATION,
    LONGEST_REST_S,
    SETTLED_AFTER,
    TOLERATED_STRIKES,
)

#: At most so many strikes: no more than LONGEST_PROBATION answers in time make up for them.
MOST_STRIKES = TOLERATED_STRIKES + FORGIVEN_BY_ANSWER * (LONGEST_PROBATION - 1)
#: How long it is left alone after having been tried in vain. Not for long at first: it answers, and
#: a try keeps nobody waiting.
FIRST_PAUSE_S = 0.1
#: Requests that are overdue, of one device: later answers to older ones say only that it lives.
OVERDUE = 64


@dataclass(slots=True)
class Late:
    """One device that has missed a deadline of late."""

    #: The last round trips in seconds, in time or not.
    trips: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLED_AFTER))
    #: The shortest time that a call gave it in vain; how often any did.
    missed_s: float = float("inf")
    misses: int = 0
    #: How long it is left alone after the next try, and until when after the last one.
    pause_s: float = FIRST_PAUSE_S
    paused_until_s: float = float("-inf")

    def is_late_for(self, budget_s: float) -> bool:
        """Whether a call with so much time should not wait for it."""
        if self.misses < TOLERATED_STRIKES or max(self.trips) <= budget_s:
            return False
        strikes = 0.0
        for trip_s in self.trips:
            if trip_s > budget_s:
                strikes = min(MOST_STRIKES, strikes + 1.0)
            else:
                strikes = max(0.0, strikes - FORGIVEN_BY_ANSWER)
        return strikes >= TOLERATED_STRIKES

    def reason(self, budget_s: float) -> str:
        """Why a call with so much time goes on without it."""
        late, of = sum(trip_s > budget_s for trip_s in self.trips), len(self.trips)
        return f"slow: {late} of its last {of} answers took longer than this call can wait"

    def tried(self, now_s: float) -> None:
        """It has been asked by a call that does not wait for it."""
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + self.pause_s
            self.pause_s = min(2 * self.pause_s, LONGEST_REST_S)

    def refreshed(self) -> None:
        """There is reason to try it at once."""
        self.pause_s, self.paused_until_s = FIRST_PAUSE_S, float("-inf")


class Lateness:
    """All devices of one client that were late of late."""

    __slots__ = ("_overdue", "suspects")

    def __init__(self) -> None:
        #: Those only of which there is something to remember.
        self.suspects: dict[str, Late] = {}
        #: Device -> call -> when it was asked, and the end of its time.
        self._overdue: dict[str, dict[int, tuple[float, float]]] = {}

    def late_for(self, budget_s: float) -> Iterator[tuple[str, Late]]:
        """Those that a call with so much time should not wait for."""
        return ((d, late) for d, late in self.suspects.items() if late.is_late_for(budget_s))

    def overdue(self, call: int, device: str, asked_s: float, until_s: float) -> None:
        """`device` was asked at `asked_s`, and has not answered by `until_s`."""
        overdue = self._overdue.setdefault(device, {})
        overdue[call] = (asked_s, until_s)
        if len(overdue) > OVERDUE:
            del overdue[next(iter(overdue))]

    def settle(self, call: int, device: str) -> tuple[float, float] | None:
        """When `device` was asked what is no longer overdue, and the end of its time."""
        overdue = self._overdue.get(device)
        if overdue is None or (times := overdue.pop(call, None)) is None:
            return None
        if not overdue:
            del self._overdue[device]
        return times

    def late(self, device: str, trip_s: float, budget_s: float) -> None:
        """An answer has come after so long, for which its call could not wait."""
        late = self.suspects.get(device)
        if late is None:
            late = self.suspects[device] = Late()
        late.trips.append(trip_s)
        late.misses += 1
        late.missed_s = min(late.missed_s, budget_s)

    def in_time(self, device: str, trip_s: float, *, tried: bool) -> None:
        """An answer has come in time for its call; `tried` if that would not have waited for it."""
        late = self.suspects.get(device)
        if late is None:
            return
        late.trips.append(trip_s)
        if tried:
            late.refreshed()
        # In time for whoever had missed it, so often in a row: that is over.
        if len(late.trips) == SETTLED_AFTER and max(late.trips) <= late.missed_s:
            del self.suspects[device]

    def refused(self, device: str) -> None:
        """It had no time for a call that tried it, and said so at once, which costs nobody any."""
        late = self.suspects.get(device)
        if late is not None:
            late.pause_s = max(late.pause_s / 2, FIRST_PAUSE_S)
            late.paused_until_s = float("-inf")

    def dropped(self, device: str) -> None:
        """Nothing that `device` was asked will be answered."""
        self._overdue.pop(device, None)

    def connected(self, device: str) -> None:
        """The connection to `device` is up: what made it late may be over."""
        late = self.suspects.get(device)
        if late is not None:
            late.refreshed()
