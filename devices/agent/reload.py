"""Another bundle takes the place of the one that is served: loaded beside it, or refused.

asked ──> read ──> Same                        nothing to do
              ├──> Found                       still served as the former one: no need to load
              └──> room? load, warm up, check ──> Found
anything that goes wrong on the way ──> Refused: what was served is served on
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from devices.agent.bundles import Candidate, Service, Shelf, check_room, warmed
from devices.machine import Machine
from mdp.errors import AgentError


@dataclass(frozen=True, slots=True)
class Same:
    """The bundle is the one that is served."""


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle that is ready to be served."""

    service: Service


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the bundle cannot take its place."""

    error: BaseException


Outcome = Same | Found | Refused


def prepared(
    candidate: Candidate,
    shelf: Shelf,
    *,
    available_bytes: Callable[[], int | None],
    clock: Callable[[], float],
) -> Outcome:
    """What is to become of `candidate`, which is loaded if nobody on the shelf is it.

    Raises AgentError, and whatever loading raises.
    """
    newest, former = shelf.newest, shelf.former
    if newest is not None and newest.digest == candidate.bundle.digest:
        return Same()
    if former is not None and former.digest == candidate.bundle.digest:
        return Found(former)
    if former is not None:
        raise AgentError(
            f"two bundles are served already, and {former.candidate} is still asked for: "
            "reload its clients first, or start this agent anew"
        )
    check_room(candidate, available_bytes())
    return Found(warmed(candidate, candidate.load(), clock))


class Renewal:
    """Prepares what has taken the bundle's place, in a thread of its own, one at a time."""

    def __init__(
        self,
        read: Callable[[], Candidate],
        *,
        clock: Callable[[], float],
        available_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """`read` reads the bundle that is to be served, and raises MDPError.

        `available_bytes` says how much memory can be had, by default the machine's.
        """
        self._read = read
        self._clock = clock
        self._available_bytes = available_bytes or Machine().available_bytes
        self._wanted = False
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    def ask(self) -> None:
        """Look at the bundle again soon. Any thread, and in a signal handler."""
        self._wanted = True

    def begin(self, shelf: Shelf, *, done: Callable[[], None]) -> None:
        """If it was asked for and none is under way, begin; `done` is called from its thread."""
        if not self._wanted or self._thread is not None:
            return
        self._wanted = False
        self._thread = threading.Thread(
            target=self._prepare, args=(shelf, done), name="renewal", daemon=True
        )
        self._thread.start()

    def _prepare(self, shelf: Shelf, done: Callable[[], None]) -> None:
        try:
            self._outcome = prepared(
                self._read(),
                shelf,
                available_bytes=self._available_bytes,
                clock=self._clock,
            )
        except Exception as error:  # what was served is served on, whatever a bundle may do
            self._outcome = Refused(error)
        done()

    def collect(self) -> Outcome | None:
        """What came of it, once."""
        outcome = self._outcome
        if outcome is not None and self._thread is not None:
            self._thread.join()
            self._outcome = self._thread = None
        return outcome

    def leave(self, timeout_s: float) -> bool:
        """Wait so long for what is under way; False if it had to be left behind."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
