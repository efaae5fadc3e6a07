"""The end-to-end benchmark: being told to stop is never lost, and cleaning up is not disturbed."""

import signal
import subprocess
import sys

import pytest

from benchmarks.end_to_end.leaving import undisturbed

# A signal inside a destructor raises there, and Python goes on.
LOST = """
import signal, sys, threading
from benchmarks.end_to_end.leaving import leave_when_told
class Odd:
    def __del__(self):
        signal.raise_signal(signal.{name})
leave_when_told()
try:
    odd = Odd()
    del odd
    print("went on", flush=True)
    signal.pause()
    signal.pause()
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", -signal.SIGINT)]
)
def test_a_signal_that_python_swallows_comes_again(name: str, code: int) -> None:
    words = [sys.executable, "-c", LOST.format(name=name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "went on\ncleaned up\n"
    assert done.returncode == code


def test_cleaning_up_is_not_disturbed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
