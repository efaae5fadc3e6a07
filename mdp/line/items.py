"""Items of a line: from triggers and looks to one outcome each. Pure.

Whoever drives a book adds triggers, asks `step` what is due, and hands in the judgement of each
look. All times are readings of one monotonic clock.

`ItemBook`: each trigger is an item. It is looked at until N looks in a row have the same outcome,
the next item is there, or its time is over; no item is left without an outcome, and none has two.
`StateBook`: no triggers; an item is what stays the same, such as a shelf or a door, and its outcome
is given once N looks in a row agree on something new.
"""

import math
from collections import deque
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from mdp.line.rules import Judgement

#: Triggers that wait for their looks; of more, the oldest item ends without one.
MOST_WAITING = 1000
#: The latest ids: an id that comes again within so many items is the same item. Fewer than a
#: counter of 8 bits has.
REMEMBERED = 200
#: A look with less time than this is not begun.
LEAST_LOOK_S = 0.01


class Trigger(Struct, frozen=True, kw_only=True):
    """The moment of an item, and its id where the trigger has one."""

    moment_s: float
    #: In UTC (ISO 8601).
    time: str
    item: str | None = None
    #: When it was found out, where that is later: its time counts from then.
    heard_s: float = -math.inf
    #: A number of its own, by which whoever triggered finds the outcome.
    ticket: int = 0


class DueLook(NamedTuple):
    """A look that is to be taken now."""

    #: The moment to look at; None: now.
    at_s: float | None
    #: Seconds until the item's verdict is due.
    left_s: float


class ItemOutcome(Struct, frozen=True, kw_only=True):
    """The end of one item."""

    trigger: Trigger
    #: From 1, in this run.
    number: int
    judgement: Judgement
    looks: int
    #: Looks at the end that had the same outcome.
    equal: int
    closed_s: float
    #: From when on latency counts: the trigger with its delay, or when it was found out.
    due_from_s: float
    #: What the client gave for the last look.
    seen: Any = None


class ItemTiming(Struct, frozen=True, kw_only=True):
    """Times of looks and verdicts, in seconds."""

    #: Looks in a row with the same outcome that make it the item's.
    equal: int = 1
    #: From one look at an item to the next.
    every_s: float = 0.1
    #: From the trigger to the item's moment.
    delay_s: float = 0.0
    #: From the item's moment to its verdict, at most.
    verdict_s: float = 1.0


class Book(Protocol):
    """Interface of both books."""

    def step(self, now_s: float) -> DueLook | ItemOutcome | None:
        """Return what is due: a look to take, or an item that has ended; None: nothing yet."""

    def on_look(self, judgement: Judgement, now_s: float, time: str, seen: Any = None) -> None:
        """Take in the look that `step` asked for, begun at `time`; `seen` is handed on."""

    def wake_s(self, now_s: float) -> float:
        """Latest time of the next `step`; infinity without anything to do."""

    @property
    def between_items(self) -> bool:
        """Tell whether no item has looks that further ones are compared with."""

    def renew(self) -> None:
        """Compare no further looks with those so far: they are of another bundle."""


