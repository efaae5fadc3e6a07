"""Load by other processes beside a measurement, which makes it slower."""

import os
import time
from collections.abc import Callable
from pathlib import Path

#: A measurement counts as disturbed if other processes keep more cores busy than this; with the
#: kernel's ticks of 10 ms, less is not measurable in a third of a second.
BUSY_CORES = 0.15
#: Seconds over which that can be told.
LEAST_S = 1 / 3


def is_busy(others_cores: float | None) -> bool:
    """Tell whether other processes are known to have disturbed a measurement."""
    return (others_cores or 0.0) > BUSY_CORES


def cpu_seconds(stat: str) -> float | None:
    """CPU seconds used by all processes since boot, stolen time included, by /proc/stat."""
    fields = stat.split("\n", 1)[0].split()[1:9]
    if len(fields) < 8:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def system_cpu_s() -> float | None:
    """The same of this system; None where it does not tell."""
    try:
        return cpu_seconds(Path("/proc/stat").read_text())
    except OSError:
        return None


class OtherLoad:
    """Cores that all other processes keep busy, from now on."""

    def __init__(
        self,
        busy_cpu_s: Callable[[], float | None] = system_cpu_s,
        own_cpu_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy_cpu_s, self._own_cpu_s, self._clock = busy_cpu_s, own_cpu_s, clock
        self._begin = self._read()

    def _read(self) -> tuple[float, float | None]:
        busy_s, own_s = self._busy_cpu_s(), self._own_cpu_s()
        return self._clock(), None if busy_s is None else busy_s - own_s

    def cores(self, least_s: float = 0.0) -> float | None:
        """Their average number until now; None if unknown, or over less than `least_s`."""
        (begin_s, before), (end_s, after) = self._begin, self._read()
        if before is None or after is None or end_s - begin_s <= least_s:
            return None
        # The kernel counts in ticks, so the difference can come out slightly negative.
        return max(0.0, round((after - before) / (end_s - begin_s), 2))
