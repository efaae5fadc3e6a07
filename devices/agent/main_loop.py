"""The agent's main thread, which computes nothing and so handles signals at once."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

#: The longest time between two periodic calls.
PERIOD_S = 1.0


class MainLoop:
    """Makes a periodic call until `end`, and one for each `wake`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        # `SimpleQueue.put` is reentrant, as a signal handler needs it.
        self._woken: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Make the periodic call now. Safe from any thread and in a signal handler."""
        self._woken.put(None)

    def end(self) -> None:
        """Let `run` return. Any thread."""
        self._ended.set()
        self.wake()

    def run(self, periodic: Callable[[], None]) -> None:
        """Call `periodic` every `PERIOD_S` and at each `wake` until `end`."""
        while not self._ended.is_set():
            with suppress(Empty):
                self._woken.get(timeout=PERIOD_S)
            periodic()
