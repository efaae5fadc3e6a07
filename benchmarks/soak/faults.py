"""Faults of the soak: a seeded schedule, and its execution by signals."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faults.device import FaultyDevice
from mdp.testing.agents import AgentFleet

#: Kind -> how a device fails, and how it is healed.
KINDS: Mapping[str, tuple[Callable[[FaultyDevice], None], Callable[[FaultyDevice], None]]] = {
    "kill": (FaultyDevice.kill, FaultyDevice.restart),
    "stop": (FaultyDevice.hang, FaultyDevice.resume),
    "restart": (FaultyDevice.stop, FaultyDevice.restart),
}
#: Seconds that a fault lasts.
LASTS_S = (0.2, 4.0)
#: Mean seconds between the faults of one agent.
EVERY_S = 12.0
#: Seconds without a fault at the end.
QUIET_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    agent: str
    kind: str
    lasts_s: float


def schedule(seed: int, seconds: float, agents: Sequence[str], survivor: str) -> list[Fault]:
    """Faults of every agent, each agent's one after the other; the `survivor` is only stopped."""
    faults = []
    for place, agent in enumerate(agents):
        chance = random.Random(seed * 1000 + place)
        at_s = chance.uniform(1.0, EVERY_S)
        while at_s + LASTS_S[1] < seconds - QUIET_S:
            kind = "stop" if agent == survivor else chance.choice([*KINDS])
            lasts_s = chance.uniform(*LASTS_S)
            faults.append(Fault(at_s=at_s, agent=agent, kind=kind, lasts_s=lasts_s))
            at_s += lasts_s + chance.expovariate(1 / EVERY_S)
    return sorted(faults, key=lambda fault: fault.at_s)


class Faults:
    """Executes a schedule, a thread for each agent."""

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
            make, heal = KINDS[fault.kind]
            self._attempt(make, fault.agent, fault)
            if self._over.wait(fault.lasts_s):
                return
            self._attempt(heal, fault.agent, fault)

    def _attempt(self, action: Callable[[FaultyDevice], None], name: str, what: object) -> None:
        """Apply `action`; its failure is a finding, and the next faults follow."""
        try:
            action(FaultyDevice(self._fleet, name))
        except Exception as error:
            self.complaints.append(f"{what}: {type(error).__name__}: {error}")

    def stop_all(self) -> None:
        for name in self._fleet.agents:
            self._attempt(FaultyDevice.stop, name, name)
