"""A device of a fleet of real agents that signals make fail: for the fault matrix and the soak."""

import signal
import time
from contextlib import suppress

from mdp.testing.agents import AgentFleet, AgentProcess

_START_ATTEMPTS = 20


class FaultyDevice:
    """The device called `faulty` in the fleet."""

    def __init__(self, fleet: AgentFleet, faulty: str) -> None:
        self.fleet, self.faulty = fleet, faulty

    @property
    def agent(self) -> AgentProcess:
        return self.fleet.agents[self.faulty]

    def kill(self) -> None:
        """SIGKILL."""
        self.agent.kill()

    def hang(self) -> None:
        """SIGSTOP."""
        self.agent.stop()

    def resume(self) -> None:
        """SIGCONT."""
        self.agent.signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM; raises AssertionError for another exit code than 0."""
        code = self.agent.terminate()
        assert code == 0, f"{self.faulty} ended with {code} on SIGTERM: {self.agent.stderr}"
        self.agent.close()

    def restart(self) -> None:
        """Start an ended agent at its address, and wait until it serves."""
        address = self.agent.address
        for _ in range(_START_ATTEMPTS):
            # An outgoing connection may hold the port for a moment.
            with suppress(AssertionError):
                self.fleet.start(self.faulty, bind=address)
                return
            self.agent.close()
            time.sleep(0.5)
        raise AssertionError(f"{self.faulty} does not start again")
