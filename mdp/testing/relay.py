"""A link that misbehaves: a TCP relay between a client and one agent, in user space.

What is lost on a real link never reaches a TCP reader as a gap: it is sent again, and everything
behind it waits. Loss is modelled as just that: each piece is delayed by the retransmissions it
needs, each twice as long as the one before, and nothing overtakes it. A partition is modelled as
silence: nothing moves, nothing is closed, and connections still under way end nowhere.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from mdp.closing import Closing
from mdp.testing import relay_process
from mdp.testing.processes import LineProcess
from mdp.testing.relay_process import Link

#: A link that passes everything on at once.
WELL = Link()


class Relay(Closing):
    """Listens on loopback and passes on to `address`, as `link` says at that moment.

    In a process of its own, so that it takes no time from the threads of this one.
    """

    def __init__(self, address: str, *, seed: int = 0) -> None:
        """Pass on to `address`, tcp://HOST:PORT; `seed` decides which segments are lost."""
        # By its path: it starts without numpy and all else that `mdp` loads.
        command = [sys.executable, "-P", Path(relay_process.__file__), address, seed]
        self._process = LineProcess("the relay", command)
        self._link = WELL
        #: Where to connect instead of to `address`.
        self.address = self._process.line("its address")

    @property
    def link(self) -> Link:
        """The present behaviour of the link."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._process.ask(json.dumps(asdict(link)))
        self._link = link

    @property
    def troubles(self) -> int:
        """Segments lost and connections reset so far."""
        return int(self._process.ask(json.dumps(asdict(self._link))))

    def close(self) -> None:
        """End every connection, the listener and the process."""
        self._process.finish()
