"""Faults of the soak: a seeded schedule, and its execution by signals."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Faulty(Protocol):
    """An agent or a gateway that signals make fail."""

    def kill(self) -> None: ...
    def hang(self) -> None: ...
    def resume(self) -> None: ...
    def stop(self) -> None: ...
    def restart(self) -> None: ...


Action = Callable[[Faulty], None]
#: Kind -> how a process fails, and how it is healed.
KINDS: Mapping[str, tuple[Action, Action]] = {
    "kill": (lambda one: one.kill(), lambda one: one.restart()),
    "stop": (lambda one: one.hang(), lambda one: one.resume()),
    "restart": (lambda one: one.stop(), lambda one: one.restart()),
}
#: Seconds that a fault lasts.
LASTS_S = (0.2, 4.0)
#: Mean seconds between the faults of one process in the soak.
EVERY_S = 12.0
#: Seconds without a fault at the end.
QUIET_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    name: str
    kind: str
    lasts_s: float


def schedule(
    seed: int, seconds: float, ended_until: Mapping[str, float], every_s: float = EVERY_S
) -> list[Fault]:
    """Faults of every process in `ended_until`, one process's one after the other.

    Each is killed and restarted in that share of the run from its beginning, and only stopped after
    it: 0 is never ended. Between two faults of a process are `every_s` seconds on average.
    """
    faults = []
    for place, (name, share) in enumerate(ended_until.items()):
        chance = random.Random(seed * 1000 + place)
        at_s = chance.uniform(1.0, every_s)
        while at_s + LASTS_S[1] < seconds - QUIET_S:
            kind = chance.choice([*KINDS]) if at_s < share * seconds else "stop"
            lasts_s = chance.uniform(*LASTS_S)
            faults.append(Fault(at_s=at_s, name=name, kind=kind, lasts_s=lasts_s))
            at_s += lasts_s + chance.expovariate(1 / every_s)
    return sorted(faults, key=lambda fault: fault.at_s)


def count_faults(faults: Sequence[Fault]) -> dict[str, dict[str, int]]:
    """Process -> kind -> how many of its faults are of it."""
    names = dict.fromkeys(fault.name for fault in faults)
    return {
        name: {kind: sum((f.name, f.kind) == (name, kind) for f in faults) for kind in KINDS}
        for name in names
    }


class Faults:
    """Executes a schedule, a thread for each process."""

    def __init__(self, targets: Mapping[str, Faulty]) -> None:
        self._targets = targets
        #: Unexpected events, such as an exit code other than 0 after SIGTERM.
        self.complaints: list[str] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, faults: Sequence[Fault]) -> None:
        began_s = time.monotonic()
        for name in self._targets:
            own = [fault for fault in faults if fault.name == name]
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
            self._attempt(make, fault.name, fault)
            if self._over.wait(fault.lasts_s):
                return
            self._attempt(heal, fault.name, fault)

    def _attempt(self, action: Action, name: str, what: object) -> None:
        """Apply `action`; its failure is a finding, and the next faults follow."""
        try:
            action(self._targets[name])
        except Exception as error:
            self.complaints.append(f"{what}: {type(error).__name__}: {error}")

    def stop_all(self) -> None:
        """End every process by SIGTERM."""
        for name in self._targets:
            self._attempt(lambda one: one.stop(), name, name)
