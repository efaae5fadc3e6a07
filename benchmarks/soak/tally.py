"""An account of calls: begun, ended, late, and each answer against the truth of its bundle."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from msgspec import Struct

from benchmarks.soak.pictures import CERTAIN, DEVICES, label_of
from mdp.requests.prediction import Prediction

#: Upper ends of the bins of times, in ms: latencies, and how late late calls are.
BINS_MS = np.geomspace(0.01, 100_000.0, 281)
#: Texts of wrong answers that are kept.
MOST_TEXTS = 20


class Answer(Struct, frozen=True, kw_only=True):
    """An answer for one picture, however it came: from a client, or over HTTP."""

    label: str
    probability: float
    used: Sequence[str]
    #: Devices that were wanted and are not in the answer; None where that is told for several
    #: pictures together.
    missing: Sequence[str] | None
    #: Digest of the bundle that it names; None where its label alone tells.
    bundle: str | None

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        return cls(
            label=prediction.label,
            probability=prediction.probability,
            used=prediction.used,
            missing=tuple(prediction.missing),
            bundle=prediction.bundle,
        )


class CallFailed(Struct, frozen=True):
    """A call that ended without an answer."""

    reason: str


#: What came of one picture, and the seconds that took.
Outcome = tuple[Answer | CallFailed, float]


def verdict(number: int, answer: Answer, truth: Mapping[str, str]) -> str:
    """`right`, `wrong` or `mixed` for picture `number`.

    `truth` maps the digest of each bundle to what its labels begin with. A label that is not the
    picture's in the bundle that the answer names is wrong. The right one with less probability than
    parts of this picture and bundle give is mixed: another picture's or bundle's part is in it.
    """
    begins = truth.values() if answer.bundle is None else [truth.get(answer.bundle)]
    if answer.label not in [label_of(number, begin) for begin in begins if begin is not None]:
        return "wrong"
    return "right" if answer.probability >= CERTAIN else "mixed"


def begin_of(label: str) -> str:
    """The beginning of a label, before the colour."""
    return label.rstrip("-0123456789")


def find_unaccounted(answer: Answer) -> list[str]:
    """Members of which the answer says neither that they are in it nor that they are missing."""
    if answer.missing is None:
        return []
    named = {name.partition("/")[0] for name in (*answer.used, *answer.missing)}
    return [device for device in DEVICES if device not in named]


class Times:
    """A histogram of milliseconds, of a size that does not grow."""

    def __init__(self) -> None:
        self._bins = np.zeros(len(BINS_MS) + 1, dtype=np.int64)
        self.most_ms = 0.0

    def add(self, ms: float) -> None:
        self._bins[int(np.searchsorted(BINS_MS, ms))] += 1
        self.most_ms = max(self.most_ms, ms)

    def percentile(self, percent: float) -> float:
        """The upper end of the bin that holds this percentile, in ms, at most the largest value."""
        up_to = np.cumsum(self._bins) / max(1, self._bins.sum())
        place = int(np.searchsorted(up_to, percent / 100))
        return min(float(BINS_MS[min(place, len(BINS_MS) - 1)]), self.most_ms)


class Tally:
    """Every picture of a load: begun, ended, and with which outcome."""

    def __init__(self, deadline_ms: float, truth: Mapping[str, str]) -> None:
        """Compare answers with `truth`, digest of a bundle -> what its labels begin with."""
        self._deadline_ms, self._truth = deadline_ms, truth
        #: Ticket -> number of the picture.
        self.open: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        #: What labels begin with -> answers with such a label.
        self.begins: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._latencies, self._late = Times(), Times()

    def begin(self, number: int) -> int:
        """Count a call with picture `number`; returns its ticket."""
        self.counts["begun"] += 1
        self.open[self.counts["begun"]] = number
        return self.counts["begun"]

    def end(self, ticket: int, answer: Answer | CallFailed, took_s: float) -> None:
        """Count a call's end; a second end, or another picture's answer, is wrong."""
        number = self.open.pop(ticket, None)
        if number is None:
            self._add("wrong", f"call {ticket} ended twice")
            return
        self.counts["ended"] += 1
        self._latencies.add(took_s * 1e3)
        late_ms = took_s * 1e3 - self._deadline_ms
        if late_ms > 0:
            self.counts["late"] += 1
            self._late.add(late_ms)
        if isinstance(answer, CallFailed):
            self.counts["error"] += 1
            self.reasons[answer.reason] += 1
            return
        complete = not answer.missing and len(answer.used) == len(DEVICES)
        self.counts["complete" if complete else "partial"] += 1
        self.begins[begin_of(answer.label)] += 1
        found = verdict(number, answer, self._truth)
        if found != "right":
            self._add(
                found,
                f"call {ticket}: sent {label_of(number)}, got {answer.label} with "
                f"{answer.probability:g} from {', '.join(answer.used)}",
            )
        if forgotten := find_unaccounted(answer):
            self._add("unaccounted", f"call {ticket}: nothing about {', '.join(forgotten)}")

    def _add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.wrong) < MOST_TEXTS:
            self.wrong.append(text)

    def result(self, counters: object) -> dict[str, Any]:
        """All of it for a result file, with the client's own counters."""
        late = {f"late_p{p}_ms": self._late.percentile(p) for p in (50, 99)}
        return {
            "counts": dict(self.counts), "open": len(self.open), "wrong": self.wrong,
            "begins": dict(self.begins), "reasons": dict(self.reasons), **late,
            "overshoot_ms": self._late.most_ms,
            "p50_ms": self._latencies.percentile(50), "p99_ms": self._latencies.percentile(99),
            "p999_ms": self._latencies.percentile(99.9), "counters": counters,
        }  # fmt: skip
