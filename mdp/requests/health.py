"""Circuit breakers: which devices are worth asking, judged from ordinary traffic. Pure.

A request that goes unanswered or fails is a failure; an answer in time takes off half of one. Three
open a device's breaker: it is excluded, for a pause that doubles up to a bound. After it the device
is half-open: tested by one request at a time for which no call waits, until it has answered in time
as often as its relapses demand; one failure opens the breaker again. So a dead device costs three
calls at most, and a flapping one ever less. Late answers are `mdp.requests.latency`'s concern.
"""

from dataclasses import dataclass
from typing import Literal

from mdp.requests.reason import UNSTEADY, Reason
from mdp.requests.request import DeviceEvent

#: Failures that open a breaker; what an answer in time takes off them, and any other sign of life.
#: At a half, a device that fails more than every third time is excluded.
TOLERATED_FAILURES = 3
FORGIVEN_BY_ANSWER = 0.5
FORGIVEN_BY_LIFE = 1.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
#: How often an agent that is not ready, or has another bundle, is asked whether that has changed.
UNREADY_PAUSE_S = 0.5
#: Answers in time that close a half-open breaker: one, doubled with every relapse up to this.
LONGEST_PROBATION = 8
#: After so many answers in time without a failure in between, the past is forgotten.
SETTLED_AFTER = 20

#: Why a breaker is open: what ends that differs. A silent device has to give any sign of life; one
#: that is not ready, to say that it is; a failing one, to say so after its pause.
Cause = Literal["silent", "unready", "failing"]


@dataclass(slots=True)
class CircuitBreaker:
    """One device's; every `now_s` is a reading of one clock."""

    failures: float = 0.0
    #: How long the next pause will be, and when the last one ends.
    pause_s: float = FIRST_PAUSE_S
    paused_until_s: float = float("-inf")
    #: Why it is open; None if it is not.
    cause: Cause | None = None
    reason: Reason | None = None
    #: Answers in time that are still needed to close it; above 0 it is half-open.
    owed: int = 0
    relapses: int = 0
    #: Requests unanswered in a row, and answers in time in a row.
    silences: int = 0
    answers: int = 0
    #: When to ask the device for its status, while it is open.
    ask_s: float = float("-inf")
    #: Whether the connection was lost and is not back.
    lost: bool = False

    @property
    def well(self) -> bool:
        """Tell whether there is nothing to remember about the device."""
        return not (self.failures or self.cause or self.owed or self.relapses or self.lost)

    @property
    def half_open(self) -> bool:
        """Tell whether the device is asked without being waited for."""
        return self.cause is None and self.owed > 0

    def on_answer(self) -> None:
        """A request was answered in time."""
        self.silences = 0
        self.answers += 1
        if self.cause is not None:
            self._half_open()
        if self.owed:
            self.owed -= 1
        else:
            self.failures = max(0.0, self.failures - FORGIVEN_BY_ANSWER)
        if self.answers >= SETTLED_AFTER:
            self.relapses, self.pause_s = 0, FIRST_PAUSE_S

    def alive(self) -> None:
        """An answer came too late, or a request was refused for want of time."""
        self.silences = 0
        if self.cause == "silent":
            self._half_open()
        elif not self.owed:
            self.failures = max(0.0, self.failures - FORGIVEN_BY_LIFE)

    def full(self) -> None:
        """A request was refused as others fill the queue; it will be sent again."""
        self.silences = 0
        if self.cause == "silent":
            self._half_open()

    def silent(self, now_s: float) -> None:
        """A request went unanswered until its deadline, or longer."""
        self.silences += 1
        requests = "request" if self.silences == 1 else "requests"
        self._fail(now_s, "silent", Reason("silent", f"{self.silences} {requests} unanswered"))

    def on_failure(self, now_s: float, reason: Reason) -> None:
        """A request was answered with a failure, or with something that is no answer."""
        self.silences = 0
        self._fail(now_s, "failing", Reason("failing", str(reason)))

    def unready(self, now_s: float, reason: Reason) -> None:
        """The device cannot serve this client, now or at all."""
        self.cause, self.reason, self.owed = "unready", reason, 0
        self.paused_until_s = self.ask_s = now_s + UNREADY_PAUSE_S

    def on_status(self, now_s: float, trouble: Reason | None) -> None:
        """A status has come; `trouble` is what keeps the device from serving."""
        self.silences = 0
        if trouble is not None:
            if self.cause != "failing":
                self.unready(now_s, trouble)
        elif self.cause is not None and (self.cause != "failing" or now_s >= self.paused_until_s):
            self._half_open()

    def on_disconnect(self) -> None:
        """The connection was lost while an answer was owed."""
        self.lost, self.answers = True, 0
        if self.cause is None:
            self.failures += 1.0

    def on_connect(self, now_s: float) -> None:
        """The connection is up, for the first time or again."""
        lost, self.lost = self.lost, False
        if self.cause is not None:
            self.on_status(now_s, None)
        elif self.failures >= TOLERATED_FAILURES:
            self._open(now_s, "failing", UNSTEADY)
        elif lost:
            failures = self.failures
            self._half_open()
            self.failures = failures

    def due(self, now_s: float) -> bool:
        """Tell whether it is open and the time has come for a status request."""
        return self.cause is not None and now_s >= self.ask_s

    def on_status_request(self, now_s: float) -> None:
        """A status request was sent; a silent device gets ever fewer."""
        if self.cause == "silent":
            self._pause(now_s)
        else:
            self.ask_s = now_s + UNREADY_PAUSE_S

    def _fail(self, now_s: float, cause: Cause, reason: Reason) -> None:
        self.answers = 0
        if self.cause is not None:
            return
        self.failures += 1.0
        if self.owed or self.failures >= TOLERATED_FAILURES:
            self._open(now_s, cause, reason)

    def _open(self, now_s: float, cause: Cause, reason: Reason) -> None:
        self.cause, self.reason, self.owed = cause, reason, 0
        self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        self.paused_until_s = self.ask_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def _half_open(self) -> None:
        self.cause, self.reason = None, None
        self.owed = min(2**self.relapses, LONGEST_PROBATION)
        self.relapses += 1
        self.failures = TOLERATED_FAILURES - 1.0


class CircuitBreakers(dict[str, CircuitBreaker]):
    """Device -> its breaker, of one client; those only of which there is something to remember."""

    def handle(self, event: DeviceEvent) -> None:
        """Follow one event."""
        what, now_s, reason = event.what, event.now_s, event.reason
        known = self.get(event.device)
        if known is None:
            if what not in ("silent", "lost", "failed", "unready") and reason is None:
                return
            known = self[event.device] = CircuitBreaker()
        match what:
            case "answered":
                known.on_answer()
            case "late" | "refused" | "no_frame":
                known.alive()
            case "full":
                known.full()
            case "silent":
                known.silent(now_s)
            case "failed" if reason is not None:
                known.on_failure(now_s, reason)
            case "unready" if reason is not None:
                known.unready(now_s, reason)
            case "told":
                known.on_status(now_s, reason)
            case "connected":
                known.on_connect(now_s)
            case "lost":
                known.on_disconnect()
        if known.well:
            del self[event.device]

    def is_open(self, device: str) -> bool:
        """Tell whether `device` is excluded."""
        known = self.get(device)
        return known is not None and known.cause is not None
