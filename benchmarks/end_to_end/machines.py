"""The client, a switch and three devices: namespaces, cables of a limited rate, shares of cores.

Each machine is held to a core and, in every 10 ms, to its share of it (a control group). The shares
of one core sum up to less than one, so that nobody takes what is another one's. Namespaces vanish
with this process; the groups that a killed run leaves, the next one removes.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import MDPError
from mdp.testing.machine_faults import GROUPS
from mdp.testing.processes import LineProcess, until
from mdp.testing.wires import Namespace

PERIOD_US = 10_000
#: Begins every group's name; the process id follows.
PREFIX = "mdp-e2e-"
INTERFACE = "eth0"
#: What goes through a cable at once, and what may wait in front of it: no packet is ever lost.
_BURST_BYTES, _QUEUE_BYTES = 3_100, 4_000_000
#: A process enters its group before its namespace and core.
_ENTER = 'echo $$ > "$0" && exec "$@"'
#: A program that has said nothing for so long is stuck: some compile or load large models first.
PATIENCE_S = 600.0
#: Where the packages lie that programs import.
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    core: int
    #: Of that core.
    share: float
    address: str


CLIENT = Machine("client", core=1, share=0.50, address="10.77.0.1")
DEVICES = (
    Machine("fast", core=0, share=0.60, address="10.77.0.2"),
    Machine("middle", core=1, share=0.45, address="10.77.0.3"),
    Machine("slow", core=0, share=0.30, address="10.77.0.4"),
)
MACHINES = (CLIENT, *DEVICES)


class ProgramError(MDPError):
    """A program of the benchmark ended before it was ready."""


class Network:
    """All machines on one switch, running programs within their limits."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        """Logs go to `folder`; `stack` takes everything away again. Raises OSError."""
        self._folder = folder
        self._switch = stack.enter_context(closing(Namespace()))
        self._switch.run("ip", "link", "add", "br0", "type", "bridge")
        self._switch.run("ip", "link", "set", "br0", "up")
        self._spaces = {m.name: stack.enter_context(closing(Namespace())) for m in MACHINES}
        self._groups = {m.name: stack.enter_context(share_of_core(m)) for m in MACHINES}
        for machine in MACHINES:
            space, port = self._spaces[machine.name], f"port-{machine.name}"
            self._switch.run("ip", "link", "add", port, "type", "veth",
                             "peer", "name", INTERFACE, "netns", space.pid)  # fmt: skip
            self._switch.run("ip", "link", "set", port, "master", "br0")
            space.run("ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            space.run("ip", "link", "set", "lo", "up")
            for where, interface in ((space, INTERFACE), (self._switch, port)):
                # Without it, IPv6 would talk to itself on idle cables.
                where.run("ip", "link", "set", interface, "addrgenmode", "none")
                where.run("ip", "link", "set", interface, "up")

    def set_rate(self, bandwidth_bps: float) -> None:
        """Limit every cable, in each direction."""
        limit = ("root", "tbf", "rate", f"{round(bandwidth_bps)}bit",
                 "burst", _BURST_BYTES, "limit", _QUEUE_BYTES)  # fmt: skip
        for name, space in self._spaces.items():
            space.run("tc", "qdisc", "replace", "dev", INTERFACE, *limit)
            self._switch.run("tc", "qdisc", "replace", "dev", f"port-{name}", *limit)

    def counting(self) -> list[str]:
        """A command that prints the switch's interfaces' counters; see `sent_bytes`."""
        return [*self._switch.inside(), "cat", "/proc/net/dev"]

    def log(self, machine: Machine, name: str) -> Path:
        """Where a program's stderr goes."""
        return self._folder / f"{machine.name}-{name}.log"

    @contextmanager
    def running(
        self, machine: Machine, name: str, command: Sequence[object], *, ready: str = "READY"
    ) -> Iterator[LineProcess]:
        """A program that has said a line with `ready` in it, if any; it is killed at the end.

        Raises ProgramError where it ends, or says nothing for long, before.
        """
        enter = ["sh", "-c", _ENTER, self._groups[machine.name]]
        inside = [*self._spaces[machine.name].inside(), "taskset", "-c", machine.core]
        with LineProcess(
            f"{name} on {machine.name}",
            [*enter, *inside, *command],
            self.log(machine, name),
            environment={"PYTHONPATH": str(ROOT)},
            patience_s=PATIENCE_S,
            # Ctrl-C is for the benchmark, which ends everything in its order.
            own_session=True,
        ) as process:
            try:
                if ready:
                    process.line_with(ready)
            except AssertionError as error:
                raise ProgramError(str(error)) from error
            yield process


def sent_bytes(counting: Sequence[str]) -> int:
    """Bytes that all machines have sent until now: what the switch's ports have received."""
    told = subprocess.run(counting, capture_output=True, text=True, check=True).stdout
    ports = [line.split(":") for line in told.splitlines() if line.strip().startswith("port-")]
    return sum(int(counts.split()[0]) for _, counts in ports)


@contextmanager
def share_of_core(machine: Machine) -> Iterator[Path]:
    """The file that takes the ids of the processes which share `machine`'s computing.

    Whatever runs there at the end is killed.
    """
    quota_us = round(machine.share * PERIOD_US)
    files = {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota_us}
    group = _root() / f"{PREFIX}{os.getpid()}-{machine.name}"
    group.mkdir()
    try:
        for file, value in {**files, "cpu.max": f"{quota_us} {PERIOD_US}"}.items():
            if (group / file).exists():
                (group / file).write_text(str(value))
        yield group / "cgroup.procs"
    finally:
        _remove(group)


def _root() -> Path:
    """Where groups that limit computing are made: version 1's own tree, or version 2's only one."""
    own = (found for found in GROUPS.glob("cpu*") if (found / "cpu.cfs_quota_us").exists())
    return next(own, GROUPS)


def _remove(group: Path) -> None:
    def gone() -> bool:
        for line in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()
        return not group.exists()

    until(gone, f"{group} is empty")


def groups_left(owner: int | None = None) -> list[Path]:
    """Groups of a run of this process id, or of runs that have ended."""
    found = _root().glob(f"{PREFIX}*")
    owners = {group: int(group.name.removeprefix(PREFIX).partition("-")[0]) for group in found}
    ended = [group for group, pid in owners.items() if not Path(f"/proc/{pid}").exists()]
    return ended if owner is None else [group for group, pid in owners.items() if pid == owner]


def remove_remains() -> None:
    """Remove what runs left behind that were killed and could not do it themselves."""
    for group in groups_left():
        _remove(group)
