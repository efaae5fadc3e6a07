"""Connections that are made anew when the fleet file has changed, and lines that are said once."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

#: Different lines of one speaker, of which each is said once.
MOST_SAID = 100


class Connection(Protocol):
    """Interface of a connection, as far as making it anew needs it."""

    def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Connection)


class RenewedConnection(Generic[C]):
    """A connection of one thread, which any thread may ask to make anew."""

    def __init__(self, connect: Callable[[], C]) -> None:
        """Connect; raises what `connect` raises."""
        self._connect, self._connection = connect, connect()
        self._wanted = threading.Event()

    def renew(self) -> None:
        """Have the next `latest` connect anew; any thread."""
        self._wanted.set()

    def latest(self) -> C:
        """Return the connection, made anew if that was asked for.

        Raises what `connect` raises; then the former one stays, and the next call tries again.
        """
        if self._wanted.is_set():
            # Before connecting: what changes meanwhile asks for another one.
            self._wanted.clear()
            try:
                connection = self._connect()
            except BaseException:
                self._wanted.set()
                raise
            self._connection, former = connection, self._connection
            former.close()
        return self._connection

    @property
    def current(self) -> C:
        """The connection that there is, whatever was asked for since."""
        return self._connection

    def close(self) -> None:
        """Close the connection that there is."""
        self._connection.close()


class SaidOnce:
    """Reports each line once, and of endlessly many different ones the first `MOST_SAID`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said and len(self._said) < MOST_SAID:
            self._said.add(text)
            self._report(text)
