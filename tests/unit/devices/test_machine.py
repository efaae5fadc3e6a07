"""Facts of a Linux system, read from a folder that looks like one."""

import os
from pathlib import Path

import pytest

from devices.machine import Machine, NvidiaMachine, query_nvidia

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def machine(root: Path, **files: str) -> Machine:
    """A system with these files; `__` in a name stands for a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Machine(root)


def test_a_system_that_shows_nothing_is_no_error(tmp_path: Path) -> None:
    empty = Machine(tmp_path)
    assert empty.available_bytes() is None
    assert empty.busy_cpu_s() is None
    assert empty.resident_bytes() is None
    assert empty.temperature_c() is None
    assert empty.energy_j() is None
    assert empty.power_w() is None
    assert empty.processor()
    assert not empty.is_virtual()


def test_a_board_s_name_comes_before_its_processor_s(tmp_path: Path) -> None:
    info = "processor\t: 0\nmodel name\t: Intel(R) N100\nflags\t: fpu hypervisor\n"
    found = machine(tmp_path, proc__cpuinfo=info)
    assert found.processor() == "Intel(R) N100"
    assert found.is_virtual()
    board = tmp_path / "proc/device-tree/model"
    board.parent.mkdir()
    board.write_text("Raspberry Pi 5 Model B Rev 1.0\0")
    assert found.processor() == "Raspberry Pi 5 Model B Rev 1.0"


def test_a_computer_s_kind_is_told_and_no_serial_number(tmp_path: Path) -> None:
    assert machine(tmp_path / "empty").board() == ""
    told = {
        "sys__class__dmi__id__sys_vendor": "Maker\n",
        "sys__class__dmi__id__product_name": "Mini 3\n",
        "sys__class__dmi__id__product_serial": "1234\n",
    }
    assert machine(tmp_path / "mini", **told).board() == "Maker Mini 3"
    virtual = machine(tmp_path / "virtual", proc__cpuinfo="flags\t: fpu hypervisor\n", **told)
    assert virtual.board() == "virtual machine"
    model = "Raspberry Pi 5 Model B Rev 1.0\0"
    assert machine(tmp_path / "pi", **{"proc__device-tree__model": model}).board() == model[:-1]


def test_memory_and_busy_time(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        proc__meminfo="MemTotal: 8000 kB\nMemAvailable: 6000 kB\n",
        proc__stat="cpu 100 20 30 9999 999 4 5 6 50 60\ncpu0 1 1 1 1 1 1 1 1 1 1\n",
        proc__self__statm="5000 1200 300 1 0 900 0\n",
    )
    assert found.available_bytes() == 6_144_000
    # Idle and waiting do not count; what a hypervisor took does; guests are in user time already.
    assert found.busy_cpu_s() == pytest.approx(165 * TICK_S)
    assert found.resident_bytes() == 1200 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        # A service's own limit; a page that was read from a file can be had again.
        ("0::/a.slice/b", {"a.slice/b": ("5000000", 1_000_000, 200_000)}, 4_200_000),
        # A slice's.
        ("0::/a/b", {"a": ("3000000", 1_000_000, 0), "a/b": ("max", 1_000_000, 0)}, 2_000_000),
        # A container's, whose path is the machine's.
        ("0::/of/the/machine", {".": ("2000000", 2_500_000, 0)}, 0),
        ("0::/", {".": ("9000000", 0, 0)}, 6_144_000),
        ("3:cpu:/x\n2:memory:/a", {"memory/a": ("4000000", 1_000_000, 100_000)}, 3_100_000),
    ],
)
def test_memory_is_bounded_by_control_groups(
    tmp_path: Path, groups: str, files: dict[str, tuple[str, int, int]], left: int
) -> None:
    found = machine(tmp_path, proc__meminfo="MemAvailable: 6000 kB\n", proc__self__cgroup=groups)
    first = "memory:" in groups
    for name, (limit, used, cache) in files.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (folder / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        stat = f"active_file 5\n{'total_' if first else ''}inactive_file {cache}\nanon 7\n"
        (folder / "memory.stat").write_text(stat)
    assert found.available_bytes() == left


def test_the_warmest_plausible_sensor_counts(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        sys__class__thermal__thermal_zone0__temp="41000\n",
        sys__class__thermal__thermal_zone1__temp="-274000\n",
        sys__class__thermal__thermal_zone2__temp="0\n",
        sys__class__hwmon__hwmon3__temp1_input="63500\n",
        sys__class__hwmon__hwmon3__temp2_input="garbage\n",
    )
    assert found.temperature_c() == 63.5


def test_energy_counters_of_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        **{
            "sys__class__powercap__intel-rapl:0__energy_uj": "2500000\n",
            "sys__class__powercap__intel-rapl:1__energy_uj": "1500000\n",
            "sys__class__powercap__intel-rapl:0:0__energy_uj": "900000\n",
        },
    )
    assert found.energy_j() == 4.0


def test_a_board_s_power_meters_are_added(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        sys__class__hwmon__hwmon1__power1_input="4200000\n",
        sys__class__hwmon__hwmon1__power2_input="800000\n",
    )
    assert found.power_w() == 5.0


def test_a_counter_that_may_not_be_read_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    found = machine(tmp_path, **{"sys__class__powercap__intel-rapl:0__energy_uj": "1"})
    counter = next(tmp_path.glob("sys/class/powercap/*/energy_uj"))
    counter.unlink()
    counter.mkdir()
    assert found.energy_j() is None


@pytest.mark.parametrize(
    ("told", "temperature_c", "power_w"),
    [
        ("31, 68.71, NVIDIA H100\n", 31.0, 68.71),
        ("47, [N/A], NVIDIA T4\n", 47.0, 9.0),
        ("", 55.0, 9.0),
    ],
)
def test_a_gpu_s_tool_comes_before_the_machine_s_sensors(
    tmp_path: Path, told: str, temperature_c: float, power_w: float
) -> None:
    machine(
        tmp_path,
        sys__class__thermal__thermal_zone0__temp="55000\n",
        sys__class__hwmon__hwmon0__power1_input="9000000\n",
    )
    found = NvidiaMachine(tmp_path, lambda: told)
    assert found.temperature_c() == temperature_c
    assert found.power_w() == power_w


def test_an_absent_gpu_tool_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_nvidia() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert query_nvidia() == ""
    tool.write_text("#!/bin/sh\necho 31, 68.71, NVIDIA RTX A2000, 12GB\n")
    assert NvidiaMachine(tmp_path).power_w() == 68.71


def test_a_gpu_s_name_stands_beside_the_processor_s(tmp_path: Path) -> None:
    machine(tmp_path, proc__cpuinfo="model name\t: Intel(R) N100\n")
    assert NvidiaMachine(tmp_path, lambda: "31, 68.71, NVIDIA H100\n").processor() == (
        "Intel(R) N100, NVIDIA H100"
    )
    assert NvidiaMachine(tmp_path, lambda: "").processor() == "Intel(R) N100"
