"""Programs on the machines of the benchmark."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.end_to_end.devices import MACHINES, Machine, share_of_core
from benchmarks.end_to_end.leaving import undisturbed
from benchmarks.end_to_end.namespaces import PREFIX, Network
from mdp.errors import MDPError
from mdp.testing.processes import LineProcess

#: A process enters its group while it still sees the host's /sys, then its namespace and core.
_ENTER = 'echo $$ > "$1" && shift && exec ip netns exec "$@"'
#: A program that has said nothing for so long is stuck: some compile or load large models first.
PATIENCE_S = 600.0
#: Where the packages lie that programs import.
ROOT = Path(__file__).resolve().parents[2]


class ProgramError(MDPError):
    """A program of the benchmark ended before it was ready."""


class Machines:
    """Runs programs on machines: in their namespace, on their core, within their share."""

    def __init__(self, network: Network, groups: dict[str, Path], folder: Path) -> None:
        self._network = network
        self._groups = groups
        self._folder = folder

    def log(self, machine: Machine, name: str) -> Path:
        """Where a program's stderr goes."""
        return self._folder / f"{machine.name}-{name}.log"

    @contextmanager
    def running(
        self, machine: Machine, name: str, command: Sequence[object], *, ready: str = ""
    ) -> Iterator[LineProcess]:
        """A program that has said a line with `ready` in it, if any; it is killed at the end.

        Raises ProgramError where it ends, or says nothing for long, before.
        """
        namespace, core = self._network.namespace(machine), str(machine.core)
        words = ["sh", "-c", _ENTER, "sh", self._groups[machine.name], namespace]
        with LineProcess(
            f"{name} on {machine.name}",
            [*words, "taskset", "-c", core, *command],
            self.log(machine, name),
            environment={"PYTHONPATH": str(ROOT)},
            patience_s=PATIENCE_S,
            # Ctrl-C is for the benchmark, which ends everything in its order.
            own_session=True,
        ) as process:
            if ready:
                line_with(process, ready)
            yield process


def line_with(process: LineProcess, wanted: str) -> str:
    """The next line of a program that has `wanted` in it; raises ProgramError."""
    try:
        return process.line_with(wanted)
    except AssertionError as error:
        raise ProgramError(str(error)) from error


@contextmanager
def machines(folder: Path) -> Iterator[tuple[Network, Machines]]:
    """The network and what runs on it; nothing is left of either."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(MACHINES))
        # Groups go first: a namespace with a process in it would outlive its name.
        mark = f"{PREFIX}{os.getpid()}-"
        shares = {
            machine.name: stack.enter_context(share_of_core(machine, mark + machine.name))
            for machine in MACHINES
        }
        try:
            yield network, Machines(network, shares, folder)
        finally:
            with undisturbed():
                stack.close()
