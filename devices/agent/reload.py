"""Hot reload: another bundle is loaded beside the served one and installed, or rejected.

requested ──> read ──> Unchanged                   it is the current bundle
                 ├──> NewBundle                    it is the previous bundle, which is loaded
                 └──> room? memory? load, warm up ──> NewBundle
any error ──> Rejected: the served bundle stays

A pushed bundle is noted on disk (`commit`) once it is loaded, and before it is installed.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from devices.agent.bundles import LoadableBundle, ServedBundle, ServedBundles, warm_up
from devices.machine import Machine
from mdp.errors import AgentError


@dataclass(frozen=True, slots=True)
class Reload:
    """The bundle to read, what to do once it is loaded, and whom to tell why not, if not."""

    read: Callable[[], LoadableBundle]
    commit: Callable[[LoadableBundle], None] = lambda source: None
    settled: Callable[[str], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The bundle is the current one."""


@dataclass(frozen=True, slots=True)
class NewBundle:
    """A loaded bundle, to be installed."""

    served: ServedBundle


@dataclass(frozen=True, slots=True)
class Rejected:
    """Reason why the bundle cannot be served."""

    error: BaseException


Outcome = Unchanged | NewBundle | Rejected


def prepare_bundle(
    source: LoadableBundle,
    served: ServedBundles,
    *,
    available_bytes: Callable[[], int | None],
    make_room: Callable[[], None],
    clock: Callable[[], float],
) -> Outcome:
    """Load `source` unless it is served; raises AgentError, and what loading raises.

    `make_room` has the previous bundle retired, or raises AgentError.
    """
    current, previous = served.current, served.previous
    if current is not None and current.digest == source.bundle.digest:
        return Unchanged()
    if previous is not None and previous.digest == source.bundle.digest:
        return NewBundle(previous)
    if previous is not None:
        make_room()
    free, needed = available_bytes(), source.memory_bytes
    if free is not None and needed > free:
        raise AgentError(
            f"{source} needs {needed / 1e6:,.0f} MB beside what is served, "
            f"{free / 1e6:,.0f} MB are free"
        )
    return NewBundle(warm_up(source, source.load(), clock))


class Reloader:
    """Prepares a replaced bundle in a thread, one at a time."""

    def __init__(
        self,
        read: Callable[[], LoadableBundle],
        *,
        clock: Callable[[], float],
        available_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """`read` reads the bundle to be served, and raises MDPError.

        `available_bytes` measures free memory, by default the machine's.
        """
        self._default = Reload(read)
        self._clock = clock
        self._available_bytes = available_bytes or Machine().available_bytes
        self._requested = False
        self._switch: Reload | None = None
        self._running = self._default
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    def request(self) -> None:
        """Read the bundle again soon. Safe from any thread and in a signal handler."""
        self._requested = True

    def switch(self, reload: Reload) -> None:
        """Do `reload` soon. Any thread, one at a time until it is settled."""
        self._switch = reload

    @property
    def busy(self) -> bool:
        """Tell whether a reload is requested or runs."""
        return self._requested or self._switch is not None or self._thread is not None

    def start(
        self, served: ServedBundles, *, make_room: Callable[[], None], done: Callable[[], None]
    ) -> None:
        """Start a requested reload unless one is running.

        `make_room` and `done` are called from its thread: where a third bundle is to be loaded,
        and at the end.
        """
        if self._thread is not None:
            return
        if self._switch is not None:
            self._running, self._switch = self._switch, None
        elif self._requested:
            self._running, self._requested = self._default, False
        else:
            return
        self._thread = threading.Thread(
            target=self._prepare,
            args=(self._running, served, make_room, done),
            name="reload",
            daemon=True,
        )
        self._thread.start()

    def _prepare(
        self,
        reload: Reload,
        served: ServedBundles,
        make_room: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        try:
            source = reload.read()
            outcome = prepare_bundle(
                source,
                served,
                available_bytes=self._available_bytes,
                make_room=make_room,
                clock=self._clock,
            )
            reload.commit(source)
            self._outcome = outcome
        except Exception as error:  # runtimes raise types of their own, without a common base
            self._outcome = Rejected(error)
        done()

    def outcome(self) -> Outcome | None:
        """The outcome of a reload that has ended, once."""
        outcome = self._outcome
        if outcome is not None and self._thread is not None:
            self._thread.join()
            self._outcome = self._thread = None
        return outcome

    def settle(self, error: str = "") -> None:
        """Tell who requested the reload of the last `outcome` that it is in effect, or why not."""
        self._running.settled(error)

    def join(self, timeout_s: float) -> bool:
        """Wait for a running reload; False if it is still running."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
