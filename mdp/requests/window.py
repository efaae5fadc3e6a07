"""The window of one device: how many requests are out, and which wait in line for their turn. Pure.

A client has at most `most` requests out at a device, so that what waits is dropped by one rule, and
not by each device as its own queue fills. They are twice as many as the device is planned, or seen,
to compute at once. Further ones wait in the order of their calls and go out
when a reply comes. A device whose queue others fill refuses with `overloaded`: the request goes
back to the head of the line, and the window shrinks and grows again as TCP's does (additive
increase, multiplicative decrease; Chiu and Jain, Computer Networks and ISDN Systems 17, 1989).

How long a request takes while others wait is the mean time between replies or, as long as none
waits in line, what the agent says: its milliseconds over the requests that were before it. The
first holds whatever the bottleneck is, the second needs no load. A new request is expected after
all those before it; how far that was off so far, and four mean deviations, are added, as for TCP's
time-out (Jacobson, Congestion avoidance and control, SIGCOMM 1988).

A device with rungs takes as much of a call's time as there is, and becomes quicker when more wait.
So it is sent all that it could be seen to batch, and predicted by its quickest rung, as it admits.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from mdp.requests.request import Request

#: Requests out at one device, at most, and as a multiple of its batch.
MOST_OUT, BATCHES_OUT = 8, 2
#: However large the batches that are seen: a connection holds so many (`mdp.transport`).
MOST_SEEN = 64
#: After a refusal nothing is sent for so long, twice as long each time up to a bound, or until the
#: next reply.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
#: Nothing is predicted from fewer replies, of which older ones count less.
ENOUGH = 6.0
#: Mean deviations from what was expected that a request is given.
DEVIATIONS = 4.0
#: Weight of the newest reply in both.
NEWEST = 1 / 8


def most_out(batch: int, has_rungs: bool = False) -> int:
    """Requests out at a device that computes up to `batch` pictures at once, at most."""
    return MOST_SEEN if has_rungs else max(MOST_OUT, BATCHES_OUT * batch)


class SendWindow:
    """One device's; every `now_s` is a reading of one clock."""

    __slots__ = (
        "_batch", "_batch_s", "_cut_s", "_deviation_s", "_error_s", "_full_s", "_heard_s",
        "_order", "_pause_s", "_shares", "_total_s", "_weight", "limit", "line", "mean_s", "most",
        "out", "paused_until_s",
    )  # fmt: skip

    def __init__(self, most: int = MOST_OUT, shares: Sequence[float] = ()) -> None:
        """`shares` is the time of the lowest rung over that of each, the top one first."""
        self.most, self._shares = most, shares
        #: How many may be out now; at least 1.
        self.limit = float(most)
        self.out = 0
        #: Call's number -> its request that waits.
        self.line: dict[int, Request] = {}
        #: The same numbers, ascending.
        self._order: list[int] = []
        self.paused_until_s = self._cut_s = -math.inf
        self._pause_s = FIRST_PAUSE_S
        #: When the last reply came, if requests have waited in line ever since; else infinity.
        self._full_s = math.inf
        #: Sums over replies, of which older ones count less: their times, and their weights.
        self._total_s = self._weight = 0.0
        #: What one request takes while others wait; 0 as long as too few have been answered.
        self.mean_s = 0.0
        #: The last reply, its computing time, and how many with that time came together.
        self._heard_s, self._batch_s, self._batch = -math.inf, 0.0, 0
        #: By how much replies came later than expected, and the mean deviation from that.
        self._error_s = self._deviation_s = 0.0

    @property
    def has_room(self) -> bool:
        """Tell whether one more may be out."""
        return self.out + 1 <= self.limit

    def admits(self, request: Request) -> bool:
        """Tell whether a new request may go out at once: there is room, and nobody before it.

        Notes when it is expected, after all that are before it.
        """
        now_s = request.asked_s = request.sent_s
        # Also with nobody before it: deviations have to shrink where nobody is let in behind it.
        request.expected_s = (self.out + len(self.line) + 1) * self.mean_s
        return not self.line and self.out + 1 <= self.limit and now_s >= self.paused_until_s

    def is_late(self, left_s: float) -> bool:
        """Tell whether one more request would be late with so much time, for those before it alone.

        One that would be late by itself is for the agent to refuse.
        """
        before, mean_s = self.out + len(self.line), self.mean_s
        if not before or mean_s > left_s:
            return False
        off_s = max(0.0, self._error_s) + DEVIATIONS * self._deviation_s
        return (before + 1) * mean_s + off_s > left_s

    def wait_s(self) -> float:
        """Seconds that a new request is predicted to wait in line."""
        return len(self.line) * self.mean_s

    def hold(self, number: int, request: Request) -> None:
        """Have the request of call `number` wait for its turn, before those of later calls."""
        request.held = True
        self.line[number] = request
        insort(self._order, number)

    def leave(self, number: int) -> Request:
        """Remove the request of call `number` from the line: for its turn, or as it is over."""
        request = self.line.pop(number)
        del self._order[bisect_left(self._order, number)]
        if not self.line:
            self._full_s = math.inf
        return request

    def next(self, now_s: float) -> int | None:
        """The number of the call whose request may go out now; None without one."""
        if self.line and self.has_room and now_s >= self.paused_until_s:
            return self._order[0]
        return None

    @property
    def numbers(self) -> list[int]:
        """The numbers of the calls that wait, ascending."""
        return self._order.copy()

    def on_send(self, request: Request) -> None:
        """`request` has gone out; whoever ends it takes one off `out`."""
        request.ahead = self.out
        self.out += 1

    def on_answer(
        self, request: Request, queue_s: float, compute_s: float, now_s: float, rung: int = 0
    ) -> None:
        """`request` was answered, after so long in the agent's queue and its batch's computing."""
        if compute_s == self._batch_s and now_s - self._heard_s < compute_s / 2:
            self._see_batch(self._batch + 1)
        else:
            self._batch = 1
        self._batch_s, self._heard_s = compute_s, now_s
        if self._full_s < math.inf:
            took_s = max(0.0, now_s - self._full_s)
        else:
            took_s = (queue_s + compute_s) / (request.ahead + 1)
        if self._shares:
            # What waited before it may have been computed at any rung.
            took_s = min(took_s, compute_s) * self._shares[rung]
        memory = 2 * self.most
        # The clock may have jumped, or the machine slept. A batch comes at one moment.
        if self.mean_s and took_s > memory * self.mean_s:
            took_s = memory * self.mean_s
        keep = 1 - 1 / memory
        self._total_s = keep * self._total_s + took_s
        self._weight = keep * self._weight + 1
        if self._weight >= ENOUGH:
            self.mean_s = self._total_s / self._weight
        self._full_s = now_s if self.line else math.inf
        if request.expected_s:
            self._learn_error(request, now_s)
        if self.limit < self.most:
            self.limit = min(self.most, self.limit + 1 / self.limit)
        self._pause_s, self.paused_until_s = FIRST_PAUSE_S, -math.inf

    def _see_batch(self, size: int) -> None:
        """Make room for two batches of this size, that of the replies of one computation."""
        self._batch, most = size, min(BATCHES_OUT * size, MOST_SEEN)
        if most > self.most:
            # One that others have shrunk grows as before.
            if self.limit == self.most:
                self.limit = float(most)
            self.most = most

    def on_refusal(self, request: Request, now_s: float) -> None:
        """Others fill the queue of the device; `request` was the last one out but `out`."""
        self.paused_until_s = now_s + self._pause_s
        # All that were out at the same time have found the same queue.
        if request.sent_s > self._cut_s:
            self._cut_s = now_s
            self.limit = max(1.0, min(self.limit, self.out + 1) / 2)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def was_late(self, request: Request, until_s: float) -> None:
        """The device had no time for `request`, all of which ends at `until_s`."""
        if request.expected_s:
            self._learn_error(request, until_s)

    def _learn_error(self, request: Request, ended_s: float) -> None:
        if self._shares:
            return
        off_s = ended_s - request.asked_s - request.expected_s - self._error_s
        self._error_s += NEWEST * off_s
        if off_s < 0:
            off_s = -off_s
        self._deviation_s += NEWEST * (off_s - self._deviation_s)
