"""What the machines of the benchmark may compute: a core, and a share of it, by a control group.

Three devices and a client on two cores: each is held to its core and, in every 10 ms, to its share
of it. The shares of one core sum up to less than one, so that nobody takes what is another one's.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError

PERIOD_US = 10_000
_ROOT = Path("/sys/fs/cgroup")
#: How long processes that were killed are waited for.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    core: int
    #: Of that core.
    share: float
    address: str


CLIENT = Machine(name="client", core=1, share=0.50, address="10.77.0.1")
DEVICES = (
    Machine(name="fast", core=0, share=0.60, address="10.77.0.2"),
    Machine(name="middle", core=1, share=0.45, address="10.77.0.3"),
    Machine(name="slow", core=0, share=0.30, address="10.77.0.4"),
)
MACHINES = (CLIENT, *DEVICES)


def check_cores() -> None:
    """Raise InputError unless this process may use every core that a machine is given."""
    missing = {machine.core for machine in MACHINES} - os.sched_getaffinity(0)
    if missing:
        raise InputError(f"expected cores 0 and 1 to be usable, {sorted(missing)} are not")


@contextmanager
def share_of_core(machine: Machine, name: str) -> Iterator[Path]:
    """The file that takes the ids of the processes which share `machine`'s computing.

    Whatever runs there at the end is killed. Raises InputError where no group can be made.
    """
    quota_us = round(machine.share * PERIOD_US)
    root, limits = _controller(quota_us)
    group = root / name
    try:
        group.mkdir()
        for file, value in limits.items():
            (group / file).write_text(value)
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise InputError(f"{group}: expected to limit computing there: {error.strerror}") from error
    try:
        yield group / "cgroup.procs"
    finally:
        remove_group(group)


def _controller(quota_us: int) -> tuple[Path, dict[str, str]]:
    """Where groups are made, and the files that hold a quota, in either version of them."""
    unified = _ROOT / "cgroup.subtree_control"
    if unified.exists():
        if "cpu" not in unified.read_text().split():
            raise InputError(f"{unified}: expected 'cpu' among the controllers")
        return _ROOT, {"cpu.max": f"{quota_us} {PERIOD_US}"}
    for name in ("cpu", "cpu,cpuacct"):
        if (_ROOT / name / "cpu.cfs_quota_us").exists():
            files = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
            return _ROOT / name, files
    raise InputError(f"{_ROOT}: expected control groups that limit computing, found none")


def remove_group(group: Path) -> None:
    """Kill what runs in a group of this benchmark and remove it; gives up after some seconds."""
    until_s = time.monotonic() + _LEAVE_S
    while group.exists() and time.monotonic() < until_s:
        for line in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def groups(prefix: str) -> list[Path]:
    """Groups that runs of this benchmark have left behind or still have."""
    return [path for place in (_ROOT, *_ROOT.glob("cpu*")) for path in place.glob(f"{prefix}*")]
