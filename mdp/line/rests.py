"""Asks a fleet's cameras how long they have rested, in a thread of its own, and triggers."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from mdp.closing import Closing
from mdp.console import say_count
from mdp.errors import ConfigError, MDPError
from mdp.line.still import BlindSpells, CameraRest, StillTrigger
from mdp.protocol.rest import RestReply

#: Between two questions, as a share of the rest that makes an item, within bounds in seconds.
ASK_SHARE, ASK_S = 0.25, (0.025, 0.1)
LEAVE_S = 3.0
#: Between two lines on spells without frames, at least.
SPELLS_S = 10.0
#: Different lines on cameras that tell nothing, of which each is said once.
_MOST_SAID = 100


class RestSource(Protocol):
    """Interface of `mdp.client.cameras.FleetRests`, as far as triggering needs it."""

    def ask(self) -> tuple[Mapping[str, RestReply], Mapping[str, str]]:
        """Each device's rest, and why others tell none."""

    def wait(self, until_s: float) -> None:
        """Keep the connections until then."""

    def close(self) -> None:
        """Close every connection."""


class RestWatch(Closing):
    """Calls `found` whenever the scene has changed and rests again, with the moment of that."""

    def __init__(
        self,
        connect: Callable[[], RestSource],
        rest_ms: float,
        found: Callable[[float], None],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask what `connect` gives; raises ConfigError where every agent is too old to tell."""
        self._connect, self._found, self._report, self._clock = connect, found, report, clock
        self._trigger, self._blind = StillTrigger(rest_ms), BlindSpells(rest_ms)
        #: Spells that are not said yet, and when they may be.
        self._spells_s: list[float] = []
        self._say_spells_s = float("-inf")
        least_s, most_s = ASK_S
        self._every_s = min(max(ASK_SHARE * rest_ms / 1e3, least_s), most_s)
        self._said: set[str] = set()
        self._over, self._renewed = threading.Event(), threading.Event()
        self._rests = connect()
        asked_s = clock()
        told, missing = self._rests.ask()
        too_old = [device for device, why in missing.items() if "expected a newer one" in why]
        if too_old and not told:
            self._rests.close()
            raise ConfigError(f"--trigger still: {too_old[0]}: {missing[too_old[0]]}")
        self._take_in(told, missing, asked_s)
        self._thread = threading.Thread(target=self._run, name="rests", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Connect anew: the fleet file has changed."""
        self._renewed.set()

    def _run(self) -> None:
        due_s = self._clock()
        while not self._over.is_set():
            due_s = max(due_s + self._every_s, self._clock())
            try:
                if self._renewed.is_set():
                    self._renewed.clear()
                    former, self._rests = self._rests, self._connect()
                    former.close()
                self._rests.wait(due_s)
                asked_s = self._clock()
                self._take_in(*self._rests.ask(), asked_s)
            except MDPError as error:
                self._say(str(error))
        self._rests.close()

    def _take_in(
        self, told: Mapping[str, RestReply], missing: Mapping[str, str], asked_s: float
    ) -> None:
        for device, reason in missing.items():
            # Those that are away are in the records.
            if "expected a newer one" in reason:
                self._say(f"{device}: {reason}")
        spell_s = self._blind.saw({name: one.age_ms for name, one in told.items()}, self._clock())
        if spell_s is not None:
            self._spells_s.append(spell_s)
        if self._spells_s and self._clock() >= self._say_spells_s:
            times, longest_s = len(self._spells_s), max(self._spells_s)
            self._report(
                f"most cameras gave no new frame {say_count(times, 'time')}, for up to "
                f"{longest_s:.1f} s: items may have been missed"
            )
            self._spells_s.clear()
            self._say_spells_s = self._clock() + SPELLS_S
        rests = {
            name: CameraRest(one.still_ms, one.changes, one.age_ms) for name, one in told.items()
        }
        age_ms = self._trigger.saw(rests)
        if age_ms is not None:
            # Ages are those at the questions' arrival.
            self._found(asked_s - age_ms / 1e3)

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(text)
            self._report(text)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(LEAVE_S)
