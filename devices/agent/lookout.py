"""Where an agent's main thread waits: it computes nothing, so that it can take signals."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

#: How often it looks although nothing has happened.
LOOK_UP_S = 1.0


class Lookout:
    """Waits for an end, and calls `look` now and then and when asked to."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        # Putting is one of the few things that may be done anywhere in a signal handler.
        self._asked: SimpleQueue[None] = SimpleQueue()

    def ask(self) -> None:
        """Have `look` called at once. Any thread, and in a signal handler."""
        self._asked.put(None)

    def end(self) -> None:
        """Let `wait` return. Any thread."""
        self._ended.set()
        self.ask()

    def wait(self, look: Callable[[], None]) -> None:
        """Wait for `end`."""
        while not self._ended.is_set():
            with suppress(Empty):
                self._asked.get(timeout=LOOK_UP_S)
            look()
