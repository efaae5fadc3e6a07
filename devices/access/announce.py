"""Announces a serving agent, and its current bundle, on the local network."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devices.agent.bundles import LoadableBundle
from mdp.discovery.announcements import texts_of
from mdp.discovery.mdns import Announcer
from mdp.errors import MDPError

#: How often the current bundle is compared with the announced one.
CHECK_S = 1.0
#: How long the goodbye may take.
LEAVE_S = 2.0


@contextmanager
def announce_agent(
    bound: str,
    public_key: str | None,
    current: Callable[[], LoadableBundle],
    report: Callable[[str], None],
) -> Iterator[None]:
    """Announce the agent at `bound` in a thread, as each announcement takes tenths of a second.

    Raises InputError for an address that cannot be announced, AgentError without zeroconf, and
    AddressUnavailable without a network.
    """

    def texts() -> dict[str, str]:
        source = current()
        return texts_of(
            device=source.assignment.device,
            digest=source.bundle.digest,
            k=source.assignment.k,
            public_key=public_key,
        )

    announcer = Announcer(bound, texts())
    over = threading.Event()

    def keep_current() -> None:
        try:
            announcer.begin()
            while not over.wait(CHECK_S):
                announcer.update(texts())
        except MDPError as error:
            report(str(error))
        finally:
            announcer.close()

    thread = threading.Thread(target=keep_current, name="announcing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE_S)
