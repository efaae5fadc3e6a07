"""Counts of what became of requests: for every status, and for a periodic report."""

import threading
from collections import Counter
from collections.abc import Mapping

from mdp.protocol.messages import OUTCOMES, RELOADS, rung_answers_key

#: Shortest time between two reports.
REPORT_EVERY_S = 10.0


class Counters:
    """Counts outcomes; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # With every key, as each status has them all.
        self._counts = dict.fromkeys(OUTCOMES + RELOADS, 0)
        #: Requests not answered since the last report, by outcome.
        self._unreported: Counter[str] = Counter()
        self._next_report_s = float("-inf")
        #: When the next report is due; infinity if it would be empty.
        self.due_s = float("inf")

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> number since the start."""
        with self._lock:
            return self._counts.copy()

    def count_rung(self, rung: int) -> None:
        """Count an answer by a rung below the top, beside its outcome."""
        with self._lock:
            key = rung_answers_key(rung)
            self._counts[key] = self._counts.get(key, 0) + 1

    def count(self, outcome: str) -> None:
        """Count the outcome of a request or a reload."""
        with self._lock:
            self._counts[outcome] += 1
            if outcome != "answered" and outcome not in RELOADS:
                self._unreported[outcome] += 1
                self.due_s = self._next_report_s

    def count_rejected(self, reasons: Mapping[str, int]) -> None:
        """Report connections and messages that the transport turned away, by reason."""
        if not reasons:
            return
        with self._lock:
            self._unreported.update(reasons)
            self.due_s = self._next_report_s

    def report(self, now_s: float) -> str:
        """Requests that were not answered since the last report.

        Empty before the next one is due.
        """
        with self._lock:
            if now_s < self.due_s:
                return ""
            new, self._unreported = self._unreported, Counter()
            self._next_report_s, self.due_s = now_s + REPORT_EVERY_S, float("inf")
        return "not answered: " + ", ".join(f"{n} {code}" for code, n in new.items())
