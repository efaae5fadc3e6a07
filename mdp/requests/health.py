"""Which devices are worth asking, judged from ordinary traffic. Pure; the clock is an argument.

A device that lets requests go unanswered, or answers them with failures, collects strikes; an
answer in time forgives half of one. With three it is taken out and rested, for a time that doubles
up to a bound. It comes back on probation: it is asked, but nobody waits for it, until it has
answered in time as often as it has been taken out lately would suggest. Until then, one strike
takes it out again. So a dead device costs three calls at most, and a flapping one ever less. Who
lives and is late is `mdp.requests.latency`'s concern.
"""

from dataclasses import dataclass
from typing import Literal

#: Strikes until a device is taken out; what an answer in time takes off them, and any other sign
#: of life. At a half, a device is taken out that fails more than every third time.
TOLERATED_STRIKES = 3
FORGIVEN_BY_ANSWER = 0.5
FORGIVEN_BY_LIFE = 1.0
FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0
#: An agent that is not ready, or has another bundle, is asked so often whether that has changed.
UNREADY_REST_S = 0.5
#: Answers in time that a device on probation owes: one, doubled with every relapse up to this.
LONGEST_PROBATION = 8
#: After so many answers in time without a strike in between, the past is forgotten.
SETTLED_AFTER = 20
#: The reason of a device to which there is no connection.
UNREACHABLE = "unreachable"
#: The reason of a device that was lost so often, or struck in other ways, that it has to rest.
UNSTEADY = "unsteady: failures and lost connections in a row"

#: Why a device is out: what brings it back differs. A silent one has to give any sign of life; one
#: that is not ready, to say that it is; a failing one, to say so after its rest.
Cause = Literal["silent", "unready", "failing"]


@dataclass(slots=True)
class Health:
    """One device as its client sees it."""

    strikes: float = 0.0
    #: How long the next rest will be, and when the last one ends.
    rest_s: float = FIRST_REST_S
    rested_until_s: float = float("-inf")
    #: Why it is out; None if it is not.
    cause: Cause | None = None
    reason: str = ""
    #: Answers in time that it still owes until somebody waits for it.
    owed: int = 0
    relapses: int = 0
    #: Requests unanswered in a row, and answers in time in a row.
    silences: int = 0
    answers: int = 0
    #: When to ask it how it is, while it is out.
    ask_s: float = float("-inf")
    #: Whether its connection was lost and is not back.
    lost: bool = False

    @property
    def well(self) -> bool:
        """Whether there is nothing to remember about it."""
        return not (self.strikes or self.cause or self.owed or self.relapses or self.lost)

    @property
    def on_probation(self) -> bool:
        """Whether it is to be asked without being waited for."""
        return self.cause is None and self.owed > 0

    def answered(self) -> None:
        """A request was answered in time."""
        self.silences = 0
        self.answers += 1
        if self.cause is not None:
            self._come_back()
        if self.owed:
            self.owed -= 1
        else:
            self.strikes = max(0.0, self.strikes - FORGIVEN_BY_ANSWER)
        if self.answers >= SETTLED_AFTER:
            self.relapses, self.rest_s = 0, FIRST_REST_S

    def heard(self) -> None:
        """It lives: an answer came too late, or a request was turned away for want of time."""
        self.silences = 0
        if self.cause == "silent":
            self._come_back()
        elif not self.owed:
            self.strikes = max(0.0, self.strikes - FORGIVEN_BY_LIFE)

    def silent(self, now_s: float) -> None:
        """A request went unanswered until its deadline, or longer."""
        self.silences += 1
        requests = "request" if self.silences == 1 else "requests"
        self._strike(now_s, "silent", f"silent: {self.silences} {requests} unanswered")

    def failed(self, now_s: float, reason: str) -> None:
        """A request was answered with a failure, or with something that is no answer."""
        self.silences = 0
        self._strike(now_s, "failing", f"failing: {reason}")

    def unready(self, now_s: float, reason: str) -> None:
        """It says that it cannot serve this client, now or at all."""
        self.cause, self.reason, self.owed = "unready", reason, 0
        self.rested_until_s = self.ask_s = now_s + UNREADY_REST_S

    def told(self, now_s: float, trouble: str) -> None:
        """It has said how it is: `trouble` says what is wrong, or is empty if it can serve."""
        self.silences = 0
        if trouble:
            if self.cause != "failing":
                self.unready(now_s, trouble)
        elif self.cause is not None and (self.cause != "failing" or now_s >= self.rested_until_s):
            self._come_back()

    def disconnected(self) -> None:
        """Its connection was lost while it owed an answer."""
        self.lost, self.answers = True, 0
        if self.cause is None:
            self.strikes += 1.0

    def connected(self, now_s: float) -> None:
        """Its connection is up, for the first time or again."""
        lost, self.lost = self.lost, False
        if self.cause is not None:
            self.told(now_s, "")
        elif self.strikes >= TOLERATED_STRIKES:
            self._rest(now_s, "failing", UNSTEADY)
        elif lost:
            strikes = self.strikes
            self._come_back()
            self.strikes = strikes

    def due(self, now_s: float) -> bool:
        """Whether it is out and time has come to ask it how it is."""
        return self.cause is not None and now_s >= self.ask_s

    def asked(self, now_s: float) -> None:
        """It has been asked how it is; one that does not answer is asked ever more seldom."""
        if self.cause == "silent":
            self._lengthen(now_s)
        else:
            self.ask_s = now_s + UNREADY_REST_S

    def _strike(self, now_s: float, cause: Cause, reason: str) -> None:
        self.answers = 0
        if self.cause is not None:
            return
        self.strikes += 1.0
        if self.owed or self.strikes >= TOLERATED_STRIKES:
            self._rest(now_s, cause, reason)

    def _rest(self, now_s: float, cause: Cause, reason: str) -> None:
        self.cause, self.reason, self.owed = cause, reason, 0
        self._lengthen(now_s)

    def _lengthen(self, now_s: float) -> None:
        self.rested_until_s = self.ask_s = now_s + self.rest_s
        self.rest_s = min(2 * self.rest_s, LONGEST_REST_S)

    def _come_back(self) -> None:
        self.cause, self.reason = None, ""
        self.owed = min(2**self.relapses, LONGEST_PROBATION)
        self.relapses += 1
        self.strikes = TOLERATED_STRIKES - 1.0
