"""Processes that only compute, beside a measurement."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Ends with its parent, also where that was killed.
_LOOP = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    sum(range(20_000))
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute beside the block, of this one's priority."""
    command = [sys.executable, "-S", "-c", _LOOP]
    beside: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            beside.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in beside:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in beside:
            process.kill()
        for process in beside:
            process.communicate()


def loads(beside: int) -> tuple[int, ...]:
    """Numbers of busy processes to take turns: none, and `beside` unless that is 0."""
    if beside < 0:
        sys.exit(f"--beside: expected a number of busy processes, got {beside}")
    return (0, beside) if beside else (0,)


def name_with(name: str, beside: int) -> str:
    """The name of a row that was measured beside so many busy processes."""
    return f"{name}, beside {beside}" if beside else name
