"""Decides when a scene has changed and rests again, by what its cameras tell of theirs. Pure.

More than half of the cameras that answer have to have changed since the last item, and to have
rested for a while, all since about the same time: one camera that is covered, or lags behind, makes
no item, and one whose picture never rests prevents none. A camera that has seen none of the latest
items, as it is covered or turned, does not count until it sees one.
"""

from collections.abc import Mapping
from typing import NamedTuple

#: How long the cameras have to have rested, unless told otherwise.
REST_MS = 300.0
#: Rests that belong to one change begin so close to each other.
TOGETHER_MS = 1500.0
#: A camera that has not changed for so many items sees none.
BLIND_ITEMS = 3


class CameraRest(NamedTuple):
    """One camera's picture at one time."""

    #: From the first frame that looks like the newest one to that.
    still_ms: float
    #: Frames so far that were unlike those before; fewer than before: the agent was restarted.
    changes: int
    #: Of the newest frame.
    age_ms: float = 0.0


class StillTrigger:
    """Finds the moments at which a new item rests before the cameras."""

    def __init__(self, rest_ms: float = REST_MS) -> None:
        self._rest_ms = rest_ms
        #: By device: its changes as the last item was found, or as it was first heard after that.
        self._before: dict[str, int] = {}
        #: Devices that were first heard since the last item: the next one may have come before.
        self._fresh: set[str] = set()
        #: By device: the latest items in a row that it has not seen.
        self._unseen: dict[str, int] = {}

    def saw(self, rests: Mapping[str, CameraRest]) -> float | None:
        """Take in what all cameras that answer tell now; returns how old an item's moment is.

        In milliseconds; None: no item is there. At that moment all cameras that have found it saw
        it rest: by now the next one may have come.
        """
        for device, rest in rests.items():
            # Where an agent is new, or was restarted, nobody knows what it has missed.
            if rest.changes < self._before.get(device, rest.changes + 1):
                self._before[device] = rest.changes
                self._fresh.add(device)
        if self._fresh >= rests.keys():
            self._fresh.clear()
        changed = sorted(
            rest
            for device, rest in rests.items()
            if rest.changes != self._before[device] and rest.still_ms >= self._rest_ms
        )
        sees = {device for device, rest in rests.items() if rest.changes != self._before[device]}
        blind = {device for device, items in self._unseen.items() if items >= BLIND_ITEMS}
        counted = sees | (rests.keys() - self._fresh - blind)
        needed = len(counted) // 2 + 1
        latest_ms = changed[0].still_ms + TOGETHER_MS if changed else 0.0
        together = [rest.age_ms for rest in changed if rest.still_ms <= latest_ms]
        if len(together) < needed:
            return None
        for device in rests:
            self._unseen[device] = 0 if device in sees else self._unseen.get(device, 0) + 1
        # A device that is away now is heard anew: it may miss any number of items.
        self._before = {device: rest.changes for device, rest in rests.items()}
        self._fresh.clear()
        return max(together)


class BlindSpells:
    """Finds the times in which items may have been missed, as cameras gave no new frames.

    The cameras are seen by as long as more than half of those that ever told anything have a frame
    of the latest `rest_ms`, and as they are asked that often.
    """

    def __init__(self, rest_ms: float = REST_MS) -> None:
        #: A spell is said from this length on: an item that rests may be there for no longer.
        self._least_s = 2 * rest_ms / 1e3
        self._rest_ms = rest_ms
        self._known: set[str] = set()
        self._seen_s: float | None = None

    def saw(self, ages_ms: Mapping[str, float], now_s: float) -> float | None:
        """Take in the ages of all newest frames; returns the seconds of a spell that ends now."""
        self._known.update(ages_ms)
        fresh = sum(age_ms <= self._rest_ms for age_ms in ages_ms.values())
        if 2 * fresh <= len(self._known):
            return None
        before_s, self._seen_s = self._seen_s, now_s
        if before_s is None or now_s - before_s < self._least_s:
            return None
        return now_s - before_s
