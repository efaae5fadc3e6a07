"""What happens to a fleet during the soak: a seeded schedule, and its execution by real signals."""

import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

from mdp.testing.agents import AgentFleet, AgentProcess

#: SIGKILL and a new start; SIGSTOP and SIGCONT; SIGTERM and a new start.
Kind = Literal["kill", "stop", "restart"]
#: Seconds that a fault lasts, before the agent is started or goes on.
LASTS_S = (0.2, 4.0)
#: Mean seconds between the faults of one agent.
EVERY_S = 12.0
#: The fleet is left alone for so long before the load begins to wind down.
QUIET_S = 10.0
_START_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    agent: str
    kind: Kind
    lasts_s: float


def schedule(
    seed: int, seconds: float, agents: Sequence[str], *, survivors: Sequence[str]
) -> list[Fault]:
    """Faults of every agent, each agent's one after the other; `survivors` are only stopped."""
    faults = []
    for place, agent in enumerate(agents):
        chance = random.Random(seed * 1000 + place)
        at_s = chance.uniform(1.0, EVERY_S)
        while at_s + LASTS_S[1] < seconds - QUIET_S:
            kind: Kind = "stop" if agent in survivors else chance.choice(get_args(Kind))
            lasts_s = chance.uniform(*LASTS_S)
            faults.append(Fault(at_s=at_s, agent=agent, kind=kind, lasts_s=lasts_s))
            at_s += lasts_s + chance.expovariate(1 / EVERY_S)
    return sorted(faults, key=lambda fault: fault.at_s)


class Agents:
    """The agents of the fleet, each started again at its own address with its own key."""

    def __init__(self, fleet: AgentFleet) -> None:
        self.fleet = fleet
        #: What went otherwise than it should have.
        self.complaints: list[str] = []
        #: When something happened, for the picture: (monotonic seconds, agent, kind).
        self.happened: list[tuple[float, str, str]] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, faults: Sequence[Fault]) -> None:
        began_s = time.monotonic()
        for name in self.fleet.agents:
            own = [fault for fault in faults if fault.agent == name]
            thread = threading.Thread(target=self._row, args=(own, began_s), name=name)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        self._over.set()
        self.finish()

    def _row(self, faults: Sequence[Fault], began_s: float) -> None:
        for fault in faults:
            if self._over.wait(max(0.0, began_s + fault.at_s - time.monotonic())):
                return
            self.happened.append((time.monotonic(), fault.agent, fault.kind))
            try:
                self._carry_out(fault)
            except Exception as error:  # a fault that fails is a finding; those that follow go on
                self.complaints.append(f"{fault}: {type(error).__name__}: {error}")

    def _carry_out(self, fault: Fault) -> None:
        agent = self.fleet.agents[fault.agent]
        if fault.kind == "stop":
            agent.stop()
            self._over.wait(fault.lasts_s)
            agent.signal(signal.SIGCONT)
            return
        if fault.kind == "kill":
            agent.kill()
        else:
            self.expect_clean_end(agent)
        for attempt in range(_START_ATTEMPTS):
            if self._over.wait(0.5 if attempt else fault.lasts_s):
                return
            # Its port may be taken for a moment: a connection on its way out may be given any.
            with suppress(AssertionError):
                self.fleet.start(fault.agent, bind=agent.address)
                return
            self.fleet.agents[fault.agent].close()
        raise AssertionError(f"{fault.agent} does not start again")

    def expect_clean_end(self, agent: AgentProcess) -> None:
        """SIGTERM; a code other than 0 is a complaint."""
        code = agent.terminate()
        if code != 0:
            self.complaints.append(f"{agent.device} ended with {code} on SIGTERM: {agent.stderr}")
        agent.close()

    def stop_all(self) -> None:
        for agent in self.fleet.agents.values():
            self.expect_clean_end(agent)