class RecentIds:
    """The ids of the latest items, in which one that comes twice is found."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._order: deque[str] = deque()
        self._known: set[str] = set()
        self._remembered = remembered

    def add(self, item: str) -> bool:
        """Remember `item`; returns whether it was new."""
        if item in self._known:
            return False
        if len(self._order) == self._remembered:
            self._known.remove(self._order.popleft())
        self._order.append(item)
        self._known.add(item)
        return True


class _Run:
    """Looks in a row with the same outcome."""

    def __init__(self) -> None:
        self.judgement: Judgement | None = None
        self.seen: Any = None
        self.length = 0

    def add(self, judgement: Judgement, seen: Any) -> None:
        """Take in one look more."""
        same = self.judgement is not None and self.judgement.outcome == judgement.outcome
        self.length = self.length + 1 if same else 1
        self.judgement, self.seen = judgement, seen


class _OpenItem:
    """The item that is looked at."""

    def __init__(self, trigger: Trigger, timing: ItemTiming) -> None:
        self.trigger = trigger
        self.moment_s = trigger.moment_s + timing.delay_s
        self.due_from_s = max(self.moment_s, trigger.heard_s)
        self.over_s = self.due_from_s + timing.verdict_s
        #: From then on no look is begun.
        self.last_s = self.over_s - LEAST_LOOK_S
        self.next_s = self.moment_s
        self.looks = 0
        self.run = _Run()


class ItemBook:
    """Items that triggers begin."""

    def __init__(
        self, timing: ItemTiming, *, most_waiting: int = MOST_WAITING, skip_empty: bool = False
    ) -> None:
        """With `skip_empty`, a scene without an item has no outcome: its trigger was a rest."""
        self._timing, self._most_waiting, self._skip_empty = timing, most_waiting, skip_empty
        self._waiting: deque[Trigger] = deque()
        self._ended: deque[ItemOutcome] = deque()
        self._open: _OpenItem | None = None
        self._number = 0

    def add(self, trigger: Trigger, now_s: float) -> None:
        """Begin an item, behind those that wait."""
        self._waiting.append(trigger)
        if len(self._waiting) > self._most_waiting:
            if self._open is not None:
                self._end(self._open, now_s)
            self._end(_OpenItem(self._waiting.popleft(), self._timing), now_s)

    def step(self, now_s: float) -> DueLook | ItemOutcome | None:
        """Return what is due: a look to take, or an item that has ended; None: nothing yet."""
        while not self._ended:
            if self._open is None:
                if not self._waiting:
                    return None
                self._open = _OpenItem(self._waiting.popleft(), self._timing)
            item = self._open
            if now_s >= item.last_s or (item.looks and self._next_is_there(now_s)):
                self._end(item, now_s)
            elif now_s >= item.next_s:
                return DueLook(item.next_s, item.over_s - now_s)
            else:
                return None
        return self._ended.popleft()

    def on_look(self, judgement: Judgement, now_s: float, time: str, seen: Any = None) -> None:
        """Take in the look that `step` asked for, begun at `time`; `seen` is handed on."""
        item = self._open
        assert item is not None, "no look was due"
        item.looks += 1
        item.run.add(judgement, seen)
        if item.run.length >= self._timing.equal:
            self._end(item, now_s)
        else:
            item.next_s = max(item.next_s + self._timing.every_s, now_s)

    def wake_s(self, now_s: float) -> float:
        """Latest time of the next `step`; infinity without anything to do."""
        if self._ended:
            return now_s
        if self._open is None:
            return now_s if self._waiting else math.inf
        wake_s = min(self._open.next_s, self._open.last_s)
        if self._open.looks and self._waiting:
            wake_s = min(wake_s, self._waiting[0].moment_s + self._timing.delay_s)
        return wake_s

    @property
    def between_items(self) -> bool:
        """Tell whether no outcome waits, and the item that is open has not been looked at."""
        return not self._ended and (self._open is None or not self._open.looks)

    def renew(self) -> None:
        """Go on: between items there are no looks."""

    def _next_is_there(self, now_s: float) -> bool:
        """Tell whether the next item has taken the place of the open one."""
        waiting = self._waiting
        return bool(waiting) and now_s >= waiting[0].moment_s + self._timing.delay_s

    def _end(self, item: _OpenItem, now_s: float) -> None:
        if item is self._open:
            self._open = None
        judgement = _final(item.looks, item.run, self._timing.equal)
        if self._skip_empty and judgement.decision == "empty":
            return
        self._number += 1
        self._ended.append(
            ItemOutcome(
                trigger=item.trigger,
                number=self._number,
                judgement=judgement,
                looks=item.looks,
                equal=item.run.length,
                closed_s=now_s,
                due_from_s=item.due_from_s,
                seen=item.run.seen,
            )
        )


def _final(looks: int, run: _Run, equal: int) -> Judgement:
    """The judgement of an item that ends: never that it passes unless enough looks agree."""
    last = run.judgement
    if last is None:
        return Judgement(
            label=None,
            passed=False,
            sure=False,
            decision="missed",
            text="no look in its time: not passed",
        )
    if run.length >= equal:
        return last
    seen = last.text.rpartition(": ")[0]
    return replace(
        last,
        passed=False,
        sure=False,
        decision="unsettled",
        text=f"{seen}, but only {run.length} of {equal} equal looks: not passed",
        why_kept=last.why_kept or "unsure",
    )


class StateBook:
    """Items that are states: one begins where N looks in a row agree on something new."""

    def __init__(self, timing: ItemTiming, begins_s: float) -> None:
        """The first look is due at `begins_s`, each further one `every_s` after the last."""
        self._timing = timing
        self._next_s = begins_s
        self._run = _Run()
        self._since = Trigger(moment_s=begins_s, time="")
        self._state: tuple[str | None, bool, str] | None = None
        self._ended: deque[ItemOutcome] = deque()
        self._number = 0

    def step(self, now_s: float) -> DueLook | ItemOutcome | None:
        """Return what is due: a look to take, or a state that has begun; None: nothing yet."""
        if self._ended:
            return self._ended.popleft()
        return DueLook(None, math.inf) if now_s >= self._next_s else None

    def on_look(self, judgement: Judgement, now_s: float, time: str, seen: Any = None) -> None:
        """Take in the look that `step` asked for, begun at `time`; `seen` is handed on."""
        began_s = self._next_s
        # Missed looks are not caught up.
        self._next_s = max(self._next_s + self._timing.every_s, now_s)
        self._run.add(judgement, seen)
        if self._run.length == 1:
            self._since = Trigger(moment_s=began_s, time=time)
        if self._run.length < self._timing.equal or judgement.outcome == self._state:
            return
        self._state = judgement.outcome
        self._number += 1
        self._ended.append(
            ItemOutcome(
                trigger=self._since,
                number=self._number,
                judgement=judgement,
                looks=self._run.length,
                equal=self._run.length,
                closed_s=now_s,
                due_from_s=self._since.moment_s,
                seen=seen,
            )
        )

    def wake_s(self, now_s: float) -> float:
        """Latest time of the next `step`."""
        return now_s if self._ended else self._next_s

    @property
    def between_items(self) -> bool:
        """True: a state that never settles must not keep a better bundle out."""
        return True

    def renew(self) -> None:
        """Begin the looks in a row anew."""
        self._run = _Run()
