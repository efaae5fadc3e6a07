"""Pins this process to some of the machine's cores, so that others keep theirs."""

import os
from pathlib import Path

from mdp.errors import InputError


def cores_in(text: str) -> frozenset[int]:
    """The cores that `text` names, as in `0,2-3`; raises InputError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (_is_number(first) and _is_number(last or first)) or (dash and not last):
            raise _format_error(text)
        low, high = int(first), int(last or first)
        if low > high:
            raise _format_error(text)
        cores.update(range(low, high + 1))
    return frozenset(cores)


def pin_to_cores(text: str) -> int:
    """Pin this process's threads, and later ones, to the cores in `text`; returns their number.

    Raises InputError where the system cannot pin a process, or not to these cores.
    """
    cores = cores_in(text)
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("--cpus: this system cannot pin a process to cores")
    allowed = os.sched_getaffinity(0)
    if not cores <= allowed:
        named = ", ".join(map(str, sorted(allowed)))
        raise InputError(f"--cpus {text}: expected some of the cores {named}")
    try:
        # Imported libraries have started threads.
        for thread in _threads():
            os.sched_setaffinity(thread, cores)
    except OSError as error:
        raise InputError(f"--cpus {text}: {error.strerror}") from error
    return len(cores)


def _threads() -> list[int]:
    """The process's threads; where the kernel lists none, 0, the calling one."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4


def _format_error(text: str) -> InputError:
    return InputError(f"--cpus: expected numbers of cores as in 0,2-3, got {text!r}")
