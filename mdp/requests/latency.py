"""Devices that answer, but too late, and for which calls. Pure; the clock is an argument.

After a missed deadline a device's last round trips are kept until it has long been in time. Every
call compares them with its own time: a longer one is a failure, one within it takes off half, as in
`mdp.requests.health`. With three failures the call excludes the device; calls that have more time
wait for it as before.

It is tested by one call at a time, which does not wait for it: at once, after 0.1 s, and after
twice as long each time up to a bound, until answers in time have made up for the failures.
"""

from collections import deque
from dataclasses import dataclass, field

from mdp.requests.health import (
    FORGIVEN_BY_ANSWER,
    LONGEST_PAUSE_S,
    LONGEST_PROBATION,
    SETTLED_AFTER,
    TOLERATED_FAILURES,
)
from mdp.requests.reason import Reason
from mdp.requests.request import DeviceEvent

#: At most so many failures: no more than LONGEST_PROBATION answers in time make up for them.
MOST_FAILURES = TOLERATED_FAILURES + FORGIVEN_BY_ANSWER * (LONGEST_PROBATION - 1)
#: How long a device is left alone after a test in vain. Not for long at first: it answers, and a
#: test keeps no call waiting.
FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class SlowDevice:
    """One device that has missed a deadline of late."""

    #: The last round trips in seconds, in time or not.
    trips: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLED_AFTER))
    #: The shortest time that a call gave it in vain; how often any did.
    missed_s: float = float("inf")
    misses: int = 0
    #: How long it is left alone after the next test, and until when after the last one.
    pause_s: float = FIRST_PAUSE_S
    paused_until_s: float = float("-inf")

    def is_late_for(self, budget_s: float) -> bool:
        """Tell whether a call with so much time should not wait for it."""
        if self.misses < TOLERATED_FAILURES or max(self.trips) <= budget_s:
            return False
        failures = 0.0
        for trip_s in self.trips:
            if trip_s > budget_s:
                failures = min(MOST_FAILURES, failures + 1.0)
            else:
                failures = max(0.0, failures - FORGIVEN_BY_ANSWER)
        return failures >= TOLERATED_FAILURES

    def reason(self, budget_s: float) -> Reason:
        """Reason why a call with so much time goes on without this device."""
        late, of = sum(trip_s > budget_s for trip_s in self.trips), len(self.trips)
        return Reason(
            "slow", f"{late} of its last {of} answers took longer than this call can wait"
        )

    def on_test(self, now_s: float) -> None:
        """A call that does not wait for it has asked it."""
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + self.pause_s
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def test_at_once(self) -> None:
        """There is reason to test it at once."""
        self.pause_s, self.paused_until_s = FIRST_PAUSE_S, float("-inf")

    def on_refusal(self) -> None:
        """A test was refused at once for want of time, which costs no call any."""
        self.pause_s, self.paused_until_s = max(self.pause_s / 2, FIRST_PAUSE_S), float("-inf")


class SlowDevices(dict[str, SlowDevice]):
    """Device -> what is known of its lateness; those only that have missed a deadline of late."""

    def handle(self, event: DeviceEvent) -> None:
        """Follow one event."""
        known, request = self.get(event.device), event.request
        if event.what == "late" and request is not None:
            if known is None:
                known = self[event.device] = SlowDevice()
            known.trips.append(event.trip_s)
            known.misses += 1
            known.missed_s = min(known.missed_s, event.until_s - request.sent_s)
        elif known is None:
            return
        elif event.what == "connected":
            known.test_at_once()
        elif request is None or event.what == "sent":
            if request is not None and known.is_late_for(event.until_s - event.now_s):
                known.on_test(event.now_s)
        elif event.what == "refused" and request.is_test:
            known.on_refusal()
        elif event.what == "answered":
            known.trips.append(event.trip_s)
            if request.is_test:
                known.test_at_once()
            # Twenty in a row that no call would have missed.
            if len(known.trips) == SETTLED_AFTER and max(known.trips) <= known.missed_s:
                del self[event.device]
