"""A device behind a cable of its own: network namespaces, veth pairs, and `tc tbf` for bandwidth.

    this namespace ── veth ── switch ── veth ── device

The switch is a namespace that forwards packets. With forwarding off they are dropped and no
connection is closed, as by a switch without power. Needs Linux and root.
"""

import contextlib
import os
import subprocess
from functools import cache

from mdp.closing import Closing

#: Addresses from the block for tests of network devices (RFC 2544), so that no real one is hidden.
NEAR, SWITCH_NEAR, SWITCH_FAR, FAR = "198.18.0.1", "198.18.0.2", "198.19.0.2", "198.19.0.1"
NEAR_END = "mdp-near"
MOST_BPS = 10_000_000_000
NEAR_NET, FAR_NET = "198.18.0.0/24", "198.19.0.0/24"


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Namespace:
    """A network namespace, alive as long as one process in it, which ends with this one."""

    def __init__(self) -> None:
        # The child says when it is in its namespace.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo there; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            _, said = self._holder.communicate()
            raise OSError(said.decode().strip())
        self.pid = self._holder.pid

    def inside(self) -> list[str]:
        """Words to put before a command that shall run in here."""
        return ["nsenter", "--net", f"--target={self.pid}", "--"]

    def run(self, *command: object) -> None:
        """Run a command in here; raises OSError."""
        _run(*self.inside(), *command)

    def close(self) -> None:
        """Let go of it; its links vanish with the last process in it."""
        self._holder.kill()
        self._holder.communicate()


class Wire(Closing):
    """A cable to one device, at `address`; commands after `inside()` run on the device."""

    address = FAR

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self._switch = undo.enter_context(contextlib.closing(Namespace()))
            self._device = undo.enter_context(contextlib.closing(Namespace()))
            self._device.run("ip", "link", "set", "lo", "up")
            self._connect(None, NEAR_END, NEAR, SWITCH_NEAR, self._switch, "near")
            self._connect(self._device, "far", FAR, SWITCH_FAR, self._switch, "far-side")
            _run("ip", "route", "replace", FAR_NET, "via", SWITCH_NEAR)
            self._device.run("ip", "route", "replace", NEAR_NET, "via", SWITCH_FAR)
            self.join()
            self._undo = undo.pop_all()

    def _connect(
        self,
        end: Namespace | None,
        name: str,
        address: str,
        other_address: str,
        switch: Namespace,
        other_name: str,
    ) -> None:
        where = os.getpid() if end is None else end.pid
        _run("ip", "link", "add", name, "netns", where, "type", "veth",
             "peer", "name", other_name, "netns", switch.pid)  # fmt: skip
        run = _run if end is None else end.run
        for does, what, at in ((run, name, address), (switch.run, other_name, other_address)):
            does("ip", "address", "add", f"{at}/24", "dev", what)
            does("ip", "link", "set", what, "up")

    def inside(self) -> list[str]:
        """Words to put before a command that shall run on the device."""
        return self._device.inside()

    def part(self) -> None:
        """Lose every packet, in both directions."""
        self._switch.run("sysctl", "--quiet", "--write", "net.ipv4.ip_forward=0")

    def join(self) -> None:
        """Pass packets on."""
        self._switch.run("sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")

    def limit(self, rate_bps: int) -> None:
        """Let no more than `rate_bps` through each way, with a second's worth of queue."""
        burst_bytes = max(1600, rate_bps // 2000)
        for side in ("near", "far-side"):
            self._switch.run("tc", "qdisc", "replace", "dev", side, "root", "tbf",
                             "rate", f"{rate_bps}bit", "burst", burst_bytes,
                             "latency", "1s")  # fmt: skip

    def unlimit(self) -> None:
        """As fast as it goes; what waits in the queues is not lost."""
        self.limit(MOST_BPS)

    def close(self) -> None:
        """Take the cable away."""
        # At once: what a namespace that has gone leaves behind is cleared away later.
        with self._undo:
            _run("ip", "link", "delete", NEAR_END)


@cache
def wiring_works() -> str:
    """Reason why no such cable can be laid here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    try:
        with Wire() as wire:
            wire.limit(1_000_000)
    except OSError as error:
        return f"no cable can be laid: {error}"
    return ""
