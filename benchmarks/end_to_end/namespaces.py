"""A small network: a switch and some machines, each in a network namespace, with slow cables.

Both ends of every cable are made inside namespaces; the host's own interfaces are not touched.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.end_to_end.devices import Machine, groups, remove_group
from mdp.errors import InputError

#: Begins every name; the process id follows, so that what a killed run left can be told.
PREFIX = "mdp-e2e-"
INTERFACE = "eth0"
_BRIDGE = "br0"
#: What goes through a cable at once, and what may wait in front of it: no packet is ever lost.
_BURST_BYTES, _QUEUE_BYTES = 3_100, 4_000_000


def run(*command: str) -> str:
    """Run a command of iproute2; raises InputError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise InputError(f"{' '.join(command)}: {said}")
    return done.stdout


class Network:
    """Machines on one switch; every cable has the same rate in both directions."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._mark = f"{PREFIX}{os.getpid()}-"
        self._switch = self._mark + "switch"
        self._made: list[str] = []

    def namespace(self, machine: Machine) -> str:
        return self._mark + machine.name

    def __enter__(self) -> "Network":
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        self._add(self._switch)
        run("ip", "-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", _BRIDGE, "up")
        for machine in self._machines:
            namespace = self.namespace(machine)
            self._add(namespace)
            port = self._port(machine)
            run("ip", "link", "add", INTERFACE, "netns", namespace, "type", "veth",
                "peer", "name", port, "netns", self._switch)  # fmt: skip
            address = f"{machine.address}/24"
            run("ip", "-n", namespace, "address", "add", address, "dev", INTERFACE)
            run("ip", "-n", self._switch, "link", "set", port, "master", _BRIDGE)
            for where, interface in ((namespace, INTERFACE), (self._switch, port)):
                # Without it, IPv6 would talk to itself on idle cables.
                run("ip", "-n", where, "link", "set", interface, "addrgenmode", "none")
                run("ip", "-n", where, "link", "set", interface, "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _add(self, namespace: str) -> None:
        run("ip", "netns", "add", namespace)
        self._made.append(namespace)

    @staticmethod
    def _port(machine: Machine) -> str:
        return f"port-{machine.name}"

    def set_rate(self, bandwidth_bps: float) -> None:
        """Limit every cable, in each direction."""
        limit = ("tbf", "rate", f"{round(bandwidth_bps)}bit",
                 "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))  # fmt: skip
        for machine in self._machines:
            for where, interface in (
                (self.namespace(machine), INTERFACE),
                (self._switch, self._port(machine)),
            ):
                run("tc", "-n", where, "qdisc", "replace", "dev", interface, "root", *limit)

    def counting(self) -> list[str]:
        """A command that prints how many bytes all machines have sent; any namespace runs it."""
        files = [
            f"/sys/class/net/{self._port(machine)}/statistics/rx_bytes"
            for machine in self._machines
        ]
        return ["ip", "netns", "exec", self._switch, "cat", *files]

    def close(self) -> None:
        while self._made:
            subprocess.run(
                ["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False
            )


def remove_remains() -> None:
    """Remove what runs left behind that were killed and could not do it themselves."""
    for group in groups(PREFIX):
        if _orphaned(group.name):
            remove_group(group)
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and _orphaned(name):
            run("ip", "netns", "delete", name)


def _orphaned(name: str) -> bool:
    owner = name.removeprefix(PREFIX).partition("-")[0]
    return owner.isdigit() and not Path(f"/proc/{owner}").exists()
