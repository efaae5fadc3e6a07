"""Faults of the soak: a seeded schedule, and its execution by signals."""

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
#: Seconds that a fault lasts, before the agent is started or continued.
LASTS_S = (0.2, 4.0)
#: Mean seconds between the faults of one agent.
EVERY_S = 12.0
#: Seconds without a fault at the end.
QUIET_S = 10.0
_START_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    agent: str
    kind: Kind
    lasts_s: float


def schedule(seed: int, seconds: float, agents: Sequence[str], survivor: str) -> list[Fault]:
    """Faults of every agent, each agent's one after the other; the `survivor` is only stopped."""
    faults = []
    for place, agent in enumerate(agents):
        chance = random.Random(seed * 1000 + place)
        at_s = chance.uniform(1.0, EVERY_S)
        while at_s + LASTS_S[1] < seconds - QUIET_S:
            kind: Kind = "stop" if agent == survivor else chance.choice(get_args(Kind))
            lasts_s = chance.uniform(*LASTS_S)
            faults.append(Fault(at_s=at_s, agent=agent, kind=kind, lasts_s=lasts_s))
            at_s += lasts_s + chance.expovariate(1 / EVERY_S)
    return sorted(faults, key=lambda fault: fault.at_s)


class Faults:
    """Executes a schedule, a thread for each agent; an agent starts again where it was."""

    def __init__(self, fleet: AgentFleet) -> None:
        self._fleet = fleet
        #: Unexpected events, such as an exit code other than 0 after SIGTERM.
        self.complaints: list[str] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, faults: Sequence[Fault]) -> None:
        began_s = time.monotonic()
        for name in self._fleet.agents:
            own = [fault for fault in faults if fault.agent == name]
            self._threads.append(threading.Thread(target=self._run, args=(own, began_s)))
            self._threads[-1].start()

    def finish(self) -> None:
        """Wait for the last fault."""
        for thread in self._threads:
            thread.join()

    def abort(self) -> None:
        self._over.set()
        self.finish()

    def _run(self, faults: Sequence[Fault], began_s: float) -> None:
        for fault in faults:
            if self._over.wait(max(0.0, began_s + fault.at_s - time.monotonic())):
                return
            try:
                self._make(fault)
            except Exception as error:  # a fault that fails is a finding; the next ones follow
                self.complaints.append(f"{fault}: {type(error).__name__}: {error}")

    def _make(self, fault: Fault) -> None:
        agent = self._fleet.agents[fault.agent]
        if fault.kind == "stop":
            agent.stop()
            self._over.wait(fault.lasts_s)
            agent.signal(signal.SIGCONT)
            return
        if fault.kind == "kill":
            agent.kill()
        else:
            self._terminate(agent)
        for attempt in range(_START_ATTEMPTS):
            if self._over.wait(0.5 if attempt else fault.lasts_s):
                return
            # An outgoing connection may hold the port for a moment.
            with suppress(AssertionError):
                self._fleet.start(fault.agent, bind=agent.address)
                return
            self._fleet.agents[fault.agent].close()
        raise AssertionError(f"{fault.agent} does not start again")

    def _terminate(self, agent: AgentProcess) -> None:
        """SIGTERM; an exit code other than 0 is a complaint."""
        if code := agent.terminate():
            self.complaints.append(f"{agent.device} ended with {code} on SIGTERM: {agent.stderr}")
        agent.close()

    def stop_all(self) -> None:
        for agent in self._fleet.agents.values():
            self._terminate(agent)
