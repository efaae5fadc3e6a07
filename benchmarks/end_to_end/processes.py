"""Programs on the machines of the benchmark."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.end_to_end.devices import MACHINES, Machine, share_of_core
from benchmarks.end_to_end.leaving import undisturbed
from benchmarks.end_to_end.namespaces import PREFIX, Network
from mdp.errors import MDPError

#: A process enters its group while it still sees the host's /sys, then its namespace and core.
_ENTER = 'echo $$ > "$1" && shift && exec ip netns exec "$@"'
_LAST_LINES = 3
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
    ) -> Iterator[subprocess.Popen[str]]:
        """A program that has said a line with `ready` in it, if any; it is killed at the end."""
        log = self.log(machine, name)
        namespace, core = self._network.namespace(machine), str(machine.core)
        words = ["sh", "-c", _ENTER, "sh", str(self._groups[machine.name]), namespace]
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*words, "taskset", "-c", core, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C is for the benchmark, which ends everything in its order.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            if ready:
                await_line(process, ready, f"{name} on {machine.name}", log)
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program with its children, which would otherwise keep its pipes open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def await_line(process: subprocess.Popen[str], wanted: str, what: str, log: Path) -> str:
    """The first line that has `wanted` in it; raises ProgramError if the program ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if wanted in line:
            return line
    said = " / ".join(log.read_text().splitlines()[-_LAST_LINES:])
    raise ProgramError(f"{what} ended with {process.wait()}: {said}")


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
