"""What a Linux system shows of itself: processor, memory, who is busy, temperature, power.

Elsewhere, and where a file is missing or may not be read, the answer is None: a probe then measures
without it and says so.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MICRO, _MILLI = 1e-6, 1e-3


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

    def is_virtual(self) -> bool:
        """Whether this is a virtual machine that says so."""
        return "hypervisor" in (self._text("proc/cpuinfo") or "")

    def available_bytes(self) -> int | None:
        """Memory that can be had without swapping."""
        for line in (self._text("proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None

    def busy_cpu_s(self) -> float | None:
        """CPU seconds that everything has used since the machine started, stolen ones included."""
        fields = (self._text("proc/stat") or "").split("\n", 1)[0].split()[1:9]
        if len(fields) < 8:
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

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
        # Sensors that are not connected show nonsense, often 0 or far below.
        plausible = [value * _MILLI for value in shown if 5_000 < value < 150_000]
        return round(max(plausible), 1) if plausible else None

    def energy_j(self) -> float | None:
        """Joules that the processor packages have taken; the counter starts anew now and then."""
        counters = self._numbers("sys/class/powercap", "*-rapl:[0-9]/energy_uj")
        return sum(counters) * _MICRO if counters else None

    def power_w(self) -> float | None:
        """Watts that the board's own meters show at this moment."""
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


#: What NVIDIA's tool is asked, of the GPU that onnxruntime takes: degrees Celsius, watts, its name.
_NVIDIA = ("nvidia-smi", "--id=0", "--query-gpu=temperature.gpu,power.draw,name",
           "--format=csv,noheader,nounits")  # fmt: skip
_NVIDIA_S = 5.0


def ask_nvidia() -> str:
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
    """Temperature and power are the first NVIDIA GPU's, and else the machine's."""

    ask: Callable[[], str] = ask_nvidia

    def processor(self) -> str:
        """The processor's or board's name, and the GPU's."""
        *_, name = self.ask().strip().split(", ", 2)
        return f"{Machine.processor(self)}, {name}" if name else Machine.processor(self)

    def temperature_c(self) -> float | None:
        """Degrees Celsius of the GPU."""
        told = self._told(0)
        return Machine.temperature_c(self) if told is None else told

    def power_w(self) -> float | None:
        """Watts of the GPU's board at this moment."""
        told = self._told(1)
        return Machine.power_w(self) if told is None else told

    def _told(self, place: int) -> float | None:
        """A number of those that the tool tells; None where it has none, as `[N/A]`."""
        try:
            return float(self.ask().split(",")[place])
        except (ValueError, IndexError):
            return None


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk_bytes(folder: Path) -> int:
    """What can still be written where `folder` lies."""
    return shutil.disk_usage(folder).free
