"""What has become of requests: counted for every status, and told to people now and then."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import get_args

from mdp.protocol.messages import FailureCode

#: What may become of a request, and of a change of bundle.
OUTCOMES = ("answered", "undeliverable", *get_args(FailureCode))
CHANGES = ("renewed", "not_renewed")
#: Refused and dropped requests are reported at most this often.
REPORT_EVERY_S = 10.0


class Ledger:
    """Counts outcomes; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Every key from the start, so that a status always has them all.
        self._counts = dict.fromkeys(OUTCOMES + CHANGES, 0)
        #: Requests not answered since the last report, by outcome.
        self._unreported: Counter[str] = Counter()
        self._next_report_s = float("-inf")
        #: When to make the next report; infinity if there is nothing to tell.
        self.due_s = float("inf")

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> how often since the start."""
        with self._lock:
            return self._counts.copy()

    def count(self, outcome: str) -> None:
        """A request, or a change of bundle, has ended so."""
        with self._lock:
            self._counts[outcome] += 1
            if outcome != "answered" and outcome not in CHANGES:
                self._unreported[outcome] += 1
                self.due_s = self._next_report_s

    def turned_away(self, reasons: Mapping[str, int]) -> None:
        """So many were turned away before anything was known of a request."""
        if not reasons:
            return
        with self._lock:
            self._unreported.update(reasons)
            self.due_s = self._next_report_s

    def report(self, now_s: float) -> str:
        """What was refused or dropped since the last time, in a line; empty if it is not time."""
        with self._lock:
            if now_s < self.due_s:
                return ""
            new, self._unreported = self._unreported, Counter()
            self._next_report_s, self.due_s = now_s + REPORT_EVERY_S, float("inf")
        return "not answered: " + ", ".join(f"{n} {code}" for code, n in new.items())
