"""Asks a fleet's cameras how long they have rested, in a thread of its own, and triggers."""

import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import Protocol

from mdp.closing import Closing
from mdp.console import say_count
from mdp.errors import ConfigError, MDPError
from mdp.line.connection import RenewedConnection, SaidOnce
from mdp.line.still import BlindSpells, CameraRest, StillTrigger
from mdp.protocol.rest import RestReply

#: Between two questions, as a share of the rest that makes an item, within bounds in seconds.
ASK_SHARE, ASK_S = 0.25, (0.025, 0.1)
LEAVE_S = 3.0
#: Between two lines on spells without frames, at least.
SPELLS_S = 10.0


class RestSource(Protocol):
    """Interface of `mdp.client.cameras.FleetRests`, as far as triggering needs it."""

    @property
    def outdated(self) -> Set[str]:
        """Devices whose agents are too old to be asked."""

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
        self._found, self._report, self._clock = found, report, clock
        self._say_once = SaidOnce(report)
        self._rest_ms = rest_ms
        self._trigger, self._blind = StillTrigger(rest_ms), BlindSpells(rest_ms)
        #: Spells that are not said yet, and when they may be.
        self._spells_s: list[float] = []
        self._say_spells_s = float("-inf")
        least_s, most_s = ASK_S
        self._every_s = min(max(ASK_SHARE * rest_ms / 1e3, least_s), most_s)
        self._over = threading.Event()
        self._rests = RenewedConnection(connect)
        rests, asked_s = self._rests.current, clock()
        found_rests, missing = rests.ask()
        # One that is away now may be able to, when it comes.
        if missing and rests.outdated >= missing.keys() and not found_rests:
            self._rests.close()
            device, reason = next(iter(missing.items()))
            raise ConfigError(f"--trigger still: {device}: {reason}")
        self._take_in(found_rests, missing, asked_s)
        self._thread = threading.Thread(target=self._run, name="rests", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Connect anew: the fleet file has changed."""
        self._rests.renew()

    def _run(self) -> None:
        due_s = self._clock()
        while not self._over.is_set():
            due_s = max(due_s + self._every_s, self._clock())
            former = self._rests.current
            try:
                if self._rests.latest() is not former:
                    # Devices that left the fleet count no more.
                    self._blind = BlindSpells(self._rest_ms)
            except MDPError as error:
                # A fleet file that is wrong now: the former connections go on.
                self._say_once(str(error))
            rests = self._rests.current
            try:
                rests.wait(due_s)
                asked_s = self._clock()
                self._take_in(*rests.ask(), asked_s)
            except MDPError as error:
                self._say_once(str(error))
        self._rests.close()

    def _take_in(
        self, found: Mapping[str, RestReply], missing: Mapping[str, str], asked_s: float
    ) -> None:
        for device, reason in missing.items():
            # Those that are away are in the records.
            if device in self._rests.current.outdated:
                self._say_once(f"{device}: {reason}")
        spell_s = self._blind.saw({name: one.age_ms for name, one in found.items()}, self._clock())
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
            name: CameraRest(one.still_ms, one.changes, one.age_ms) for name, one in found.items()
        }
        age_ms = self._trigger.saw(rests)
        if age_ms is not None:
            # Ages are those at the questions' arrival.
            self._found(asked_s - age_ms / 1e3)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(LEAVE_S)
