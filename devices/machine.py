"""Readings of a Linux system: processor, memory, load, temperature, power.

On other systems, and where a file is missing or unreadable, a reading is None; the probe then
measures without it, which its profile shows.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mdp.load import cpu_seconds

_MICRO, _MILLI = 1e-6, 1e-3
#: A control group's limit and use of memory, and which of it is given back first (cgroups(7)); in
#: version 1.
_MEMORY_FILES = ("memory.max", "memory.current", "inactive_file")
_MEMORY_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class Machine:
    """Reads below `root`, which is `/` but in tests."""

    root: Path = Path("/")

    def processor(self) -> str:
        """The processor's or board's name."""
        board = self._text("proc/device-tree/model")
        if board:
            return board.strip("\0 \n")
        for line in (self._text("proc/cpuinfo") or "").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def board(self) -> str:
        """The board's or the computer's kind, without what tells one of them from another."""
        if board := self._text("proc/device-tree/model"):
            return board.strip("\0 \n")
        if self.is_virtual():
            return "virtual machine"
        told = (self._text(f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
        return " ".join(text.strip() for text in told if text)

    def is_virtual(self) -> bool:
        """Tell whether the processor reports a hypervisor."""
        return "hypervisor" in (self._text("proc/cpuinfo") or "")

    def available_bytes(self) -> int | None:
        """Memory that this process can have without swapping, by its control groups' limits too."""
        free = list(self._free_in_groups())
        for line in (self._text("proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
        return min(free, default=None)

    def _free_in_groups(self) -> Iterator[int]:
        """Bytes left in each control group with a limit that this process is in."""
        for line in (self._text("proc/self/cgroup") or "").splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers == "":
                top, limit, used, cache = "sys/fs/cgroup", *_MEMORY_FILES
            elif "memory" in controllers.split(","):
                top, limit, used, cache = "sys/fs/cgroup/memory", *_MEMORY_FILES_1
            else:
                continue
            # In a container, the path may be one of the machine's, and its files are at the top.
            place = PurePosixPath(top, inside.lstrip("/"))
            for group in (place, *place.parents[: len(place.parts) - len(Path(top).parts)]):
                most, now = self._text(f"{group}/{limit}"), self._text(f"{group}/{used}")
                if most is None or now is None or not most.strip().isdigit():
                    continue
                again = re.search(
                    rf"^{cache} (\d+)$", self._text(f"{group}/memory.stat") or "", re.M
                )
                yield max(0, int(most) - int(now) + (int(again[1]) if again else 0))

    def busy_cpu_s(self) -> float | None:
        """CPU seconds used by all processes since boot, stolen time included."""
        return cpu_seconds(self._text("proc/stat") or "")

    def resident_bytes(self) -> int | None:
        """Memory that this process has in use."""
        fields = (self._text("proc/self/statm") or "").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None

    def temperature_c(self) -> float | None:
        """Degrees Celsius of the warmest sensor."""
        shown = [
            *self._numbers("sys/class/thermal", "thermal_zone*/temp"),
            *self._numbers("sys/class/hwmon", "hwmon*/temp*_input"),
        ]
        # Unconnected sensors read 0 or far below.
        plausible = [value * _MILLI for value in shown if 5_000 < value < 150_000]
        return round(max(plausible), 1) if plausible else None

    def energy_j(self) -> float | None:
        """Joules used by the processor packages; the counters overflow now and then."""
        counters = self._numbers("sys/class/powercap", "*-rapl:[0-9]/energy_uj")
        return sum(counters) * _MICRO if counters else None

    def power_w(self) -> float | None:
        """Watts on the board's own meters."""
        meters = self._numbers("sys/class/hwmon", "hwmon*/power*_input") or self._numbers(
            "sys/class/hwmon", "hwmon*/power*_average"
        )
        return sum(meters) * _MICRO if meters else None

    def _numbers(self, folder: str, pattern: str) -> list[int]:
        """The numbers in all matching files that can be read."""
        found = []
        for path in sorted((self.root / folder).glob(pattern)):
            text = self._text(str(path.relative_to(self.root)))
            if text is not None and text.strip().lstrip("-").isdecimal():
                found.append(int(text))
        return found

    def _text(self, name: str) -> str | None:
        try:
            return (self.root / name).read_text()
        except (OSError, UnicodeDecodeError):
            return None


#: NVIDIA's tool, for the GPU that onnxruntime uses: degrees Celsius, watts, name.
_NVIDIA = ("nvidia-smi", "--id=0", "--query-gpu=temperature.gpu,power.draw,name",
           "--format=csv,noheader,nounits")  # fmt: skip
_NVIDIA_S = 5.0


def query_nvidia() -> str:
    """Temperature, power and name of the first NVIDIA GPU by its tool; empty without one."""
    try:
        done = subprocess.run(
            _NVIDIA, capture_output=True, text=True, timeout=_NVIDIA_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


@dataclass(frozen=True, slots=True)
class NvidiaMachine(Machine):
    """Temperature and power of the first NVIDIA GPU, without one of the machine."""

    query: Callable[[], str] = query_nvidia

    def processor(self) -> str:
        """The processor's or board's name, and the GPU's."""
        *_, name = self.query().strip().split(", ", 2)
        return f"{Machine.processor(self)}, {name}" if name else Machine.processor(self)

    def temperature_c(self) -> float | None:
        """Degrees Celsius of the GPU."""
        value = self._field(0)
        return Machine.temperature_c(self) if value is None else value

    def power_w(self) -> float | None:
        """Watts of the GPU's board at this moment."""
        value = self._field(1)
        return Machine.power_w(self) if value is None else value

    def _field(self, place: int) -> float | None:
        """A number in the tool's output; None for `[N/A]`."""
        try:
            return float(self.query().split(",")[place])
        except (ValueError, IndexError):
            return None


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`."""
    return shutil.disk_usage(folder).free
