"""Announces an agent on the local network while it serves, and what it serves by then."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devices.agent.bundles import Candidate
from mdp.discovery.announcements import texts_of
from mdp.discovery.mdns import Announcer
from mdp.errors import MDPError

#: How often it is looked whether another bundle is served.
LOOK_S = 1.0
#: How long the goodbye may take.
LEAVE_S = 2.0


@contextmanager
def announced(
    bound: str,
    public_key: str | None,
    served: Callable[[], Candidate],
    report: Callable[[str], None],
) -> Iterator[None]:
    """Announce the agent at `bound`; raises InputError or AgentError if that cannot be done.

    In a thread of its own, as announcing takes some tenths of a second each time.
    """

    def texts() -> dict[str, str]:
        candidate = served()
        assignment = candidate.assignment
        return texts_of(
            device=assignment.device,
            digest=candidate.bundle.digest,
            k=assignment.k,
            public_key=public_key,
        )

    announcer = Announcer(bound, texts())
    over = threading.Event()

    def keep_true() -> None:
        try:
            announcer.begin()
            while not over.wait(LOOK_S):
                announcer.say(texts())
        except MDPError as error:
            report(str(error))
        finally:
            announcer.close()

    thread = threading.Thread(target=keep_true, name="announcing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE_S)
