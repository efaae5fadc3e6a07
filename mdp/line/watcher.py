"""Drives a line: takes triggers, looks when due, and publishes the record of each item once."""

import math
import time
from collections.abc import Callable
from typing import Protocol

from mdp.errors import InferenceError
from mdp.line.items import Book, DueLook, ItemBook, ItemOutcome, ItemTiming, Trigger
from mdp.line.record import ItemRecord, TriggerKind, record_of
from mdp.line.rules import LineRules, judge, look_of
from mdp.line.triggers import TriggerQueue
from mdp.requests.capture import Moment
from mdp.requests.prediction import Prediction

#: How far a frame may be from an item's moment, unless told otherwise: further off, it shows
#: another item.
WITHIN_MS = 250.0
#: Of an item's time, kept back for publishing its record.
PUBLISH_MS = 5.0
#: So often are connections tended while nothing is due.
IDLE_S = 0.5

Clock = Callable[[], float]


class Looker(Protocol):
    """Interface of a client that was connected with `opinions`, as far as a line needs it."""

    def look(self, *, deadline_ms: float, at: Moment, within_ms: float) -> Prediction:
        """Look at a moment; raises InferenceError."""


class LineWatcher:
    """One line; for one thread."""

    def __init__(
        self,
        looker: Looker,
        book: Book,
        triggers: TriggerQueue,
        rules: LineRules,
        *,
        kind: TriggerKind,
        timing: ItemTiming,
        deadline_ms: float,
        within_ms: float,
        cameras: Callable[[], int],
        prefix: str,
        publish: Callable[[ItemRecord, ItemOutcome], None],
        utc: Callable[[], str],
        clock: Clock = time.monotonic,
    ) -> None:
        """Look with `looker` as `book` says, for `deadline_ms` at most, at frames `within_ms`.

        `cameras` tells how many the fleet has. A counted item is called `prefix` and its number.
        `publish` gets each record, and what it was made of.
        """
        self._looker, self._book, self._triggers, self._rules = looker, book, triggers, rules
        self._kind, self._timing = kind, timing
        self._deadline_ms, self._within_ms = deadline_ms, within_ms
        self._cameras, self._prefix = cameras, prefix
        self._publish, self._utc, self._clock = publish, utc, clock

    def turn(self, most_s: float = IDLE_S) -> bool:
        """Do one thing that is due, or wait for it for `most_s`; returns whether any was."""
        self._add(self._triggers.take(0.0))
        now_s = self._clock()
        step = self._book.step(now_s)
        if isinstance(step, ItemOutcome):
            self._end(step)
        elif isinstance(step, DueLook):
            self._look(step)
        else:
            wait_s = min(most_s, self._book.wake_s(now_s) - now_s)
            self._add(self._triggers.take(max(0.0, wait_s)))
            return False
        return True

    def finish(self) -> None:
        """Refuse further triggers, and give each item that has come its record, in its time."""
        self._triggers.end()
        if not isinstance(self._book, ItemBook):
            # A state that the last look has settled; no further look is due.
            while isinstance(step := self._book.step(-math.inf), ItemOutcome):
                self._end(step)
            return
        while self.turn() or self._book.wake_s(self._clock()) < math.inf:
            pass

    def _add(self, triggers: list[Trigger]) -> None:
        for trigger in triggers:
            if isinstance(self._book, ItemBook):
                self._book.add(trigger, self._clock())

    def _look(self, due: DueLook) -> None:
        began = self._utc()
        left_ms = due.left_s * 1e3 - PUBLISH_MS
        seen: Prediction | InferenceError
        try:
            seen = self._looker.look(
                deadline_ms=min(self._deadline_ms, left_ms),
                at="latest" if due.at_s is None else due.at_s,
                within_ms=self._within_ms,
            )
        except InferenceError as error:
            seen = error
        judgement = judge(look_of(seen, self._cameras()), self._rules)
        self._book.on_look(judgement, self._clock(), began, seen)

    def _end(self, outcome: ItemOutcome) -> None:
        item = outcome.trigger.item
        record = record_of(
            outcome,
            item=f"{self._prefix}{outcome.number}" if item is None else item,
            trigger=self._kind,
            published_s=self._clock(),
            verdict_s=self._timing.verdict_s,
        )
        self._publish(record, outcome)
