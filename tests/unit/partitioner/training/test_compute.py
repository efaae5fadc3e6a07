"""Threads wait asleep, freed memory is kept, and bf16 is chosen only where it is quick."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from mdp.errors import InputError  # noqa: E402
from partitioner.training.compute import own_threads, quicker_autocast, training_device  # noqa: E402

pytestmark = pytest.mark.torch


def in_new_process(code: str, **variables: str) -> str:
    """Output and errors of Python code, without this process's policy of waiting."""
    plain = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=plain | variables, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_threads_are_as_asked_and_wait_asleep() -> None:
    code = (
        "import os\n"
        "from partitioner.training.compute import use_threads\n"
        "use_threads(1)\n"
        "import torch\n"
        "print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    assert in_new_process(code) == "1 PASSIVE\n"


def test_memory_that_was_freed_is_used_again() -> None:
    """Pages that the kernel has to clear: those of the first allocation alone."""
    code = (
        "import ctypes, resource, sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(set_num_threads=lambda _: None)\n"
        "from partitioner.training.compute import use_threads\n"
        "use_threads(1)\n"
        "library, size = ctypes.CDLL(None), 64 * 2**20\n"
        "library.malloc.restype = ctypes.c_void_p\n"
        "library.free.argtypes = [ctypes.c_void_p]\n"
        "def touch():\n"
        "    place = library.malloc(size)\n"
        "    ctypes.memset(place, 1, size)\n"
        "    library.free(place)\n"
        "touch()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4):\n"
        "    touch()\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "print((after - before) * resource.getpagesize() < size)"
    )
    assert in_new_process(code) == "True\n"


@pytest.mark.parametrize(
    ("threads", "variables", "warned"),
    [(2, {}, 1), (1, {}, 0), (2, {"OMP_WAIT_POLICY": "PASSIVE"}, 0)],
)
def test_torch_that_was_imported_too_early_is_warned_of_once(
    threads: int, variables: dict[str, str], warned: int
) -> None:
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(set_num_threads=lambda _: None)\n"
        "from partitioner.training.compute import use_threads\n"
        f"use_threads({threads})\n"
        f"use_threads({threads})"
    )
    said = in_new_process(code, **variables)
    assert said.count("torch was imported before OMP_WAIT_POLICY=PASSIVE could be set") == warned


@pytest.mark.parametrize(
    ("avx512", "amx", "chosen"),
    [(False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16")],
)
def test_bf16_only_in_hardware(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert quicker_autocast() == chosen


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_with_a_gpu_it_is_the_gpu_that_decides(
    monkeypatch: pytest.MonkeyPatch, supported: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert quicker_autocast() == chosen
    # But of what the processor computes, as the features of frozen networks.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert quicker_autocast(on_processor=True) == "fp32"


def test_without_a_gpu_training_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device() == torch.device("cpu")


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert training_device() == torch.device("cuda", 0)
    for name, value in (("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert training_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="--nproc-per-node: expected at most 2, one process per"):
        training_device()


def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert own_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert own_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert own_threads() == 1
